"""Where the sandboxes of a backend get their images. `StoreImages` is this machine's own store."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paddock.sandbox.images.resolve import get_image

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.images.dockerfiles.events import BuildEvent
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.network.policy import NetworkPolicy

DOCKERFILE = "Dockerfile"
CONTEXT_MODE = 0o755


class ImageProvider(ABC):
    """Names and Dockerfiles become images that the backend can open."""

    @abstractmethod
    async def get(self, name: str) -> Image:
        """The image with this name. Raises ImageError if there is none."""

    @abstractmethod
    async def build(
        self,
        dockerfile: str,
        files: Mapping[str, bytes],
        modes: Mapping[str, int],
        *,
        network: NetworkPolicy,
        timeout: float,
        on_progress: Callable[[BuildEvent], None] | None = None,
    ) -> Image:
        """Build a Dockerfile whose context are `files`. `modes` has the permission bits of those that are not plain.

        Raises ImageError, also for a network that this backend cannot give to a build.
        """


class StoreImages(ImageProvider):
    """Images of the default store: pulled, imported, or built in sandboxes of this machine."""

    async def get(self, name: str) -> Image:
        return await get_image(name)

    async def build(
        self,
        dockerfile: str,
        files: Mapping[str, bytes],
        modes: Mapping[str, int],
        *,
        network: NetworkPolicy,
        timeout: float,
        on_progress: Callable[[BuildEvent], None] | None = None,
    ) -> Image:
        from paddock.sandbox.images.build import build_image

        context = {**files, DOCKERFILE: dockerfile.encode()}
        with TemporaryDirectory(prefix="paddock-context-") as name:
            folder = Path(name)
            await asyncio.to_thread(_write_files, folder, context, modes)
            return await build_image(dockerfile, folder, network=network, timeout=timeout, on_progress=on_progress)


def _write_files(folder: Path, files: Mapping[str, bytes], modes: Mapping[str, int]) -> None:
    folder.chmod(CONTEXT_MODE)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(mode=CONTEXT_MODE, parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(modes.get(name, 0o644))
