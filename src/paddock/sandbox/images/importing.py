"""Images from files: `docker save` archives, OCI layouts, and plain root archives or folders."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from paddock.config import PADDOCK_IMAGE_LAYER_LIMIT
from paddock.errors import ImageError
from paddock.sandbox.image_root import DEFAULT_PATH
from paddock.sandbox.images.image import ImageConfig
from paddock.sandbox.images.layer_pack import pack_layer
from paddock.sandbox.images.layer_stream import UnpackLimits
from paddock.sandbox.images.layer_worker import unpack_in_namespace
from paddock.sandbox.images.oci import make_image
from paddock.sandbox.images.reference import parse_reference
from paddock.sandbox.images.store import ImageStore, default_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paddock.sandbox.images.image import Image
    from paddock.sandbox.images.layer_unpack import UnpackResult

UNPACK_SECONDS = 3600.0
ROOT_CONFIG = ImageConfig(env={"PATH": DEFAULT_PATH}, cmd=("/bin/sh",))
"""Of a plain root, which says nothing about itself."""


async def import_image(
    source: Path, name: str, *, config: ImageConfig | None = None, store: ImageStore | None = None
) -> Image:
    """Store a saved image, a root archive or a root folder as an image called `name`. Raises ImageError.

    `config` is what a plain root does not say about itself. It is refused for a saved image, which has its own.
    """
    parse_reference(name)
    return await asyncio.to_thread(_import, source, name, config, store or default_store())


def _import(source: Path, name: str, config: ImageConfig | None, store: ImageStore) -> Image:
    from paddock.sandbox.images.image_archive import import_saved, opened_image

    if not source.exists():
        raise ImageError(f"there is no {source}", hint="give an archive or a folder")
    with opened_image(source, store) as files:
        if files is None:
            return import_root(source, name, config or ROOT_CONFIG, store)
        if config is not None:
            raise ImageError(f"{source} has a config of its own", hint="leave out --workdir, --env, --user and --cmd")
        return import_saved(files, name, store)


def import_root(source: Path, name: str, config: ImageConfig, store: ImageStore) -> Image:
    """A plain root, as an archive or as a folder. Blocks."""
    layer = import_folder(source, store) if source.is_dir() else import_layer_file(source, store)
    image = make_image(name, (layer.diff_id,), config)
    store.save(image, source="import")
    return image


def import_layer_file(source: Path, store: ImageStore) -> UnpackResult:
    try:
        file = source.open("rb")
    except OSError as error:
        raise ImageError(f"{source} cannot be read: {error.strerror}", hint="check the path") from error
    with file:
        return unpack_to_store(file, store)


def import_folder(source: Path, store: ImageStore) -> UnpackResult:
    """A folder becomes an archive on the fly, so that it is checked and owned like every other layer."""
    reader, writer = os.pipe()
    packer = FolderPacker(source, writer)
    packer.start()
    try:
        with os.fdopen(reader, "rb") as file:
            result = unpack_to_store(file, store, check=packer.check)
    finally:
        packer.join()
    return result


class FolderPacker(threading.Thread):
    """Writes a folder to a pipe as an archive."""

    def __init__(self, folder: Path, writer: int) -> None:
        super().__init__(name=f"pack {folder}", daemon=True)
        self._folder, self._writer = folder, writer
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            with os.fdopen(self._writer, "wb", buffering=1 << 20) as out:
                descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    pack_layer(descriptor, out, own_files_as_root)
                finally:
                    os.close(descriptor)
        except (OSError, ImageError) as error:
            self._error = error

    def check(self) -> None:
        """Raise what went wrong."""
        self.join()
        if isinstance(self._error, ImageError):
            raise self._error
        if self._error is not None and not isinstance(self._error, BrokenPipeError):
            raise ImageError(f"{self._folder} cannot be read: {self._error}", hint="check its files") from self._error


def own_files_as_root(uid: int, gid: int) -> tuple[int, int]:
    """Whoever is not root cannot have unpacked a root with its true owners: what is theirs is root's."""
    return (0 if uid == os.geteuid() else uid, 0 if gid == os.getegid() else gid)


def unpack_to_store(
    file: IO[bytes],
    store: ImageStore,
    *,
    diff_id: str = "",
    check: Callable[[], None] = lambda: None,
    cancelled: threading.Event | None = None,
) -> UnpackResult:
    """Unpack the archive of a layer and commit it. With `diff_id`, refuse any other content. Blocks."""
    limits = replace(UnpackLimits(), max_bytes=PADDOCK_IMAGE_LAYER_LIMIT.read())
    staged = store.stage_layer()
    try:
        folder = os.open(staged, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            result = unpack_in_namespace(
                file, folder, store.identity, limits, timeout=UNPACK_SECONDS, cancelled=cancelled
            )
        finally:
            os.close(folder)
        check()
        if diff_id and result.diff_id != diff_id:
            raise ImageError(
                f"a layer has the digest {result.diff_id} instead of {diff_id}", hint="the image is damaged"
            )
        store.commit_layer(staged, result.diff_id, disk_bytes=result.disk_bytes)
        return result
    finally:
        store.discard_layer(staged)
