"""The files of a sandbox, reached from the host through one open folder.

What is inside belongs to code that nobody trusts, so every step of a path is taken by itself and no link
is ever followed. A folder descriptor and the parts of a path are all it takes.
Everything here blocks; call it from a thread.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.rollouts.sandbox.base import HOME, Entry
from paddock.rollouts.sandbox.guard import leads_to_the_tests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEEPEST = 200
FULL = "raise SandboxLimits.disk_bytes, or write less"
STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
WRITE_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_file(root: int, parts: Sequence[str], limit: int) -> bytes:
    with said_plainly(parts), entered(root, parts[:-1]) as folder, opened(parts[-1], READ_FILE, folder) as descriptor:
        return read_regular(descriptor, "/".join(parts), limit)


def write_file(root: int, parts: Sequence[str], data: bytes, mode: int) -> None:
    with (
        said_plainly(parts),
        entered(root, parts[:-1], create=True) as folder,
        opened(parts[-1], WRITE_FILE, folder) as descriptor,
    ):
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise SandboxError(f"{'/'.join(parts)} is not a regular file")
        os.ftruncate(descriptor, 0)
        write_all(descriptor, data)
        os.fchmod(descriptor, mode & 0o777)


def list_folder(root: int, parts: Sequence[str], limit: int) -> list[Entry]:
    found: list[Entry] = []
    with said_plainly(parts), entered(root, parts) as folder:
        for path, _, status in walk(folder):
            if len(found) == limit:
                raise SandboxError(f"{'/'.join(parts)} holds more than {limit} entries")
            found.append(Entry(path, kind_of(status), status.st_size, stat.S_IMODE(status.st_mode)))
    return found


def pack_folder(root: int, parts: Sequence[str], limit: int) -> bytes:
    buffer = io.BytesIO()
    name = "/".join(parts) or "the home"
    with (
        said_plainly(parts),
        entered(root, parts) as folder,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, place, status in walk(folder):
            member = tarfile.TarInfo(path)
            member.mode = stat.S_IMODE(status.st_mode) & 0o777
            base = path.rpartition("/")[2]
            content = b""
            if stat.S_ISDIR(status.st_mode):
                member.type = tarfile.DIRTYPE
            elif stat.S_ISLNK(status.st_mode):
                member.type = tarfile.SYMTYPE
                member.mode = 0o777
                member.linkname = os.readlink(base, dir_fd=place)
            elif stat.S_ISREG(status.st_mode):
                with opened(base, READ_FILE, place) as descriptor:
                    content = read_regular(descriptor, path, limit - buffer.tell())
                member.size = len(content)
            else:
                continue
            archive.addfile(member, io.BytesIO(content))
            if buffer.tell() > limit:
                raise too_big(name, limit)
    return buffer.getvalue()


def unpack_folder(root: int, parts: Sequence[str], archive: bytes) -> None:
    """Lay out an archive below the home. Links to files of the tests are left out."""
    modes: list[tuple[list[str], int]] = []
    with said_plainly(parts), entered(root, parts, create=True) as folder:
        try:
            with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as members:
                for member in members:
                    names = inner_parts(member.name)
                    place = "/".join([str(HOME), *parts, *names[:-1]])
                    if names and not (member.issym() and leads_to_the_tests(place, member.linkname)):
                        unpack_member(folder, names, members, member)
                        if member.isdir():
                            modes.append((names, member.mode & 0o777))
        except tarfile.TarError as error:
            raise SandboxError(f"this is not a tar archive: {error}") from error
        # Last and from the inside out: a folder that may not be written to could not be filled.
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
        descriptor = opened_despite_its_mode(name, flags, folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def opened_despite_its_mode(name: str, flags: int, folder: int) -> int:
    """What its owner may not read is still the owner's: a mode can be what a task asks for."""
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(handle)
        place = f"/proc/self/fd/{handle}"
        os.chmod(place, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        descriptor = os.open(name, flags, dir_fd=folder)
        if stat.S_ISREG(status.st_mode):
            os.chmod(place, stat.S_IMODE(status.st_mode))
        return descriptor
    finally:
        os.close(handle)


def walk(folder: int) -> Iterator[tuple[str, int, os.stat_result]]:
    """Each entry below: its path, a descriptor of the folder it is in, its status. Sorted; mounts left out."""
    with opened(".", READ_FOLDER, folder) as top:
        yield from walk_from(top, "", os.fstat(top).st_dev, 0)


def walk_from(folder: int, prefix: str, device: int, depth: int) -> Iterator[tuple[str, int, os.stat_result]]:
    if depth > DEEPEST:
        raise SandboxError(f"folders are nested deeper than {DEEPEST} below {prefix[:80]}…")
    for name in sorted(os.listdir(folder)):
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if status.st_dev != device:
            continue
        yield prefix + name, folder, status
        if stat.S_ISDIR(status.st_mode):
            with opened(name, READ_FOLDER, folder) as inner:
                yield from walk_from(inner, f"{prefix}{name}/", device, depth + 1)


def kind_of(status: os.stat_result) -> str:
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    return kinds.get(stat.S_IFMT(status.st_mode), "other")


def read_regular(descriptor: int, name: str, limit: int) -> bytes:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise SandboxError(f"{name} is not a regular file")
    chunks: list[bytes] = []
    left = limit + 1
    # By what really comes: a file can grow while it is read, and its size is a claim.
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
    return SandboxError(f"{name} is larger than {limit} bytes")


@contextmanager
def said_plainly(parts: Sequence[str]) -> Iterator[None]:
    """Turns what the system says about a path into an error of the sandbox. A missing file stays missing."""
    name = "/".join(parts) or "the home"
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file in the sandbox", name) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise SandboxError(f"{name} leads over a link or a file that is no folder") from error
        hint = FULL if error.errno in (errno.ENOSPC, errno.EFBIG) else None
        raise SandboxError(f"{name}: {error.strerror}", hint=hint) from error
    except ValueError as error:
        raise SandboxError(f"{name!r} cannot be the name of a file: {error}") from error
