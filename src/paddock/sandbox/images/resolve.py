"""An image by its name: the stored one answers, else it is pulled. Nothing else ever answers for a name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.errors import ImageError
from paddock.sandbox.images.oci import is_for_platform, this_platform
from paddock.sandbox.images.reference import is_digest
from paddock.sandbox.images.store import ImageStore, default_store

if TYPE_CHECKING:
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.images.registry.pull import PullProgress


async def get_image(
    name: str,
    *,
    pull: bool = True,
    platform: str | None = None,
    progress: PullProgress | None = None,
    store: ImageStore | None = None,
) -> Image:
    """The image with this name. Raises ImageError if it is not stored and cannot be pulled."""
    if store is None:
        store = await asyncio.to_thread(default_store)
    image = await asyncio.to_thread(store.find, name)
    if image is not None and is_usable(image, platform):
        return image
    if not pull or is_digest(name):
        raise ImageError(
            f"the image {name} is not on this machine",
            hint=f"paddock image pull {name}, or paddock image import ARCHIVE {name}",
        )
    from paddock.sandbox.images.registry.pull import pull_image

    return await pull_image(name, store, platform=platform, progress=progress)


def is_usable(image: Image, platform: str | None) -> bool:
    """Whether a stored image is for a platform. Without one, any image of that name is."""
    return platform is None or is_for_platform(image.platform, platform)


def check_runs_here(image: Image) -> None:
    """Raises ImageError for an image of another platform than this machine's."""
    if not is_for_platform(image.platform, this_platform()):
        raise ImageError(
            f"{image.name} is for {image.platform}, not for {this_platform()}",
            hint=f"paddock image pull {image.name} fetches the one for this machine, if there is one",
        )
