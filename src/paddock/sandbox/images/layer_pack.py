"""Packs a folder as the archive of a layer: the reverse of `layer_unpack`. Equal folders give equal bytes."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from paddock.errors import ImageError
from paddock.sandbox.images.layer_unpack import DEEPEST_FOLDER, OPAQUE_ATTRIBUTE, OPAQUE_MARKER, READ_FOLDER, show
from paddock.sandbox.images.tar_reader import XATTR_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Owners = Callable[[int, int], tuple[int, int]]

READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KINDS = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}


def pack_layer(folder: int, out: IO[bytes], owners: Owners = lambda uid, gid: (uid, gid)) -> None:
    """Write the open `folder` to `out` as a tar archive. `owners` maps the user and group of each file."""
    LayerPacker(out, owners).pack(folder)


class LayerPacker:
    """Writes the entries of one folder."""

    def __init__(self, out: IO[bytes], owners: Owners) -> None:
        self._archive = tarfile.open(  # noqa: SIM115
            fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape"
        )
        self._owners = owners
        self._links: dict[tuple[int, int], str] = {}

    def pack(self, folder: int) -> None:
        self._add_folder(folder, "", os.fstat(folder), 0)
        self._archive.close()

    def _add_folder(self, folder: int, path: str, status: os.stat_result, depth: int) -> None:
        if depth > DEEPEST_FOLDER:
            raise ImageError(f"folders are nested deeper than {DEEPEST_FOLDER} below {path[:80]}…")
        member = self._member(path or ".", status)
        member.pax_headers = pax_attributes(folder)
        self._archive.addfile(member)
        if is_opaque(folder):
            self._archive.addfile(self._marker(f"{path}/{OPAQUE_MARKER.decode()}".lstrip("/"), status))
        for name in sorted(os.listdir(folder)):
            self._add(folder, name, f"{path}/{name}".lstrip("/"), status.st_dev, depth)

    def _add(self, parent: int, name: str, path: str, device: int, depth: int) -> None:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if status.st_dev != device:
            return  # Another filesystem that is mounted there.
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            with opened(name, READ_FOLDER, parent) as folder:
                self._add_folder(folder, path, status, depth + 1)
        elif kind == stat.S_IFCHR and status.st_rdev == 0:
            head, slash, base = path.rpartition("/")
            self._archive.addfile(self._marker(f"{head}{slash}.wh.{base}", status))
        elif (status.st_dev, status.st_ino) in self._links:
            member = self._member(path, status)
            member.type, member.linkname = tarfile.LNKTYPE, self._links[status.st_dev, status.st_ino]
            self._archive.addfile(member)
        elif kind in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFIFO):
            if status.st_nlink > 1:
                self._links[status.st_dev, status.st_ino] = path
            self._add_node(parent, name, path, status)

    def _add_node(self, parent: int, name: str, path: str, status: os.stat_result) -> None:
        member = self._member(path, status)
        if stat.S_ISREG(status.st_mode):
            with opened(name, READ_FILE, parent) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
                member.size = os.fstat(descriptor).st_size
                member.pax_headers = pax_attributes(descriptor)
                self._archive.addfile(member, file)
            return
        if stat.S_ISLNK(status.st_mode):
            member.linkname = os.readlink(name, dir_fd=parent)
        self._archive.addfile(member)

    def _member(self, path: str, status: os.stat_result) -> tarfile.TarInfo:
        member = tarfile.TarInfo(path)
        member.type = KINDS.get(stat.S_IFMT(status.st_mode), tarfile.REGTYPE)
        member.mode = stat.S_IMODE(status.st_mode)
        member.uid, member.gid = self._owners(status.st_uid, status.st_gid)
        member.mtime = int(status.st_mtime)
        return member

    def _marker(self, path: str, status: os.stat_result) -> tarfile.TarInfo:
        member = tarfile.TarInfo(path)
        member.mode, member.mtime = 0o600, int(status.st_mtime)
        return member


@contextmanager
def opened(name: str, flags: int, folder: int) -> Iterator[int]:
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except PermissionError as error:
        raise ImageError(
            f"{show(os.fsencode(name))} cannot be read: {error.strerror}", hint="import it as its owner, or as root"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def pax_attributes(descriptor: int) -> dict[str, str]:
    """The extended attributes that a layer keeps, as pax headers."""
    return {
        XATTR_PREFIX + name: os.getxattr(descriptor, name).decode("utf-8", "surrogateescape")
        for name in attribute_names(descriptor)
        if name == "security.capability" or (name.startswith("user.") and not name.startswith("user.overlay."))
    }


def attribute_names(descriptor: int) -> Iterator[str]:
    try:
        yield from sorted(os.listxattr(descriptor))
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise


def is_opaque(folder: int) -> bool:
    return OPAQUE_ATTRIBUTE in attribute_names(folder) and os.getxattr(folder, OPAQUE_ATTRIBUTE) in (b"y", b"x")
