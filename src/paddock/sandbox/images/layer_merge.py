"""Merges layers into one, with hard links instead of copies. Mount options hold only so many layers."""

from __future__ import annotations

import os
import shutil
import stat
from typing import Any

from paddock.sandbox.images.layer_pack import attribute_names, is_opaque, opened
from paddock.sandbox.images.layer_unpack import OPAQUE_ATTRIBUTE, READ_FOLDER, mode_of


def merge_layers(target: int, layers: list[int]) -> dict[str, Any]:
    """Put the open `layers`, lowest first, into the open, empty folder `target`."""
    for layer in layers:
        merge_folder(target, layer)
    return {}


def merge_folder(target: int, source: int) -> None:
    """Put what is in one folder on top of another. Files become hard links."""
    for name in os.listdir(source):
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        mode = mode_of(os.fsencode(name), target)
        if stat.S_ISDIR(status.st_mode):
            with opened(name, READ_FOLDER, source) as inner:
                merge_inner_folder(target, name, mode, inner)
            continue
        if mode is not None:
            remove(target, name, mode)
        os.link(name, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    copy_metadata(target, source)


def merge_inner_folder(target: int, name: str, mode: int | None, source: int) -> None:
    is_new = mode is None or not stat.S_ISDIR(mode)
    hides_lower = is_opaque(source) or (mode is not None and is_new)
    if mode is not None and (is_new or hides_lower):
        remove(target, name, mode)
        is_new = True
    if is_new:
        os.mkdir(name, 0o755, dir_fd=target)
    with opened(name, READ_FOLDER, target) as folder:
        if hides_lower:
            os.setxattr(folder, OPAQUE_ATTRIBUTE, b"y")
        merge_folder(folder, source)


def remove(folder: int, name: str, mode: int) -> None:
    if stat.S_ISDIR(mode):
        shutil.rmtree(name, dir_fd=folder)
    else:
        os.unlink(name, dir_fd=folder)


def copy_metadata(target: int, source: int) -> None:
    status = os.fstat(source)
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    for name in attribute_names(source):
        if name != OPAQUE_ATTRIBUTE:
            os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
