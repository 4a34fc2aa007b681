"""The image of a task: the one that it names, or the one that its Dockerfile builds. Opens no sandbox."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.errors import ImageError

if TYPE_CHECKING:
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.images.provider import BuildRequest, ImageProvider


async def prepare_image(name: str, request: BuildRequest, images: ImageProvider) -> Image:
    """The image that a task names or, without a name, builds, from the `images` of its backend. Raises ImageError."""
    if not name:
        return await images.build(request)
    try:
        async with asyncio.timeout(request.timeout):
            return await images.get(name)
    except TimeoutError:
        raise ImageError(
            f"the image {name} was not pulled within {request.timeout:g} s",
            hint="raise environment.build_timeout_sec, or pull it before: paddock image pull",
        ) from None
