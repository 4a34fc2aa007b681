"""Reads saved images, which are untrusted: `docker save` archives, and OCI layouts as folders or archives."""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import tarfile
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, cast

from paddock.config import PADDOCK_IMAGE_LAYER_LIMIT
from paddock.errors import ImageError
from paddock.sandbox.images.importing import unpack_to_store
from paddock.sandbox.images.layer_stream import MAGIC_BYTES, LayerStream, UnpackLimits, compression_of
from paddock.sandbox.images.oci import (
    OciIndex,
    OciManifest,
    digest_of,
    image_from_config,
    load_json,
    parse_document,
    select_manifest,
    this_platform,
)
from paddock.sandbox.images.reference import parse_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paddock.sandbox.images.image import Image
    from paddock.sandbox.images.store import ImageStore

MAX_DOCUMENT_BYTES = 8 << 20
MAX_LINKS = 8
"""From one name of an archive to the next."""
COPY_BYTES = 1 << 20
OWN_NAME = re.compile(
    r"(\./)?(blobs(/.*)?|oci-layout|index\.json|manifest\.json|repositories|[0-9a-f]{64}(/.*|\.json|\.tar)?)"
)
"""Names that an archive of an image has. A root filesystem has others."""
NAME_ANNOTATIONS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
"""Of the images of an OCI layout: the full name, or often only the tag."""
HINT = "make the archive again with docker save or skopeo copy"


class ImageFiles(Protocol):
    """The files of a saved image."""

    def open(self, name: str) -> IO[bytes] | None:
        """None if there is no such file."""


class FolderFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def open(self, name: str) -> IO[bytes] | None:
        path = (self._folder / name).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            return None
        return path.open("rb")


class TarFiles:
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive
        self._names = {member.name.removeprefix("./"): member for member in archive.getmembers()}

    def open(self, name: str) -> IO[bytes] | None:
        """Links, as older archives have for repeated layers, are followed within the archive."""
        for _ in range(MAX_LINKS):
            member = self._names.get(name)
            if member is None or member.isfile():
                return None if member is None else self._archive.extractfile(member)
            if not (member.issym() or member.islnk()):
                return None
            start = posixpath.dirname(name) if member.issym() else ""
            name = posixpath.normpath(posixpath.join(start, member.linkname))
        return None


@contextmanager
def opened_image(source: Path, store: ImageStore) -> Iterator[ImageFiles | None]:
    """The files of the image that `source` holds. None if it is no saved image, but perhaps a plain root."""
    if source.is_dir():
        is_image = (source / "oci-layout").is_file() or (source / "manifest.json").is_file()
        yield FolderFiles(source) if is_image else None
        return
    try:
        if not _begins_as_image(source):
            yield None
            return
        with _uncompressed(source, store) as path, tarfile.open(path, "r:") as archive:
            yield TarFiles(archive)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise ImageError(f"{source} cannot be read: {error}", hint=HINT) from error


def import_saved(files: ImageFiles, name: str, store: ImageStore, platform: str | None = None) -> Image:
    """Unpack and store a saved image under `name`. Blocks."""
    manifest = _read(files, "manifest.json")
    config, layers = (
        _docker_image(files, manifest, name) if manifest is not None else _oci_image(files, name, platform)
    )
    image = image_from_config(name, config)
    if len(layers) != len(image.layers):
        raise ImageError(f"{name} has {len(layers)} layers, but its config names {len(image.layers)}", hint=HINT)
    for path, diff_id in zip(layers, image.layers, strict=True):
        if not store.has_layer(diff_id):
            _unpack(files, path, diff_id, store)
    store.save(image, source="import", config=config)
    return image


# -- documents ----------------------------------------------------------------------------------------


def _docker_image(files: ImageFiles, content: bytes, name: str) -> tuple[bytes, list[str]]:
    """The config and the paths of the layers, as `manifest.json` names them."""
    try:
        entries = load_json(content)
        tags = [list(entry.get("RepoTags") or []) for entry in entries]
        chosen = _choose_image(tags, name)
        config, layers = str(entries[chosen]["Config"]), [str(path) for path in entries[chosen]["Layers"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageError("manifest.json of the archive cannot be read", hint=HINT) from error
    return _need(files, config), layers


def _choose_image(tags: list[list[str]], name: str) -> int:
    if len(tags) == 1:
        return 0
    full = str(parse_reference(name))
    for number, names in enumerate(tags):
        if full in (str(parse_reference(tag)) for tag in names):
            return number
    raise _no_such_image(name, tags)


def _no_such_image(name: str, names: list[list[str]]) -> ImageError:
    listed = ", ".join(dict.fromkeys(text for texts in names for text in texts))
    return ImageError(
        f"the archive has {len(names)} images, and none is called {name}", hint=f"it has {listed or 'none'}"
    )


def _oci_image(files: ImageFiles, name: str, platform: str | None) -> tuple[bytes, list[str]]:
    content = _need(files, "index.json")
    for depth in range(3):
        if "manifests" not in _need_object(content):
            break
        index = parse_document(OciIndex, content, "an index of the archive")
        index = _choose_named(index, name) if depth == 0 else index
        content = _need_blob(files, select_manifest(index, platform or this_platform(), name).digest)
    manifest = parse_document(OciManifest, content, "the manifest of the archive")
    return _need_blob(files, manifest.config.digest), [_blob_path(layer.digest) for layer in manifest.layers]


def _choose_named(index: OciIndex, name: str) -> OciIndex:
    """The entries for the image of this name, if the layout has images of several names."""
    annotations = [one.annotations or {} for one in index.manifests]
    names = [[texts[key] for key in NAME_ANNOTATIONS if texts.get(key)] for texts in annotations]
    if len({tuple(texts) for texts in names if texts}) < 2:
        return index
    reference = parse_reference(name)
    for is_meant in (lambda text: _full_name(text) == str(reference), lambda text: text == reference.tag):
        chosen = [one for one, texts in zip(index.manifests, names, strict=True) if any(map(is_meant, texts))]
        if chosen:
            return OciIndex(manifests=chosen)
    raise _no_such_image(name, names)


def _full_name(text: str) -> str:
    try:
        return str(parse_reference(text))
    except ImageError:
        return text


def _need_object(content: bytes) -> dict[str, object]:
    document = load_json(content)
    if not isinstance(document, dict):
        raise ImageError("a document of the archive is no JSON object", hint=HINT)
    return document


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _need_blob(files: ImageFiles, digest: str) -> bytes:
    content = _need(files, _blob_path(digest))
    if digest_of(content) != digest:
        raise ImageError(f"the archive has {digest_of(content)} instead of {digest}", hint=HINT)
    return content


def _need(files: ImageFiles, name: str) -> bytes:
    content = _read(files, name)
    if content is None:
        raise ImageError(f"the archive has no {name[:200]!r}", hint=HINT)
    return content


def _read(files: ImageFiles, name: str) -> bytes | None:
    file = files.open(name)
    if file is None:
        return None
    with file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ImageError(f"{name} of the archive has more than {MAX_DOCUMENT_BYTES} bytes", hint=HINT)
    return content


# -- layers -------------------------------------------------------------------------------------------


def _unpack(files: ImageFiles, path: str, diff_id: str, store: ImageStore) -> None:
    source = files.open(path)
    if source is None:
        raise ImageError(f"the archive has no layer {path[:200]!r}", hint=HINT)
    reader, writer = os.pipe()
    with source, os.fdopen(reader, "rb") as pipe:
        thread = threading.Thread(target=_copy, args=(source, writer), name="feed a layer", daemon=True)
        thread.start()
        try:
            unpack_to_store(pipe, store, diff_id=diff_id)
        finally:
            pipe.close()
            thread.join()


def _copy(source: IO[bytes], writer: int) -> None:
    # A layer that ends too early is found by its digest, so errors here need no report of their own.
    try:
        with os.fdopen(writer, "wb") as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
    except (OSError, tarfile.TarError, EOFError):
        return


# -- archives -----------------------------------------------------------------------------------------


def _begins_as_image(source: Path) -> bool:
    """Whether the names of an archive are those of a saved image. Stops at the first one that is not."""
    count = 0
    with _opened_archive(source) as archive:
        for member in archive:
            if member.name.strip("./") and not OWN_NAME.fullmatch(member.name):
                return False
            count += 1
            if member.name.removeprefix("./") in ("oci-layout", "manifest.json"):
                return True
    return count > 0


@contextmanager
def _opened_archive(source: Path) -> Iterator[tarfile.TarFile]:
    with source.open("rb") as file:
        stream = cast("IO[bytes]", LayerStream(file, UnpackLimits()))
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            yield archive


@contextmanager
def _uncompressed(source: Path, store: ImageStore) -> Iterator[Path]:
    """The archive itself or, if it is compressed, an uncompressed copy, because its files are read in any order."""
    with source.open("rb") as file:
        if not compression_of(file.read(MAGIC_BYTES)):
            yield source
            return
        file.seek(0)
        with tempfile.NamedTemporaryFile(dir=store.blobs_folder, prefix="import-", suffix=".part") as copy:
            stream = LayerStream(file, UnpackLimits(max_bytes=PADDOCK_IMAGE_LAYER_LIMIT.read()))
            while chunk := stream.read(COPY_BYTES):
                copy.write(chunk)
            copy.flush()
            yield Path(copy.name)
