"""Where the sandboxes of a backend get their images. `StoreImages` is this machine's own store."""

from __future__ import annotations

import asyncio
import os
import stat
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from paddock.sandbox.images.image import DOCKERFILE
from paddock.sandbox.images.resolve import check_runs_here, get_image

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.sandbox.images.dockerfiles.events import BuildEvent
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.network.policy import NetworkPolicy

CONTEXT_MODE = 0o755


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """A Dockerfile to build."""

    dockerfile: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The files that it can copy, by their path."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """The permission bits of those files that are not plain. S_IFLNK: a symlink, whose target is the content."""
    network: NetworkPolicy
    timeout: float
    """In seconds."""
    on_progress: Callable[[BuildEvent], None] | None = None


class ImageProvider(ABC):
    """Names and Dockerfiles become images that the backend can open."""

    @abstractmethod
    async def get(self, name: str) -> Image:
        """The image with this name. Raises ImageError if there is none."""

    @abstractmethod
    async def build(self, request: BuildRequest) -> Image:
        """Build a Dockerfile. Raises ImageError, also for a network that this backend cannot give to a build."""


class StoreImages(ImageProvider):
    """Images of the default store: pulled, imported, or built in sandboxes of this machine."""

    async def get(self, name: str) -> Image:
        image = await get_image(name)
        check_runs_here(image)
        return image

    async def build(self, request: BuildRequest) -> Image:
        from paddock.sandbox.images.build import build_image

        context = {**request.files, DOCKERFILE: request.dockerfile.encode()}
        with TemporaryDirectory(prefix="paddock-context-") as name:
            folder = Path(name)
            await asyncio.to_thread(_write_files, folder, context, request.modes)
            return await build_image(
                request.dockerfile,
                folder,
                network=request.network,
                timeout=request.timeout,
                on_progress=request.on_progress,
            )


def _write_files(folder: Path, files: Mapping[str, bytes], modes: Mapping[str, int]) -> None:
    folder.chmod(CONTEXT_MODE)
    # Links come last: no file is written through one.
    for name, content in sorted(files.items(), key=lambda file: stat.S_ISLNK(modes.get(file[0], 0))):
        path = folder / name
        path.parent.mkdir(mode=CONTEXT_MODE, parents=True, exist_ok=True)
        if stat.S_ISLNK(modes.get(name, 0)):
            path.symlink_to(os.fsdecode(content))
            continue
        path.write_bytes(content)
        path.chmod(modes.get(name, 0o644))
