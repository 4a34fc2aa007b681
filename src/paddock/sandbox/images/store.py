"""The images and layers on this machine.

```
FOLDER/images/KEY.json            an image: its layers and config, under its full name
FOLDER/OWNERS/layers/ID/fs        a layer, as overlayfs mounts it; OWNERS says which ids of the host own the files
FOLDER/OWNERS/layers/ID/layer.json  its full id and size; whoever uses the layer holds a shared lock on this file
FOLDER/OWNERS/tmp/NAME/fs         a layer that is not finished; its maker holds an exclusive lock on NAME/lock
FOLDER/blobs/                     downloads that are not complete, and scratch files of imports and exports
```
A layer gets its place by one rename, so it is complete or absent. Nothing here knows registries or archives.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from paddock.config import PADDOCK_IMAGE_CACHE_LIMIT, PADDOCK_IMAGES, user_cache_folder
from paddock.errors import ImageError
from paddock.sandbox.images.layer_worker import call_worker
from paddock.sandbox.images.oci import config_to_json, digest_of, image_from_config
from paddock.sandbox.images.reference import is_digest, parse_reference
from paddock.sandbox.user_namespace import Identity, find_identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paddock.sandbox.images.image import Image

ImageSource = Literal["registry", "import", "build"]
ID_CHARACTERS = 24
"""Of a layer's digest in its path. Paths are short, because the options of a mount have at most 4 KiB."""
MAX_MOUNT_BYTES = 3000
MAX_MOUNT_LAYERS = 60
MAINTENANCE_SECONDS = 600.0
"""The time limit for removing, measuring or merging layers."""
DOWNLOAD_SECONDS = 24 * 3600.0
"""A download that has not grown for so long is removed. Until then, the next pull continues it."""
USE_RECORD_SECONDS = 60.0
"""A use is recorded if the last record is older than this."""


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image, and what the store knows about it."""

    image: Image
    source: ImageSource
    saved_at: float
    used_at: float
    disk_bytes: int
    """Of all its layers, shared ones included."""


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was removed."""

    images: tuple[str, ...]
    layers: int
    freed_bytes: int
    left_bytes: int


class ImageStore:
    """One folder with images. All methods block, and are safe in several threads and processes."""

    def __init__(self, folder: Path, *, identity: Identity | None = None) -> None:
        self.folder = folder
        self.identity = identity or find_identity()
        self.images_folder = folder / "images"
        self.blobs_folder = folder / "blobs"
        self.skeletons_folder = folder / self.identity.key / "skeletons"
        self._layers_folder = folder / self.identity.key / "layers"
        self._staging_folder = folder / self.identity.key / "tmp"
        self._locks: dict[Path, tuple[int, int]] = {}
        self._staging_locks: dict[Path, int] = {}
        self._has_staged = False
        self._mutex = threading.Lock()
        self._make_folders()

    def __repr__(self) -> str:
        return f"ImageStore({str(self.folder)!r})"

    # -- images ---------------------------------------------------------------------------------------

    def find(self, name: str) -> Image | None:
        """The image with this name or digest, if all of its layers are here.

        `NAME@DIGEST` is also an image with another name and that digest: the digest decides what it contains.
        """
        stored = self.find_stored(name)
        return None if stored is None else stored.image

    def find_stored(self, name: str) -> StoredImage | None:
        if is_digest(name):
            return next((stored for stored in self.list_images() if stored.image.digest == name), None)
        stored = self._read_record(self._record_path(name), name)
        digest = parse_reference(name).digest
        return stored or (self.find_stored(digest) if digest else None)

    def list_images(self) -> list[StoredImage]:
        """All complete images, by name."""
        records = (self._read_record(path, None) for path in sorted(self.images_folder.glob("*.json")))
        return sorted((one for one in records if one is not None), key=lambda one: one.image.name)

    def save(self, image: Image, *, source: ImageSource = "build", config: bytes | None = None) -> None:
        """Store an image under its name. Its layers have to be here. An earlier one of that name is replaced.

        `config` is the config blob whose digest the image has, if it is not ours.
        """
        missing = [layer for layer in image.layers if not self.has_layer(layer)]
        if missing:
            raise ImageError(f"{image.name} cannot be stored without its layer {missing[0]}")
        content = config or config_to_json(image.layers, image.config, image.platform)
        if digest_of(content) != image.digest:
            raise ImageError(f"{image.name} has the digest {image.digest}, but its config has {digest_of(content)}")
        record = {
            "name": str(parse_reference(image.name)),
            "config": content.decode(),
            "layers": image.layers,
            "source": source,
            "saved_at": time.time(),
        }
        self._write(self._record_path(image.name), json.dumps(record).encode())

    def remove(self, name: str) -> bool:
        """Forget an image. Its layers stay until `prune`. False if there is none."""
        stored = self.find_stored(name)
        try:
            self._record_path(stored.image.name if stored is not None else name).unlink()
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def hold(self, image: Image, *, merge: bool = True) -> Iterator[tuple[Path, ...]]:
        """The layer folders of an image, lowest first. They are not removed as long as the block lasts.

        More layers than a mount can have are merged first, unless `merge` is False. Raises ImageError if a
        layer is missing.
        """
        identifiers = [self._identifier(layer) for layer in image.layers]
        locks: list[Path] = []
        try:
            for identifier in identifiers:
                self._lock_layer(identifier, image.name)
                locks.append(self._layers_folder / identifier)
            if merge:
                identifiers = self._merge_if_needed(image, identifiers, locks)
            self._record_use(image)
            yield tuple(self._layers_folder / identifier / "fs" for identifier in identifiers)
        finally:
            for path in locks:
                self._unlock(path)

    # -- layers ---------------------------------------------------------------------------------------

    def has_layer(self, layer_id: str) -> bool:
        return (self._layers_folder / self._identifier(layer_id) / "layer.json").exists()

    def stage_layer(self) -> Path:
        """A new, empty folder for a layer. Hand it to `commit_layer` or `discard_layer`."""
        with self._mutex:
            is_first, self._has_staged = not self._has_staged, True
        if is_first:
            # A killed process may have left gigabytes.
            self._remove_staged(older_than=MAINTENANCE_SECONDS)
        place = self._staging_folder / secrets.token_hex(6)
        place.mkdir(mode=0o711)
        descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        folder = place / "fs"
        folder.mkdir(mode=0o755)
        folder.chmod(0o755)
        with self._mutex:
            self._staging_locks[place] = descriptor
        if os.geteuid() == 0:
            uid, gid = self.identity.host_uid(0) or 0, self.identity.host_gid(0) or 0
            try:
                os.chown(folder, uid, gid)
            except OSError as error:
                self.discard_layer(folder)
                # A container in which the id of sandboxes does not exist.
                raise ImageError(
                    f"no file can belong to the user {uid} of sandboxes: {error.strerror}",
                    hint=self.identity.reason or "paddock doctor shows what this machine lacks",
                ) from error
        return folder

    def commit_layer(self, staged: Path, layer_id: str, *, disk_bytes: int | None = None) -> Path:
        """Make a staged folder the layer `layer_id`, and return where it is. If there is one already, it stays."""
        place = staged.parent
        target = self._layers_folder / self._identifier(layer_id)
        if disk_bytes is None:
            disk_bytes = self._measure(staged)
        for extra in place.iterdir():
            if extra.name not in ("fs", "lock"):
                self._remove_tree(extra)
        description = {"id": layer_id, "disk_bytes": disk_bytes}
        self._write(place / "layer.json", json.dumps(description).encode())
        (place / "lock").unlink(missing_ok=True)
        try:
            place.rename(target)
        except OSError:
            if not (target / "layer.json").exists():
                raise
            self._remove_tree(place)
        self._end_staging(place)
        self._check_layer(target, layer_id)
        return target / "fs"

    def discard_layer(self, staged: Path) -> None:
        """Remove a staged folder. Does nothing if it was committed."""
        if staged.parent.exists():
            self._remove_tree(staged.parent)
        self._end_staging(staged.parent)

    @property
    def disk_bytes(self) -> int:
        """Of all layers."""
        return sum(size for _, size, _ in self._list_layers())

    # -- limits ---------------------------------------------------------------------------------------

    def prune(self, max_bytes: int | None = None) -> PruneResult:
        """Remove leftovers of ended processes and layers that no image has.

        With `max_bytes`, also remove pulled and built images, the least recently used ones first, until the layers
        fit. Images that were imported stay, and so does what a sandbox uses.
        """
        self._remove_leftovers()
        before = self.disk_bytes
        layers = self._remove_unused_layers()
        names: list[str] = []
        if max_bytes is not None:
            candidates = [stored for stored in self.list_images() if stored.source != "import"]
            for stored in sorted(candidates, key=lambda one: one.used_at):
                if self.disk_bytes <= max_bytes:
                    break
                if self._is_held(stored.image):
                    continue
                self.remove(stored.image.name)
                names.append(stored.image.name)
                layers += self._remove_unused_layers()
        left = self.disk_bytes
        return PruneResult(tuple(names), layers, before - left, left)

    def enforce_limit(self) -> PruneResult | None:
        """Prune if the layers exceed the limit of the settings."""
        limit = PADDOCK_IMAGE_CACHE_LIMIT.read()
        return self.prune(limit) if self.disk_bytes > limit else None

    def _is_held(self, image: Image) -> bool:
        # An image that only shares some layers with one in use is free.
        return all(not self._can_lock(self._layers_folder / self._identifier(layer)) for layer in image.layers)

    def _can_lock(self, place: Path) -> bool:
        try:
            with (place / "layer.json").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _remove_unused_layers(self) -> int:
        used = {self._identifier(layer) for layer in self._used_layers()}
        removed = 0
        for place, _, _ in self._list_layers():
            if place.name not in used and self._remove_layer(place):
                removed += 1
        return removed

    def _used_layers(self) -> Iterator[str]:
        for path in self.images_folder.glob("*.json"):
            document = _read_json(path)
            layers: list[str] = (document or {}).get("layers", [])
            yield from layers
            if len(layers) > 1:
                yield from (merged_id(layers[:count]) for count in range(2, len(layers) + 1))

    def _remove_layer(self, place: Path) -> bool:
        """Remove a layer, unless somebody uses it."""
        try:
            file = (place / "layer.json").open("rb")
        except FileNotFoundError:
            return False
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            removed = self._staging_folder / secrets.token_hex(6)
            place.rename(removed)
        self._remove_tree(removed)
        return True

    def _remove_staged(self, *, older_than: float) -> None:
        """Remove the staged folders of ended processes."""
        for place in self._staging_folder.iterdir():
            with suppress(FileNotFoundError):
                age = time.time() - place.stat().st_mtime
                try:
                    file = (place / "lock").open("rb")
                except FileNotFoundError:
                    # Another process may be making or committing it at this moment.
                    if age > MAINTENANCE_SECONDS:
                        self._remove_tree(place)
                    continue
                with file, suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if age >= older_than:
                        self._remove_tree(place)

    def _remove_leftovers(self) -> None:
        self._remove_staged(older_than=0)
        for download in self.blobs_folder.iterdir():
            with suppress(OSError):
                if time.time() - download.stat().st_mtime > DOWNLOAD_SECONDS:
                    self._remove_tree(download)

    def _list_layers(self) -> Iterator[tuple[Path, int, float]]:
        """The place of each layer, its size, and when it was last used."""
        for place in list(self._layers_folder.iterdir()):
            document = _read_json(place / "layer.json")
            with suppress(FileNotFoundError):
                if document is not None:
                    yield place, int(document["disk_bytes"]), (place / "layer.json").stat().st_mtime

    # -- merging --------------------------------------------------------------------------------------

    def _merge_if_needed(self, image: Image, identifiers: list[str], locks: list[Path]) -> list[str]:
        length = len(os.fsencode(self._layers_folder)) + ID_CHARACTERS + len("/fs:") + 1
        most = max(2, min(MAX_MOUNT_LAYERS, MAX_MOUNT_BYTES // length))
        if len(identifiers) <= most:
            return identifiers
        count = len(identifiers) - most + 1
        merged = merged_id(image.layers[:count])
        if not self.has_layer(merged):
            self._merge(merged, identifiers[:count])
        self._lock_layer(self._identifier(merged), image.name)
        locks.append(self._layers_folder / self._identifier(merged))
        return [self._identifier(merged), *identifiers[count:]]

    def _merge(self, merged: str, identifiers: list[str]) -> None:
        staged = self.stage_layer()
        paths = [staged, *(self._layers_folder / identifier / "fs" for identifier in identifiers)]
        descriptors: list[int] = []
        try:
            for path in paths:
                descriptors.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            words = [str(descriptor) for descriptor in descriptors]
            call_worker("merge", words, self.identity, pass_fds=descriptors, timeout=MAINTENANCE_SECONDS)
            self.commit_layer(staged, merged, disk_bytes=0)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            self.discard_layer(staged)

    # -- locks ----------------------------------------------------------------------------------------

    def _lock_layer(self, identifier: str, name: str) -> None:
        """Take a shared lock, one for all users in this process."""
        place = self._layers_folder / identifier
        with self._mutex:
            descriptor, count = self._locks.get(place, (-1, 0))
            if not count:
                descriptor = self._open_locked(place, name)
            self._locks[place] = (descriptor, count + 1)

    def _open_locked(self, place: Path, name: str) -> int:
        missing = ImageError(
            f"a layer of {name} is not on this machine any more",
            hint=f"paddock image pull {name}, or import it again",
        )
        try:
            descriptor = os.open(place / "layer.json", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise missing from None
        try:
            # Only removal takes the exclusive lock, and only for a rename, so this wait is short.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not (place / "layer.json").exists():
                raise missing
            with suppress(OSError):
                if time.time() - os.fstat(descriptor).st_mtime > USE_RECORD_SECONDS:
                    os.utime(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _unlock(self, place: Path) -> None:
        with self._mutex:
            descriptor, count = self._locks[place]
            if count > 1:
                self._locks[place] = (descriptor, count - 1)
                return
            del self._locks[place]
        os.close(descriptor)

    def _end_staging(self, place: Path) -> None:
        with self._mutex:
            descriptor = self._staging_locks.pop(place, -1)
        if descriptor >= 0:
            os.close(descriptor)

    # -- files ----------------------------------------------------------------------------------------

    def _make_folders(self) -> None:
        # Setuid programs of an image must not be reachable for other users of the host. Who only searches (x) for a
        # layer, such as root of a sandbox, knows its path.
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.folder.stat().st_uid == os.geteuid():
                self.folder.chmod(0o700 if os.geteuid() else 0o711)
            for folder in (self.images_folder, self.blobs_folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            for folder in (self._layers_folder.parent, self._layers_folder, self._staging_folder):
                folder.mkdir(mode=0o711, exist_ok=True)
        except OSError as error:
            raise ImageError(
                f"{self.folder} cannot hold images: {error.strerror}", hint="set PADDOCK_IMAGES to another folder"
            ) from error

    def _identifier(self, layer_id: str) -> str:
        if not is_digest(layer_id):
            raise ImageError(f"{layer_id!r} is not the id of a layer", hint="give sha256: and 64 hexadecimal digits")
        return layer_id.removeprefix("sha256:")[:ID_CHARACTERS]

    def _record_path(self, name: str) -> Path:
        key = digest_of(str(parse_reference(name)).encode()).removeprefix("sha256:")
        return self.images_folder / f"{key[:ID_CHARACTERS]}.json"

    def _read_record(self, path: Path, name: str | None) -> StoredImage | None:
        document = _read_json(path)
        if document is None:
            return None
        layers = tuple(document["layers"])
        image = image_from_config(document["name"], document["config"].encode(), layers=layers)
        sizes = [_read_json(self._layers_folder / self._identifier(layer) / "layer.json") for layer in layers]
        if any(size is None for size in sizes):
            return None
        image = replace(image, name=name or parse_reference(document["name"]).short)
        disk_bytes = sum(int(size["disk_bytes"]) for size in sizes if size is not None)
        return StoredImage(image, document["source"], document["saved_at"], path.stat().st_mtime, disk_bytes)

    def _record_use(self, image: Image) -> None:
        """The time of the last use is the time of the record's file."""
        with suppress(OSError, ImageError):
            path = self._record_path(image.name)
            if time.time() - path.stat().st_mtime > USE_RECORD_SECONDS:
                os.utime(path)

    def _write(self, path: Path, content: bytes) -> None:
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            scratch.write_bytes(content)
            scratch.rename(path)
        finally:
            scratch.unlink(missing_ok=True)

    def _check_layer(self, place: Path, layer_id: str) -> None:
        document = _read_json(place / "layer.json")
        if document is not None and document["id"] != layer_id:
            raise ImageError(f"layers {layer_id} and {document['id']} have the same place", hint="remove one of them")

    def _measure(self, folder: Path) -> int:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            words = [str(descriptor)]
            answer = call_worker("measure", words, self.identity, pass_fds=[descriptor], timeout=MAINTENANCE_SECONDS)
        finally:
            os.close(descriptor)
        return int(answer["disk_bytes"])

    def _remove_tree(self, path: Path) -> None:
        """Remove a folder in which files belong to any user of an image."""
        with suppress(OSError):
            shutil.rmtree(path)
            return
        if not path.is_dir():
            path.unlink(missing_ok=True)
            return
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            words = [str(descriptor), path.name]
            call_worker("remove", words, self.identity, pass_fds=[descriptor], timeout=MAINTENANCE_SECONDS)
        finally:
            os.close(descriptor)


def merged_id(layers: tuple[str, ...] | list[str]) -> str:
    """The id of the layer that these layers, lowest first, become when they are merged."""
    return digest_of("\n".join(("merged", *layers)).encode())


def default_store() -> ImageStore:
    """The store of this user: PADDOCK_IMAGES, or a folder in the cache folder."""
    return _open_store(PADDOCK_IMAGES.read() or user_cache_folder() / "images")


@cache
def _open_store(folder: Path) -> ImageStore:
    return ImageStore(folder)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ImageError(f"{path} cannot be read: {error}", hint="remove the file") from error
    return document
