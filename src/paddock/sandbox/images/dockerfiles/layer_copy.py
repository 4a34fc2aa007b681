"""Puts the files of COPY, ADD and WORKDIR into a layer, as root of a user namespace, in a process of its own.

The process mounts the layers below as an overlay, with the new layer on top, and changes its root to it. So links in
the image lead nowhere else, and the kernel writes the layer. The files come as a tar stream (`SourceTree`), from our
process or, for `COPY --from`, from a second process whose root is the other image. `run_copy` is the entry point.
"""

from __future__ import annotations

import bz2
import ctypes
import gzip
import json
import lzma
import os
import stat
import sys
import tarfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.context import ITEM_NAME_HEADER, UNPACK_HEADER, SourceTree

PRELOADED = (bz2, gzip, lzma, zlib)
"""`tarfile` imports them when it needs them. After the change of the root there is nothing to import from."""
CLONE_NEWNS = 0x20000
MS_RDONLY = 1
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
SYS_OPEN_TREE = 428
SYS_MOVE_MOUNT = 429
AT_FDCWD = -100
OPEN_TREE_CLONE = 1
MOVE_MOUNT_F_EMPTY_PATH = 4
MOUNT_POINT = "/tmp"
"""Any folder that every machine has: it is covered in this process only."""
MAX_ACCOUNTS_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20
FOLDER_MODE = 0o755
ACCOUNT_HINT = "add it in a RUN before, or use its number"


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """What to copy. Layers are paths below the folder of the store, lowest first."""

    destination: str
    """Absolute. A slash at the end says that it is a folder."""
    owner: str = ""
    """`--chown`. Empty: root, or the owner in the stage that is copied from."""
    mode: int | None = None
    """`--chmod`."""
    makes_folder_only: bool = False
    """WORKDIR: nothing is copied."""
    store_folder: str = ""
    store_mount: int | None = None
    """The folder of the store as a detached mount, from root: the child may not be able to enter its path."""
    layers: tuple[str, ...] = ()
    upper: str = ""
    work: str = ""
    source_layers: tuple[str, ...] | None = None
    """The layers of the image to copy from. None: the files come over standard input."""
    sources: tuple[str, ...] = ()
    fakes_owners: bool = False
    """There is only one user id: everything belongs to it."""

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def from_json(cls, text: str) -> CopyRequest:
        fields: dict[str, Any] = json.loads(text)
        for name in ("layers", "source_layers", "sources"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)


def run_copy(text: str) -> None:
    """In the child: do it, and print an answer as JSON."""
    answer: dict[str, Any] = {}
    try:
        _copy(CopyRequest.from_json(text))
    except ImageError as error:
        answer = {"error": error.message, "hint": error.hint}
    except (OSError, tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, MemoryError) as error:
        answer = {"error": str(error), "hint": "look at the files that are copied"}
    print(json.dumps(answer), flush=True)


def _copy(request: CopyRequest) -> None:
    os.umask(0)
    _mount_store(request)
    source: IO[bytes] = sys.stdin.buffer
    child = 0
    if request.source_layers is not None:
        child, source = _start_source(request)
    _enter_root(request.layers, request.upper, request.work)
    writer = LayerWriter(request)
    try:
        if request.makes_folder_only:
            writer.make_folders(request.destination)
        else:
            with tarfile.open(fileobj=source, mode="r|") as archive:
                writer.write(archive)
    finally:
        if child:
            source.close()
            os.waitpid(child, 0)


def _start_source(request: CopyRequest) -> tuple[int, IO[bytes]]:
    """A process that writes the files of another image to a pipe. Its failure is a member `error` in the stream."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, os.fdopen(reading, "rb")
    try:
        os.close(reading)
        _unshare_mounts()
        _enter_root(request.source_layers or ())
        tree = SourceTree("/")
        with os.fdopen(writing, "wb") as output:
            try:
                items = [item for name in request.sources for item in tree.select(name)]
                tree.write_archive(items, output, keeps_owners=True)
            except FileNotFoundError as error:
                _write_error(output, f"{error.args[0]!r} is not there")
            except (OSError, ImageError) as error:
                _write_error(output, str(error))
    finally:
        os._exit(0)


def _write_error(output: IO[bytes], message: str) -> None:
    with tarfile.open(fileobj=output, mode="w|") as archive:
        member = tarfile.TarInfo("error")
        member.pax_headers = {ITEM_NAME_HEADER: message}
        archive.addfile(member)


def detached_mount(folder: str) -> int:
    """In our process, as root: a descriptor of the folder that can be mounted in another mount namespace."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC
    descriptor = _libc().syscall(SYS_OPEN_TREE, AT_FDCWD, folder.encode(), flags)
    _check(min(descriptor, 0), f"a mount of {folder}")
    return int(descriptor)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _unshare_mounts() -> None:
    _check(_libc().unshare(CLONE_NEWNS), "a mount namespace")
    _check(_libc().mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "a private mount namespace")


def _mount_store(request: CopyRequest) -> None:
    """Make the store the work folder, in a mount namespace of its own: an overlay takes layers only from there."""
    _unshare_mounts()
    point = MOUNT_POINT.encode()
    if request.store_mount is not None:
        result = _libc().syscall(SYS_MOVE_MOUNT, request.store_mount, b"", AT_FDCWD, point, MOVE_MOUNT_F_EMPTY_PATH)
    else:
        result = _libc().mount(request.store_folder.encode(), point, None, MS_BIND | MS_REC, None)
    _check(result, "a mount of the store")
    os.chdir(MOUNT_POINT)


def _enter_root(layers: tuple[str, ...], upper: str = "", work: str = "") -> None:
    """Make an overlay of the layers the root of this process. Without `upper` it is read-only."""
    if upper and not layers:
        os.chdir(upper)
    elif not upper and len(layers) == 1:
        os.chdir(layers[0])
    elif not layers:
        _check(_libc().mount(b"tmpfs", MOUNT_POINT.encode(), b"tmpfs", MS_RDONLY, None), "an empty root")
        os.chdir(MOUNT_POINT)
    else:
        options = ["userxattr", "lowerdir=" + ":".join(reversed(layers))]
        options += [f"upperdir={upper}", f"workdir={work}"] if upper else []
        data = ",".join(options).encode()
        flags = 0 if upper else MS_RDONLY
        _check(_libc().mount(b"overlay", MOUNT_POINT.encode(), b"overlay", flags, data), "an overlay")
        os.chdir(MOUNT_POINT)
    os.chroot(".")
    os.chdir("/")


def _check(result: int, purpose: str) -> None:
    if result != 0:
        reason = os.strerror(ctypes.get_errno())
        raise ImageError(f"{purpose} cannot be made: {reason}", hint="paddock doctor shows what this machine lacks")


class LayerWriter:
    """Writes members of the stream below the root of this process."""

    def __init__(self, request: CopyRequest) -> None:
        self._request = request
        self._owner = find_owner(request.owner) if request.owner else None
        self._top = ""
        """Where the item that is being written goes."""
        self._folder_times: list[tuple[str, float]] = []

    def write(self, archive: tarfile.TarFile) -> None:
        for member in archive:
            if member.name == "error":
                raise ImageError(str(member.pax_headers[ITEM_NAME_HEADER]), hint="check the names in the other stage")
            _, _, relative = member.name.partition("/")
            is_first = not relative
            if UNPACK_HEADER in member.pax_headers:
                self._unpack(archive, member)
                continue
            if is_first:
                self._top = self._find_top(member)
            path = os.path.join(self._top, relative) if relative else self._top
            self._write_member(archive, member, path, is_first=is_first)
        for path, seconds in reversed(self._folder_times):
            os.utime(path, (seconds, seconds))

    def _find_top(self, member: tarfile.TarInfo) -> str:
        """Where an item goes: a folder's content to the destination, a file there or into it, as in Docker."""
        destination = self._request.destination
        if member.isdir():
            self.make_folders(os.path.dirname(destination.rstrip("/")) or "/")
            return destination.rstrip("/") or "/"
        if destination.endswith("/") or os.path.isdir(destination):
            self.make_folders(destination)
            return os.path.join(destination, str(member.pax_headers[ITEM_NAME_HEADER]))
        self.make_folders(os.path.dirname(destination))
        return destination

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it. New ones get the owner of the copy."""
        done = "/"
        for part in path.split("/"):
            done = os.path.join(done, part)
            if os.path.isdir(done):
                continue
            try:
                os.mkdir(done, FOLDER_MODE)
            except FileExistsError:
                raise ImageError(f"{done} is there, and is no folder", hint="choose another destination") from None
            self._change_owner(done, None)

    def _write_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, *, is_first: bool) -> None:
        if member.isdir():
            self._write_folder(member, path, is_first=is_first)
            return
        if os.path.isdir(path) and not os.path.islink(path):
            raise ImageError(f"{path} is a folder, and a file would replace it", hint="choose another destination")
        with suppress(FileNotFoundError):
            os.unlink(path)
        if member.issym():
            os.symlink(member.linkname, path)
            self._change_owner(path, member)
        elif member.isreg():
            self._write_file(archive, member, path)
        else:
            raise ImageError(f"{member.name} is neither a file, a folder nor a link", hint="leave it out")
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _write_file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
        content = archive.extractfile(member)
        assert content is not None
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            while chunk := content.read(CHUNK_BYTES):
                file.write(chunk)
        self._change_owner(path, member)
        os.chmod(path, self._mode(member))

    def _write_folder(self, member: tarfile.TarInfo, path: str, *, is_first: bool) -> None:
        try:
            os.mkdir(path)
        except FileExistsError:
            exists = os.path.isdir(path) if is_first else stat.S_ISDIR(os.lstat(path).st_mode)
            if not exists:
                raise ImageError(f"{path} is there, and is no folder", hint="choose another destination") from None
            # As in Docker, a destination that exists keeps its mode, and folders below it do not.
            if not is_first:
                os.chmod(path, self._mode(member))
            return
        self._change_owner(path, member)
        os.chmod(path, self._mode(member))
        self._folder_times.append((path, member.mtime))

    def _mode(self, member: tarfile.TarInfo) -> int:
        return member.mode & 0o7777 if self._request.mode is None else self._request.mode

    def _change_owner(self, path: str, member: tarfile.TarInfo | None) -> None:
        uid, gid = self._owner or ((member.uid, member.gid) if member is not None else (0, 0))
        if not self._request.fakes_owners:
            os.chown(path, uid, gid, follow_symlinks=False)

    # -- archives -------------------------------------------------------------------------------------

    def _unpack(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """ADD of a local archive: its content goes into the destination, which is a folder."""
        destination = self._request.destination.rstrip("/") or "/"
        self.make_folders(destination)
        links: dict[str, str] = {}
        with tarfile.open(fileobj=archive.extractfile(member), mode="r|*") as inner:
            for one in inner:
                parts = [part for part in one.name.split("/") if part not in ("", ".")]
                if ".." in parts:
                    raise ImageError(f"the archive has a file {one.name!r}", hint="remove .. from its names")
                if not parts:
                    continue
                path = os.path.join(destination, *parts)
                self.make_folders(os.path.dirname(path))
                if one.islnk():
                    self._link(links.get(os.path.normpath(one.linkname)), path, one)
                    continue
                self._write_member(inner, one, path, is_first=False)
                links[os.path.normpath(one.name)] = path

    def _link(self, source: str | None, path: str, member: tarfile.TarInfo) -> None:
        if source is None:
            raise ImageError(
                f"{member.name!r} links to {member.linkname!r}, which is not in the archive", hint="pack it"
            )
        with suppress(FileNotFoundError):
            os.unlink(path)
        os.link(source, path, follow_symlinks=False)


def find_owner(text: str) -> tuple[int, int]:
    """User and group id of `USER[:GROUP]`, by name or number, from the accounts of the root."""
    user, _, group = text.partition(":")
    accounts = {row[0]: row for row in _read_accounts("/etc/passwd")}
    if user.isdigit():
        uid, gid = int(user), int(user)
    elif user in accounts:
        uid, gid = int(accounts[user][2]), int(accounts[user][3])
    else:
        raise ImageError(f"there is no user {user!r} in /etc/passwd", hint=ACCOUNT_HINT)
    if not group:
        return uid, gid
    if group.isdigit():
        return uid, int(group)
    groups = {row[0]: row for row in _read_accounts("/etc/group")}
    if group not in groups:
        raise ImageError(f"there is no group {group!r} in /etc/group", hint=ACCOUNT_HINT)
    return uid, int(groups[group][2])


def _read_accounts(path: str) -> list[list[str]]:
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_ACCOUNTS_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    rows = [line.split(":") for line in text.splitlines()]
    return [row for row in rows if len(row) >= 4 and row[2].isdigit() and (row[3].isdigit() or "group" in path)]
