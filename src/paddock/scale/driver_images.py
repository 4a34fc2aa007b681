"""Images that only the driver has, because they were imported there: a node gets them from the driver, once.

Pulled and built images are no matter of this module: each node pulls and builds them itself, into a store that all
its rollouts share. The copy on a node has a label with the driver's digest, so that a new import there replaces it.

    node:   image NAME            driver: {"digest": …, "size": …}, then that many bytes of an archive
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import orjson

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.dockerfile import parse_dockerfile
from paddock.sandbox.images.exporting import export_image
from paddock.sandbox.images.importing import import_image
from paddock.sandbox.images.oci import make_image
from paddock.sandbox.images.store import ImageStore, default_store
from paddock.scale.node_link import connect_to_driver

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.scale.rollout_service import RolloutTicket
    from paddock.tasks.settings import TaskImage
    from paddock.tasks.task import Task

PURPOSE = "image"
DIGEST_LABEL = "paddock.driver-digest"
PIECE_BYTES = 1 << 20


def image_names(task: Task) -> list[str]:
    """The images that a task and its separate verifier name, or that their Dockerfiles start from."""
    own = task.settings.verifier.image
    images = [image for image in (task.image, own) if image is not None]
    return list(dict.fromkeys(name for image in images for name in _names(image)))


def _names(image: TaskImage) -> Iterable[str]:
    if image.name:
        return [image.name]
    try:
        stages = parse_dockerfile(image.dockerfile).stages
    except ImageError:
        # The build reports it.
        return []
    return [stage.base for stage in stages if "$" not in stage.base]


# -- the driver -------------------------------------------------------------------------------------------


async def send_image(name: str, writer: asyncio.StreamWriter, *, store: ImageStore | None = None) -> None:
    """Answer a node. An image that was not imported here has no digest, and no archive follows."""
    images = await asyncio.to_thread(default_store) if store is None else store
    stored = None
    with suppress(ImageError):
        stored = await asyncio.to_thread(images.find_stored, unquote(name))
    if stored is None or stored.source != "import":
        writer.write(b'{"digest": "", "size": 0}\n')
        await writer.drain()
        return
    with tempfile.TemporaryDirectory(prefix="paddock-image-") as folder:
        archive = Path(folder, "image.tar")
        await export_image(stored.image, archive, store=images)
        size = await asyncio.to_thread(os.path.getsize, archive)
        writer.write(orjson.dumps({"digest": stored.image.digest, "size": size}) + b"\n")
        with await asyncio.to_thread(archive.open, "rb") as file:
            while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
                writer.write(piece)
                await writer.drain()


# -- the node ---------------------------------------------------------------------------------------------


async def fetch_driver_images(task: Task, ticket: RolloutTicket, *, store: ImageStore | None = None) -> None:
    """Import what a task needs and only the driver has. Raises LinkLost, or ImageError if an import fails."""
    names = image_names(task)
    if not names:
        return
    images = await asyncio.to_thread(default_store) if store is None else store
    for name in names:
        if not name or name == "scratch":
            continue
        lock = await asyncio.to_thread(_lock, images.folder)
        try:
            await _fetch(name, ticket, images)
        finally:
            os.close(lock)


def _lock(folder: Path) -> int:
    """One import at a time on this machine."""
    descriptor = os.open(folder / "driver-images.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


async def _fetch(name: str, ticket: RolloutTicket, store: ImageStore) -> None:
    reader, writer = await connect_to_driver(ticket.host, ticket.port, ticket.token, PURPOSE, quote(name, safe=""))
    try:
        offer = orjson.loads(await reader.readline() or b'{"digest": "", "size": 0}')
        present = await asyncio.to_thread(store.find, name)
        labels = {} if present is None else present.config.labels
        is_same = present is not None and offer["digest"] in (present.digest, labels.get(DIGEST_LABEL))
        if not offer["digest"] or is_same:
            return
        with tempfile.TemporaryDirectory(prefix="paddock-image-") as folder:
            archive = Path(folder, "image.tar")
            await _receive(reader, archive, offer["size"])
            image = await import_image(archive, name, store=store)
        config = replace(image.config, labels={**image.config.labels, DIGEST_LABEL: offer["digest"]})
        # Not marked as imported: it may be removed to make room, and is fetched again.
        marked = make_image(name, image.layers, config, image.platform)
        await asyncio.to_thread(lambda: store.save(marked, source="registry"))
    finally:
        writer.close()


async def _receive(reader: asyncio.StreamReader, archive: Path, size: int) -> None:
    with await asyncio.to_thread(archive.open, "wb") as file:
        while size > 0:
            piece = await reader.read(min(size, PIECE_BYTES))
            if not piece:
                raise ImageError("the driver did not send all of an image", hint="see the driver's log")
            await asyncio.to_thread(file.write, piece)
            size -= len(piece)
