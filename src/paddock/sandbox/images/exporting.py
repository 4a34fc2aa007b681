"""Writes an image as an archive that `docker load`, `podman load` and skopeo read.

It is an OCI layout that also has Docker's `manifest.json`.

Layers are packed from their folders, so their digests, and that of the image, differ from those in a registry.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
import tarfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from paddock.errors import ImageError
from paddock.sandbox.images.layer_worker import LayerWorker, run_cancellable
from paddock.sandbox.images.oci import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, config_to_json, digest_of
from paddock.sandbox.images.reference import parse_reference
from paddock.sandbox.images.store import ImageStore, default_store

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from paddock.sandbox.images.image import Image

COPY_BYTES = 1 << 20
PACK_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class PackedLayer:
    digest: str
    size: int
    path: Path


async def export_image(image: Image, target: Path, *, store: ImageStore | None = None) -> None:
    """Write `image` to the file `target`, which appears when it is complete. Raises ImageError."""
    images = default_store() if store is None else store
    await run_cancellable(lambda cancelled: _export(image, target, images, cancelled))


def _export(image: Image, target: Path, store: ImageStore, cancelled: threading.Event) -> None:
    scratch = store.blobs_folder / f"export-{secrets.token_hex(6)}"
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        scratch.mkdir()
        with store.hold(image, merge=False) as folders:
            layers = [_pack(folder, scratch / str(number), store, cancelled) for number, folder in enumerate(folders)]
        with tarfile.open(partial, "w") as archive:
            _write_archive(image, layers, archive)
        partial.rename(target)
    except OSError as error:
        raise ImageError(
            f"{target} cannot be written: {error.strerror}", hint="check the path and the space"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
        shutil.rmtree(scratch, ignore_errors=True)


def _pack(folder: Path, path: Path, store: ImageStore, cancelled: threading.Event) -> PackedLayer:
    source = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with LayerWorker("pack", [str(source), str(out)], store.identity, pass_fds=[source, out]) as worker:
            worker.result(PACK_SECONDS, cancelled)
    finally:
        os.close(source)
        os.close(out)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return PackedLayer(f"sha256:{digest}", path.stat().st_size, path)


def _write_archive(image: Image, layers: list[PackedLayer], archive: tarfile.TarFile) -> None:
    config = config_to_json(tuple(layer.digest for layer in layers), image.config, image.platform)
    manifest = _to_json(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": _descriptor(OCI_CONFIG, digest_of(config), len(config)),
            "layers": [_descriptor(OCI_LAYER, layer.digest, layer.size) for layer in layers],
        }
    )
    name = parse_reference(image.name)
    entry = {
        **_descriptor(OCI_MANIFEST, digest_of(manifest), len(manifest)),
        "annotations": {"io.containerd.image.name": str(name), "org.opencontainers.image.ref.name": name.tag},
    }
    docker = {
        "Config": _blob_path(digest_of(config)),
        "RepoTags": [] if name.digest else [name.short],
        "Layers": [_blob_path(layer.digest) for layer in layers],
    }
    _add(archive, "oci-layout", _to_json({"imageLayoutVersion": "1.0.0"}))
    _add(archive, "index.json", _to_json({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}))
    _add(archive, "manifest.json", _to_json([docker]))
    _add(archive, _blob_path(digest_of(config)), config)
    _add(archive, _blob_path(digest_of(manifest)), manifest)
    for layer in {layer.digest: layer for layer in layers}.values():
        with layer.path.open("rb") as file:
            _add_file(archive, _blob_path(layer.digest), file, layer.size)


def _descriptor(media_type: str, digest: str, size: int) -> dict[str, str | int]:
    return {"mediaType": media_type, "digest": digest, "size": size}


def _blob_path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    _add_file(archive, name, io.BytesIO(content), len(content))


def _add_file(archive: tarfile.TarFile, name: str, file: IO[bytes], size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size = size
    archive.addfile(member, file)


def _to_json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
