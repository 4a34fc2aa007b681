"""The files of a sandbox, reached through one open folder.

What is inside belongs to untrusted code, so every step of a path is opened by itself (openat, O_NOFOLLOW) and no link
is ever followed. All functions take a folder descriptor and the parts of a path. The owner of a local sandbox calls
them in a thread, because they block; in a sandbox elsewhere the guest calls them (`FileRequests`).
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import stat
import tarfile
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.sandbox.guest.entry import HOME, Entry
from paddock.sandbox.guest.verifier_policy import leads_to_the_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import Any, TypeAlias

    from paddock.sandbox.guest.multiplexer import Multiplexer, Request

    WalkedEntry: TypeAlias = tuple[str, int, os.stat_result]
    """The path of an entry, a descriptor of the folder that it is in, its status."""

FILE_ITSELF = "."
"""The name of the only member in the archive of a file."""
CLOSED_FOLDERS = ("proc", "sys", "dev")
"""Of the root of an image: no files of it."""
DEEPEST_FOLDER = 200
MOST_LINKS = 40
CAPABILITY_VERSION = 0x20080522
DISK_FULL_HINT = "raise SandboxLimits.disk_bytes, or write less"
STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(root: int, parts: Sequence[str], limit: int) -> bytes:
    with (
        reported_errors(parts),
        entered(root, parts[:-1]) as folder,
        opened(parts[-1], READ_FILE, folder) as descriptor,
    ):
        return read_regular(descriptor, "/".join(parts), limit)


def write_file(root: int, parts: Sequence[str], data: bytes, mode: int) -> None:
    with (
        reported_errors(parts),
        entered(root, parts[:-1], create=True) as folder,
        opened(parts[-1], WRITE_FILE, folder) as descriptor,
    ):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SandboxError(f"{'/'.join(parts)} is not a regular file")
        os.ftruncate(descriptor, 0)
        write_all(descriptor, data)
        os.fchmod(descriptor, mode & 0o777)


def list_folder(root: int, parts: Sequence[str], limit: int) -> list[Entry]:
    entries: list[Entry] = []
    with reported_errors(parts), entered(root, parts) as folder:
        for path, _, status in walk(folder):
            if len(entries) == limit:
                raise SandboxError(f"{'/'.join(parts)} holds more than {limit} entries")
            entries.append(Entry(path, kind_of(status), status.st_size, stat.S_IMODE(status.st_mode)))
    return entries


def pack_folder(root: int, parts: Sequence[str], limit: int, exclude: Sequence[str] = ()) -> bytes:
    """A folder as an archive, without what the patterns `exclude`. A file gives one whose only member is `.`."""
    buffer = io.BytesIO()
    name = "/".join(parts) or "the home"
    with (
        reported_errors(parts),
        packable(root, parts, exclude) as entries,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, parent, status in entries:
            member = tarfile.TarInfo(path)
            member.mode = stat.S_IMODE(status.st_mode) & 0o777
            base = path.rpartition("/")[2] if path != FILE_ITSELF else parts[-1]
            content = b""
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(status.st_mode):
                member.type = tarfile.SYMTYPE
                member.mode = 0o777
                member.linkname = os.readlink(base, dir_fd=parent)
            elif stat.S_ISREG(status.st_mode):
                with opened(base, READ_FILE, parent) as descriptor:
                    content = read_regular(descriptor, path, limit - buffer.tell())
                member.size = len(content)
            else:
                continue
            archive.addfile(member, io.BytesIO(content))
            if buffer.tell() > limit:
                raise too_big(name, limit)
    return buffer.getvalue()


@contextmanager
def packable(root: int, parts: Sequence[str], exclude: Sequence[str]) -> Iterator[Iterable[WalkedEntry]]:
    """What `walk` yields for a folder. For a file, the file alone, as `.`."""
    if parts:
        with entered(root, parts[:-1]) as parent:
            status = os.stat(parts[-1], dir_fd=parent, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield [(FILE_ITSELF, parent, status)]
                return
    with entered(root, parts) as folder:
        yield walk(folder, exclude)


def unpack_folder(root: int, parts: Sequence[str], archive: bytes, top: str | None = str(HOME)) -> None:
    """Unpack an archive. `top` is the path of `root`: links to files of the tests are left out, unless it is None."""
    modes: list[tuple[list[str], int]] = []
    with reported_errors(parts), entered(root, parts, create=True) as folder:
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
                for member in members:
                    names = inner_parts(member.name)
                    path = None if top is None else "/".join([top, *parts, *names[:-1]])
                    is_link = member.issym() and path is not None
                    if names and not (is_link and leads_to_the_tests(str(path), member.linkname)):
                        unpack_member(folder, names, members, member)
                        if member.isdir():
                            modes.append((names, member.mode & 0o777))
        except tarfile.TarError as error:
            raise SandboxError(f"this is not a tar archive: {error}") from error
        # Last, and inner folders first: a folder that may not be written to could not be filled.
        for names, mode in reversed(modes):
            with entered(folder, names[:-1]) as parent, opened(names[-1], READ_FOLDER, parent) as descriptor:
                os.fchmod(descriptor, mode)


def unpack_member(folder: int, names: list[str], members: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    if not (member.isreg() or member.isdir() or member.issym()):
        raise SandboxError(f"the archive holds {member.name}, which is not a file, a folder or a link")
    if member.isdir():
        with entered(folder, names, create=True):
            return
    with entered(folder, names[:-1], create=True) as parent:
        remove(names[-1], parent)
        if member.issym():
            os.symlink(member.linkname, names[-1], dir_fd=parent)
            return
        content = members.extractfile(member)
        with opened(names[-1], WRITE_FILE | os.O_EXCL, parent) as descriptor:
            write_all(descriptor, content.read() if content is not None else b"")
            os.fchmod(descriptor, member.mode & 0o777)


def inner_parts(name: str) -> list[str]:
    """The parts of a relative path. Refuses one that leads out of its folder."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts:
        raise SandboxError(f"{name!r} leads outside of its folder")
    return parts


# -- steps ------------------------------------------------------------------------------------------------


@contextmanager
def entered(root: int, parts: Sequence[str], *, create: bool = False) -> Iterator[int]:
    """A descriptor of the folder at the end of `parts`, good for steps from it."""
    current = os.open(".", STEP, dir_fd=root)
    try:
        for part in parts:
            following = step(current, part, create)
            os.close(current)
            current = following
        yield current
    finally:
        os.close(current)


def resolve_links(root: int, parts: Sequence[str]) -> tuple[str, ...]:
    """The same path without links, as a process sees it whose root is `root`. What is missing stays as it is.

    A link that is made meanwhile is not followed: whoever uses the result takes every step with O_NOFOLLOW.
    """
    resolved: list[str] = []
    pending = list(parts)
    links_left = MOST_LINKS
    while pending:
        part = pending.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            resolved = resolved[:-1]
            continue
        try:
            with entered(root, resolved) as folder:
                target = os.readlink(part, dir_fd=folder)
        except OSError:
            resolved.append(part)
            continue
        links_left -= 1
        if links_left < 0:
            raise SandboxError(f"{'/'.join(parts)} leads over more than {MOST_LINKS} links")
        if target.startswith("/"):
            resolved = []
        pending = [*target.split("/"), *pending]
    return tuple(resolved)


def resolve_in_image(root: int, parts: Sequence[str], *, is_file: bool) -> tuple[str, ...]:
    """The parts of a path below the root of an image: links on the way are followed, within the root.

    The last part of the path of a file is left as it is. Raises SandboxError for what is no file of the image."""
    folder, name = (parts[:-1], parts[-1:]) if is_file else (parts, ())
    resolved = (*resolve_links(root, folder), *name)
    if resolved and resolved[0] in CLOSED_FOLDERS:
        raise SandboxError(f"/{'/'.join(resolved)} is no file of the image", hint="run a command to read it")
    return resolved


def step(folder: int, part: str, create: bool) -> int:
    try:
        return os.open(part, STEP, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise
    os.mkdir(part, 0o755, dir_fd=folder)
    return os.open(part, STEP, dir_fd=folder)


@contextmanager
def opened(name: str, flags: int, folder: int) -> Iterator[int]:
    try:
        descriptor = os.open(name, flags, 0o644, dir_fd=folder)
    except PermissionError:
        descriptor = open_despite_mode(name, flags, folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_despite_mode(name: str, flags: int, folder: int) -> int:
    """Open a file that its own mode forbids to open: a task may ask for such a mode."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(handle)
        path = f"/proc/self/fd/{handle}"
        os.chmod(path, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        descriptor = os.open(name, flags, dir_fd=folder)
        if stat.S_ISREG(status.st_mode):
            os.chmod(path, stat.S_IMODE(status.st_mode))
        return descriptor
    finally:
        os.close(handle)


def walk(folder: int, exclude: Sequence[str] = ()) -> Iterator[WalkedEntry]:
    """Each entry below, without mounts, sorted. Folders that the patterns `exclude` are not entered."""
    with opened(".", READ_FOLDER, folder) as top:
        yield from walk_from(top, "", os.fstat(top).st_dev, 0, exclude)


def walk_from(
    folder: int, prefix: str, device: int, depth: int, exclude: Sequence[str] = ()
) -> Iterator[WalkedEntry]:
    if depth > DEEPEST_FOLDER:
        raise SandboxError(f"folders are nested deeper than {DEEPEST_FOLDER} below {prefix[:80]}…")
    for name in sorted(os.listdir(folder)):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        # Files of an overlay have another device number than its folders, but the same mount.
        if status.st_dev != device and is_mounted(name, folder):
            continue
        if exclude and is_excluded(prefix + name, exclude):
            continue
        yield prefix + name, folder, status
        if stat.S_ISDIR(status.st_mode):
            with opened(name, READ_FOLDER, folder) as inner:
                yield from walk_from(inner, f"{prefix}{name}/", device, depth + 1, exclude)


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """As `tar --exclude`: a pattern matches the end of a path from any of its parts on, and `*` also matches `/`."""
    parts = path.split("/")
    ends = ["/".join(parts[start:]) for start in range(len(parts))]
    return any(fnmatchcase(end, pattern.removeprefix("./").rstrip("/")) for pattern in patterns for end in ends)


def is_mounted(name: str, folder: int) -> bool:
    """Whether an entry belongs to another mount than its folder."""
    try:
        with opened(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, folder) as descriptor:
            return mount_id(descriptor) != mount_id(folder)
    except FileNotFoundError:
        return True


def mount_id(descriptor: int) -> str:
    with open(f"/proc/self/fdinfo/{descriptor}") as file:
        return next(line for line in file if line.startswith("mnt_id:"))


def kind_of(status: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(status.st_mode), "other")


def read_regular(descriptor: int, name: str, limit: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise SandboxError(f"{name} is not a regular file")
    chunks: list[bytes] = []
    left = limit + 1
    # Counted while reading: a file can grow meanwhile.
    while left > 0 and status.st_size <= limit and (chunk := os.read(descriptor, min(left, 1 << 20))):
        chunks.append(chunk)
        left -= len(chunk)
    if status.st_size > limit or left <= 0:
        raise too_big(name, limit)
    return b"".join(chunks)


def write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def remove(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


def too_big(name: str, limit: int) -> SandboxError:
    return SandboxError(f"{name} is larger than {limit} bytes", limit=limit)


@contextmanager
def reported_errors(parts: Sequence[str]) -> Iterator[None]:
    """Raise an OSError about a path as SandboxError; FileNotFoundError stays what it is."""
    name = "/".join(parts) or "the home"
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file in the sandbox", name) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise SandboxError(f"{name} leads over a link or a file that is no folder") from error
        hint = DISK_FULL_HINT if error.errno in (errno.ENOSPC, errno.EFBIG) else None
        raise SandboxError(f"{name}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise SandboxError(f"{name!r} cannot be the name of a file: {error}") from error


@contextmanager
def acting_as(user: int | None, group: int | None = None, *, keeps_rights: bool = False) -> Iterator[None]:
    """In this thread alone, use the filesystem as `user`, so that new files belong to it. The default group has its
    number.

    Its rights are those of `user` too, unless root `keeps_rights`: then files of every user can be opened.
    """
    if user is None:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.setfsgid(user if group is None else group)
    libc.setfsuid(user)
    if keeps_rights:
        raise_capabilities(libc)
    try:
        yield
    finally:
        libc.setfsuid(os.geteuid())
        libc.setfsgid(os.getegid())


def raise_capabilities(libc: ctypes.CDLL) -> None:
    """In this thread, make every capability effective that is permitted: setfsuid has cleared some."""
    head, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(head, sets) == 0:
        # Two blocks of 32 capabilities, each with the effective, the permitted and the inheritable ones.
        sets[0], sets[3] = sets[1], sets[4]
        libc.capset(head, sets)


# -- requests of the owner --------------------------------------------------------------------------------


class FileRequests:
    """Handlers for an owner that does not have the files itself. They act as `user`, who also runs the commands.

    With `on_image`, paths start at the root of an image.
    """

    def __init__(self, multiplexer: Multiplexer, user: int | None, *, on_image: bool = False) -> None:
        self._multiplexer, self._user, self._on_image = multiplexer, user, on_image

    def handlers(self) -> dict[str, Callable[..., Any]]:
        return {
            "read": self.read,
            "write": self.write,
            "list": self.list_folder,
            "pack": self.pack,
            "unpack": self.unpack,
            "place_mounts": self.place_mounts,
        }

    def read(self, request: Request, root: str, parts: list[str], limit: int, into: int) -> None:
        with self._entered(root, parts, is_file=True) as (top, path):
            self._multiplexer.send_content(into, read_file(top, path, limit))

    def write(self, request: Request, root: str, parts: list[str], mode: int, upload: int) -> None:
        data = self._multiplexer.take_upload(upload)
        with self._entered(root, parts, is_file=True) as (top, path):
            write_file(top, path, data, mode)

    def list_folder(self, request: Request, root: str, parts: list[str], limit: int) -> Any:
        with self._entered(root, parts) as (top, path):
            return [[entry.path, entry.kind, entry.size, entry.mode] for entry in list_folder(top, path, limit)]

    def pack(
        self, request: Request, root: str, parts: list[str], limit: int, into: int, exclude: Sequence[str] = ()
    ) -> None:
        with self._entered(root, parts) as (top, path):
            self._multiplexer.send_content(into, pack_folder(top, path, limit, exclude))

    def unpack(self, request: Request, root: str, parts: list[str], upload: int) -> None:
        data = self._multiplexer.take_upload(upload)
        with self._entered(root, parts) as (top, path):
            unpack_folder(top, path, data, None if self._on_image else str(HOME))

    @contextmanager
    def _entered(
        self, root: str, parts: Sequence[str], *, is_file: bool = False
    ) -> Iterator[tuple[int, Sequence[str]]]:
        with acting_as(self._user):
            top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield top, resolve_in_image(top, parts, is_file=is_file) if self._on_image else parts
            finally:
                os.close(top)

    def place_mounts(self, request: Request, archive: str, targets: list[str], fallback: str) -> list[str]:
        """Unpack uploaded mounts, read-only: at their targets, or below `fallback` where that is not possible.

        Each member of the archive begins with the position of its target. Returns where the mounts are now.
        """
        places = []
        for position, target in enumerate(targets):
            folder = os.path.dirname(target)
            try:
                os.makedirs(folder, exist_ok=True)
                is_writable = os.access(folder, os.W_OK)
            except OSError:
                is_writable = False
            below_fallback = os.path.join(fallback, str(position), os.path.basename(target))
            places.append(target if is_writable else below_fallback)
        with tarfile.open(archive) as members:
            for member in members:
                position_text, _, rest = member.name.partition("/")
                place = places[int(position_text)]
                place_member(members, member, os.path.join(place, rest) if rest else place)
        os.unlink(archive)
        for place in places:
            for folder, _, _ in os.walk(place, topdown=False):
                os.chmod(folder, 0o555)
        return places


def place_member(members: tarfile.TarFile, member: tarfile.TarInfo, path: str) -> None:
    """Unpack one member of an archive of our own."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if member.isdir():
        os.makedirs(path, exist_ok=True)
    elif member.issym():
        os.symlink(member.linkname, path)
    elif (content := members.extractfile(member)) is not None:
        with open(path, "wb") as file:
            while chunk := content.read(1 << 20):
                file.write(chunk)
        os.chmod(path, 0o555 if member.mode & 0o111 else 0o444)
