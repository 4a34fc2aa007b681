"""The image of a task: the one that it names, or the one that its Dockerfile builds. Opens no sandbox."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.images.dockerfiles.events import BuildEvent
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.images.provider import ImageProvider
    from paddock.sandbox.network.policy import NetworkPolicy
    from paddock.tasks.settings import TaskImage


async def prepare_image(
    source: TaskImage,
    context: Mapping[str, bytes],
    modes: Mapping[str, int],
    *,
    images: ImageProvider,
    network: NetworkPolicy,
    timeout: float,
    on_progress: Callable[[BuildEvent], None] | None = None,
) -> Image:
    """The image that a task names or builds, from the `images` of its backend. Raises ImageError.

    `context` are the files that its Dockerfile can copy, `modes` the permission bits of those that are not plain.
    """
    if not source.name:
        return await images.build(
            source.dockerfile, context, modes, network=network, timeout=timeout, on_progress=on_progress
        )
    try:
        async with asyncio.timeout(timeout):
            return await images.get(source.name)
    except TimeoutError:
        raise ImageError(
            f"the image {source.name} was not pulled within {timeout:g} s",
            hint="raise environment.build_timeout_sec, or pull it before: paddock image pull",
        ) from None
