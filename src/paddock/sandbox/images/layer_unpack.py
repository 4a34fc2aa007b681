"""Unpacks the archive of one layer into one folder. The archive is untrusted.

Every step of a path is opened by itself (openat, O_NOFOLLOW). A symlink on the way is resolved within the layer, as
if it were `/`, so nothing is written outside. A later entry replaces an earlier one of the same name. The folder
gets the form of an overlayfs layer: a removed name is a character device 0:0, and a folder that hides those of lower
layers has the attribute `user.overlay.opaque`.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paddock.errors import ImageError
from paddock.sandbox.images import tar_reader
from paddock.sandbox.images.layer_stream import LayerStream, UnpackLimits
from paddock.sandbox.images.tar_reader import TarEntry, TarReader

if TYPE_CHECKING:
    from typing import IO

STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
READ_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DEEPEST_FOLDER = 256
MAX_SYMLINKS = 40
CACHED_FOLDERS = 64
NOBODY = 65534
MAX_TIME_NANOSECONDS = 2**33 * 10**9
DISK_BLOCK_BYTES = 4096
WHITEOUT_PREFIX = b".wh."
OPAQUE_MARKER = b".wh..wh..opq"
RESERVED_PREFIX = b".wh..wh."
OPAQUE_ATTRIBUTE = "user.overlay.opaque"
HOSTILE_HINT = "the archive is damaged or hostile; use another one"


@dataclass(frozen=True, slots=True)
class UnpackResult:
    """What an archive held."""

    digest: str
    """Of the archive as it was, compressed or not."""
    diff_id: str
    """Of the uncompressed archive."""
    disk_bytes: int
    entries: int
    left_out_devices: int
    """Device files cannot be made without privileges. Sandboxes have a `/dev` of their own."""
    changed_owners: int
    """Entries of users that this machine cannot map. They belong to `nobody`."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def unpack_layer(file: IO[bytes], folder: int, limits: UnpackLimits, *, id_count: int) -> UnpackResult:
    """Unpack a layer from `file` into the open, empty `folder`.

    With an `id_count` of 0 the owners in the archive have no effect. Raises ImageError.
    """
    stream = LayerStream(file, limits)
    unpacker = LayerUnpacker(folder, limits, id_count)
    try:
        unpacker.unpack(TarReader(stream))
        stream.drain()
    finally:
        unpacker.close()
    return UnpackResult(
        stream.digest,
        stream.diff_id,
        unpacker.disk_bytes,
        unpacker.entries,
        unpacker.left_out_devices,
        unpacker.changed_owners,
    )


class LayerUnpacker:
    """Writes the entries of one archive."""

    def __init__(self, folder: int, limits: UnpackLimits, id_count: int) -> None:
        self._root = folder
        self._limits = limits
        self._id_count = id_count
        self._folders: dict[bytes, tuple[int, tuple[bytes, ...]]] = {}
        self._folder_entries: dict[tuple[bytes, ...], TarEntry] = {}
        self.disk_bytes = self.entries = self.left_out_devices = self.changed_owners = 0

    def unpack(self, archive: TarReader) -> None:
        for entry in archive:
            self.entries += 1
            if self.entries > self._limits.max_entries:
                raise ImageError(f"the layer has more than {self._limits.max_entries} entries", hint=HOSTILE_HINT)
            try:
                self._unpack_entry(archive, entry)
            except ImageError:
                raise
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                hint = "free space on the disk" if getattr(error, "errno", 0) == errno.ENOSPC else HOSTILE_HINT
                raise ImageError(f"{show(entry.name)} in the archive: {reason}", hint=hint) from error
        # Last, and inner folders first: filling a folder changes its time.
        for parts in sorted(self._folder_entries, key=len, reverse=True):
            self._finish_folder(parts, self._folder_entries[parts])

    def close(self) -> None:
        self._forget_folders()

    def _unpack_entry(self, archive: TarReader, entry: TarEntry) -> None:
        parts = inner_parts(entry.name)
        if not parts:
            if entry.kind == tar_reader.FOLDER:
                self._folder_entries[()] = entry
            return
        parent, resolved = self._enter(parts[:-1], create=True)
        name = parts[-1]
        if name.startswith(WHITEOUT_PREFIX):
            self._apply_whiteout(parent, name, entry)
            return
        self.disk_bytes += -(-entry.size // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
        match entry.kind:
            case tar_reader.FOLDER:
                self._make_folder(parent, name)
                self._folder_entries[(*resolved, name)] = entry
                self.disk_bytes += DISK_BLOCK_BYTES
            case b"0":
                self._replace(parent, name)
                self._write_file(parent, name, archive, entry)
            case tar_reader.SYMLINK:
                self._replace(parent, name)
                os.symlink(entry.link, name, dir_fd=parent)
                self._finish_node(parent, name, entry)
            case tar_reader.HARD_LINK:
                self._link(parent, name, entry)
            case tar_reader.FIFO:
                self._replace(parent, name)
                os.mkfifo(name, 0o600, dir_fd=parent)
                self._finish_node(parent, name, entry)
            case tar_reader.CHARACTER_DEVICE | tar_reader.BLOCK_DEVICE:
                self._replace(parent, name)
                self.left_out_devices += 1
            case kind:
                raise ImageError(f"{show(entry.name)} in the archive is of unknown kind {kind!r}", hint=HOSTILE_HINT)

    # -- what an entry becomes ------------------------------------------------------------------------

    def _write_file(self, parent: int, name: bytes, archive: TarReader, entry: TarEntry) -> None:
        descriptor = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        try:
            for chunk in archive.content():
                rest = memoryview(chunk)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            self._finish(descriptor, entry)
        finally:
            os.close(descriptor)

    def _make_folder(self, parent: int, name: bytes) -> None:
        mode = mode_of(name, parent)
        if mode is not None and stat.S_ISDIR(mode):
            return
        is_whiteout = mode is not None and stat.S_ISCHR(mode)
        self._replace(parent, name)
        os.mkdir(name, 0o755, dir_fd=parent)
        if is_whiteout:
            # Both are in this layer: the folder of the lower layers is removed, and this one is new.
            self._make_opaque(name, parent)

    def _link(self, parent: int, name: bytes, entry: TarEntry) -> None:
        target = inner_parts(entry.link)
        source, status = self._find_link_target(target, entry)
        try:
            present = stat_or_none(name, parent)
            if present is not None and (present.st_dev, present.st_ino) == (status.st_dev, status.st_ino):
                return
            self._replace(parent, name)
            os.link(target[-1], name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)

    def _find_link_target(self, target: list[bytes], entry: TarEntry) -> tuple[int, os.stat_result]:
        """The folder of the file that a hard link is for, which the caller closes, and the status of the file."""
        source = -1
        try:
            source, _ = self._resolve(target[:-1], create=False)
            status = os.stat(target[-1] if target else b".", dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                raise ImageError(f"{show(entry.name)} in the archive is a hard link to a folder", hint=HOSTILE_HINT)
            if stat.S_ISCHR(status.st_mode):
                raise FileNotFoundError  # A whiteout.
            return source, status
        except BaseException as error:
            if source >= 0:
                os.close(source)
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise
            raise ImageError(
                f"{show(entry.name)} in the archive is a hard link to {show(entry.link)}, which the layer lacks",
                hint=HOSTILE_HINT,
            ) from error

    def _apply_whiteout(self, parent: int, marker: bytes, entry: TarEntry) -> None:
        if marker == OPAQUE_MARKER:
            self._make_opaque(b".", parent)
            return
        if marker.startswith(RESERVED_PREFIX):
            return  # Bookkeeping of aufs.
        name = marker.removeprefix(WHITEOUT_PREFIX)
        if name in (b"", b".", b".."):
            raise ImageError(f"{show(entry.name)} in the archive removes no name", hint=HOSTILE_HINT)
        mode = mode_of(name, parent)
        if mode is None:
            os.mknod(name, stat.S_IFCHR | 0o600, 0, dir_fd=parent)
        elif stat.S_ISDIR(mode):
            self._make_opaque(name, parent)

    def _make_opaque(self, name: bytes, parent: int) -> None:
        descriptor = os.open(name, READ_FOLDER, dir_fd=parent)
        try:
            os.setxattr(descriptor, OPAQUE_ATTRIBUTE, b"y")
        finally:
            os.close(descriptor)

    def _replace(self, parent: int, name: bytes) -> None:
        """Remove what an earlier entry put there."""
        mode = mode_of(name, parent)
        if mode is None:
            return
        if stat.S_ISDIR(mode):
            shutil.rmtree(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
        if not stat.S_ISREG(mode):
            # Paths that lead through it now lead elsewhere.
            self._forget_folders(keep=parent)

    # -- owners, modes, times -------------------------------------------------------------------------

    def _owners(self, entry: TarEntry) -> tuple[int, int]:
        uid, gid = (number if number < self._id_count else NOBODY for number in (entry.uid, entry.gid))
        if (uid, gid) != (entry.uid, entry.gid):
            self.changed_owners += 1
        return uid, gid

    def _finish(self, descriptor: int, entry: TarEntry) -> None:
        # A new owner clears the setuid bits and the capabilities, so it comes first.
        if self._id_count and (entry.uid or entry.gid):
            os.fchown(descriptor, *self._owners(entry))
        os.fchmod(descriptor, entry.mode)
        for attribute, value in entry.xattrs.items():
            if self._keeps_attribute(attribute):
                set_attribute(descriptor, attribute, value)
        os.utime(descriptor, ns=times_of(entry))

    def _finish_node(self, parent: int, name: bytes, entry: TarEntry) -> None:
        if self._id_count and (entry.uid or entry.gid):
            os.chown(name, *self._owners(entry), dir_fd=parent, follow_symlinks=False)
        if entry.kind == tar_reader.FIFO:
            os.chmod(name, entry.mode & 0o777, dir_fd=parent)
        os.utime(name, ns=times_of(entry), dir_fd=parent, follow_symlinks=False)

    def _finish_folder(self, parts: tuple[bytes, ...], entry: TarEntry) -> None:
        try:
            parent, resolved = self._enter(list(parts[:-1]), create=False)
            if resolved != parts[:-1]:
                return  # Replaced by a link later.
            descriptor = os.open(parts[-1] if parts else b".", READ_FOLDER, dir_fd=parent)
        except OSError:
            return  # Replaced later.
        try:
            self._finish(descriptor, entry)
        finally:
            os.close(descriptor)

    def _keeps_attribute(self, name: str) -> bool:
        """Attributes of overlayfs would change what other layers show; those of the host's security do not apply."""
        if name.startswith("user."):
            return not name.startswith("user.overlay.")
        return name == "security.capability" and self._id_count > 0

    # -- paths ----------------------------------------------------------------------------------------

    def _enter(self, parts: list[bytes], *, create: bool) -> tuple[int, tuple[bytes, ...]]:
        """A descriptor of a folder, which stays ours, and its path without links."""
        key = b"/".join(parts)
        if key not in self._folders:
            if len(self._folders) >= CACHED_FOLDERS:
                self._forget_folders()
            self._folders[key] = self._resolve(parts, create)
        return self._folders[key]

    def _resolve(self, parts: list[bytes], create: bool) -> tuple[int, tuple[bytes, ...]]:
        opened = [os.open(".", STEP, dir_fd=self._root)]
        names: list[bytes] = []
        pending = parts[::-1]
        links = 0
        try:
            while pending:
                part = pending.pop()
                if part == b"..":
                    if names:
                        names.pop()
                        os.close(opened.pop())
                    continue
                target = self._step(opened, part, create)
                if target is None:
                    names.append(part)
                    continue
                links += 1
                if links > MAX_SYMLINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith(b"/"):
                    while names:
                        names.pop()
                        os.close(opened.pop())
                pending += [piece for piece in target.split(b"/") if piece not in (b"", b".")][::-1]
            return opened.pop(), tuple(names)
        finally:
            for descriptor in opened:
                os.close(descriptor)

    def _step(self, opened: list[int], part: bytes, create: bool) -> bytes | None:
        """Open the folder `part`, or return where the link `part` leads."""
        if len(opened) > DEEPEST_FOLDER:
            raise OSError(errno.ENAMETOOLONG, f"folders are nested deeper than {DEEPEST_FOLDER}")
        folder = opened[-1]
        try:
            opened.append(os.open(part, STEP, dir_fd=folder))
            return None
        except FileNotFoundError:
            if not create:
                raise
        except NotADirectoryError:
            mode = mode_of(part, folder) or 0
            if stat.S_ISLNK(mode):
                return os.readlink(part, dir_fd=folder)
            # A whiteout of this layer: the folder of the lower layers is removed, and this one is new.
            if not stat.S_ISCHR(mode) or not create:
                raise
        self._make_folder(folder, part)
        opened.append(os.open(part, STEP, dir_fd=folder))
        self.disk_bytes += DISK_BLOCK_BYTES
        return None

    def _forget_folders(self, keep: int | None = None) -> None:
        for key, (descriptor, _) in list(self._folders.items()):
            if descriptor != keep:
                os.close(descriptor)
                del self._folders[key]


def inner_parts(name: bytes) -> list[bytes]:
    """The parts of a path within the layer, whose root is `/`. Raises ImageError if it leads out."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise ImageError(f"{show(name)} in the archive leads outside of it", hint=HOSTILE_HINT)
    if b"\0" in name:
        raise ImageError(f"{show(name)} in the archive has a zero byte", hint=HOSTILE_HINT)
    return parts


def stat_or_none(name: bytes, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def mode_of(name: bytes, folder: int) -> int | None:
    """The type and mode of a file, or None if there is none."""
    status = stat_or_none(name, folder)
    return None if status is None else status.st_mode


def times_of(entry: TarEntry) -> tuple[int, int]:
    time = max(0, min(entry.mtime_nanoseconds, MAX_TIME_NANOSECONDS))
    return time, time


def set_attribute(descriptor: int, name: str, value: bytes) -> None:
    try:
        os.setxattr(descriptor, name, value)
    except OSError as error:
        # The filesystem or the namespace does not have them. Container runtimes ignore that too.
        if error.errno not in (errno.ENOTSUP, errno.EPERM, errno.EINVAL):
            raise


def show(name: bytes) -> str:
    return repr(name[:200].decode("utf-8", "backslashreplace"))
