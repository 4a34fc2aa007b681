"""Pulls one image: manifest, config, then all missing layers in parallel, each unpacked as soon as it is here."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from paddock.errors import ImageError
from paddock.retry import Backoff, Deadline, retry
from paddock.sandbox.images.importing import unpack_to_store
from paddock.sandbox.images.layer_worker import run_cancellable
from paddock.sandbox.images.oci import (
    MANIFEST_TYPES,
    Descriptor,
    OciIndex,
    OciManifest,
    check_manifest_keys,
    check_media_types,
    digest_of,
    image_from_config,
    is_for_platform,
    load_json,
    parse_document,
    select_manifest,
    this_platform,
)
from paddock.sandbox.images.reference import ImageReference, parse_reference
from paddock.sandbox.images.registry.blobs import STALLED_SECONDS, BlobDownload, locked_blob
from paddock.sandbox.images.registry.client import ImageNotFound, RegistryClient, RegistryUnavailable, WrongContent
from paddock.sandbox.images.registry.credentials import find_login
from paddock.sandbox.images.registry.endpoints import RegistryEndpoint, find_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sandbox.images.image import Image
    from paddock.sandbox.images.store import ImageStore

PULL_SECONDS = 3600.0
PARALLEL_DOWNLOADS = 4
PARALLEL_UNPACKS = 2
MAX_DOCUMENT_BYTES = 8 << 20
CONNECT_SECONDS = 15.0
DOCUMENT_BACKOFF = Backoff(first_seconds=0.3, longest_seconds=3.0, attempts=3)
"""A registry that is not reachable is reported soon."""


@dataclass(slots=True)
class PullProgress:
    """How far a pull is. `on_change` is called after each change."""

    on_change: Callable[[PullProgress], None] = lambda _: None
    total_bytes: int = 0
    """Of the layers that are not here yet, compressed."""
    received_bytes: int = 0
    layers: int = 0
    finished_layers: int = 0

    def receive(self, count: int) -> None:
        self.received_bytes += count
        self.on_change(self)

    def finish_layer(self) -> None:
        self.finished_layers += 1
        self.on_change(self)


@dataclass(frozen=True, slots=True)
class PulledManifest:
    """What a registry says about one image for one platform."""

    client: RegistryClient
    repository: str
    manifest: OciManifest
    config: bytes = field(repr=False)
    wanted_platform: str | None
    """None if an index selected the image by its platform."""


async def pull_image(
    name: str,
    store: ImageStore,
    *,
    platform: str | None = None,
    progress: PullProgress | None = None,
    timeout: float = PULL_SECONDS,
) -> Image:
    """Fetch an image from its registry or a mirror, and store it under `name`. Raises ImageError."""
    reference = parse_reference(name)
    deadline = Deadline(timeout)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=STALLED_SECONDS)
    async with aiohttp.ClientSession(
        timeout=limits, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
    ) as session:
        endpoints = find_endpoints(reference.registry)
        problems: list[ImageError] = []
        for endpoint in endpoints:
            client = RegistryClient(endpoint, await find_login(endpoint.login_key), session)
            try:
                source = await _fetch_manifest(client, reference, platform or this_platform(), deadline)
                return await _store_image(name, source, store, progress or PullProgress(), deadline)
            except (ImageNotFound, RegistryUnavailable, WrongContent) as error:
                # A mirror may lack the image or be down. The next endpoint continues with the layers that are here.
                problems.append(error)
    reasons = "; ".join(error.message for error in problems)
    raise ImageError(f"{reference.short} cannot be pulled: {reasons}", hint=_hint(reference, endpoints, problems))


def _hint(reference: ImageReference, endpoints: list[RegistryEndpoint], problems: list[ImageError]) -> str:
    if isinstance(problems[-1], ImageNotFound | WrongContent):
        return problems[-1].hint or ""
    if len(endpoints) == 1:
        mirror = f"set PADDOCK_IMAGE_MIRRORS={reference.registry}=URL to use a mirror"
        return f"check the network, {mirror}, or paddock image import ARCHIVE {reference.short}"
    return f"check the network, or paddock image import ARCHIVE {reference.short}"


async def _store_image(
    name: str, source: PulledManifest, store: ImageStore, progress: PullProgress, deadline: Deadline
) -> Image:
    image = image_from_config(name, source.config)
    wanted = source.wanted_platform
    if wanted is not None and not is_for_platform(image.platform, wanted):
        hint = f"use an image for that platform; --platform {image.platform} pulls this one"
        raise ImageError(f"{name} is for {image.platform}, not for {wanted}", hint=hint)
    await _fetch_layers(image, source, store, progress, deadline)
    await asyncio.to_thread(store.save, image, source="registry", config=source.config)
    await asyncio.to_thread(store.enforce_limit)
    return image


# -- manifests ----------------------------------------------------------------------------------------


async def _fetch_manifest(
    client: RegistryClient, reference: ImageReference, platform: str, deadline: Deadline
) -> PulledManifest:
    repository = reference.repository
    content = await _fetch_document(client, repository, f"manifests/{reference.selector}", reference.digest, deadline)
    has_index = "manifests" in _keys(content, reference)
    if has_index:
        index = parse_document(OciIndex, content, f"the index of {reference.short}")
        digest = select_manifest(index, platform, reference.short).digest
        content = await _fetch_document(client, repository, f"manifests/{digest}", digest, deadline)
    check_manifest_keys(_keys(content, reference), reference.short)
    manifest = parse_document(OciManifest, content, f"the manifest of {reference.short}")
    check_media_types(manifest, reference.short)
    digest = manifest.config.digest
    config = await _fetch_document(client, repository, f"blobs/{digest}", digest, deadline)
    return PulledManifest(client, repository, manifest, config, None if has_index else platform)


def _keys(content: bytes, reference: ImageReference) -> dict[str, Any]:
    document = load_json(content)
    if not isinstance(document, dict):
        raise ImageError(f"the manifest of {reference.short} is not JSON", hint="is this address a registry?")
    return document


async def _fetch_document(
    client: RegistryClient, repository: str, path: str, digest: str, deadline: Deadline
) -> bytes:
    """A manifest or config, checked against `digest` if there is one."""

    async def attempt(seconds: float) -> bytes:
        try:
            async with (
                asyncio.timeout(seconds),
                client.get(repository, path, {"Accept": ", ".join(MANIFEST_TYPES)}) as response,
            ):
                return await _read_document(response, path)
        except TimeoutError as error:
            raise RegistryUnavailable(f"{client.host} is too slow") from error

    content = await retry(
        attempt, errors=RegistryUnavailable, deadline=deadline, backoff=DOCUMENT_BACKOFF, may_retry=lambda _: True
    )
    if digest and digest_of(content) != digest:
        raise WrongContent(f"{client.host} sent {digest_of(content)} instead of {digest}")
    return content


async def _read_document(response: aiohttp.ClientResponse, path: str) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_DOCUMENT_BYTES:
            raise WrongContent(f"{path} has more than {MAX_DOCUMENT_BYTES} bytes")
    return bytes(content)


# -- layers -------------------------------------------------------------------------------------------


async def _fetch_layers(
    image: Image, source: PulledManifest, store: ImageStore, progress: PullProgress, deadline: Deadline
) -> None:
    descriptors = source.manifest.layers
    if len(descriptors) != len(image.layers):
        raise ImageError(f"{image.name} has {len(descriptors)} layers, but its config names {len(image.layers)}")
    missing = {
        diff_id: descriptor
        for diff_id, descriptor in zip(image.layers, descriptors, strict=True)
        if not store.has_layer(diff_id)
    }
    progress.layers, progress.finished_layers = len(descriptors), len(descriptors) - len(missing)
    progress.total_bytes, progress.received_bytes = sum(descriptor.size for descriptor in missing.values()), 0
    progress.receive(0)
    downloads, unpacks = asyncio.Semaphore(PARALLEL_DOWNLOADS), asyncio.Semaphore(PARALLEL_UNPACKS)

    async def fetch(diff_id: str, descriptor: Descriptor) -> None:
        async with locked_blob(
            store.blobs_folder, descriptor.digest, deadline, lambda: store.has_layer(diff_id)
        ) as file:
            if not store.has_layer(diff_id):
                async with downloads:
                    download = BlobDownload(source.client, source.repository, descriptor, file, progress.receive)
                    await download.run(deadline)
                os.lseek(file.fileno(), 0, os.SEEK_SET)
                async with unpacks:
                    await run_cancellable(
                        lambda cancelled: unpack_to_store(file, store, diff_id=diff_id, cancelled=cancelled)
                    )
        progress.finish_layer()

    try:
        async with asyncio.TaskGroup() as group:
            for diff_id, descriptor in missing.items():
                group.create_task(fetch(diff_id, descriptor))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
