"""`build_image`: an image from a Dockerfile, without a container runtime."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.errors import ImageError
from paddock.limits import GIBIBYTE, SandboxLimits
from paddock.sandbox.images.dockerfiles.builder import Builder
from paddock.sandbox.images.dockerfiles.context import open_context
from paddock.sandbox.images.dockerfiles.dockerfile import Dockerfile, Stage, parse_dockerfile
from paddock.sandbox.images.dockerfiles.scope import BuildInputs
from paddock.sandbox.images.dockerfiles.syntax import line_error
from paddock.sandbox.images.oci import this_platform
from paddock.sandbox.images.reference import parse_reference
from paddock.sandbox.images.store import ImageStore, default_store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paddock.sandbox.images.dockerfiles.context import BuildContext
    from paddock.sandbox.images.dockerfiles.events import BuildEvent
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.network.policy import NetworkPolicy

DEFAULT_LIMITS = SandboxLimits(disk_bytes=16 * GIBIBYTE, cpu_seconds=4 * 3600.0, processes=2048)


async def build_image(
    dockerfile: str,
    context: BuildContext | Path | Mapping[str, bytes],
    *,
    name: str | None = None,
    target: str | None = None,
    build_args: Mapping[str, str] | None = None,
    network: NetworkPolicy,
    limits: SandboxLimits | None = None,
    timeout: float,
    on_progress: Callable[[BuildEvent], None] | None = None,
    store: ImageStore | None = None,
    use_cache: bool = True,
) -> Image:
    """Build the last stage of a Dockerfile, or `target`, store it under `name`, and return it.

    Without a name it is stored under one made from its digest. Raises ImageError with the line of the Dockerfile. A
    build that fails or is cancelled keeps the layers of the steps that were finished, and nothing else.
    """
    if name is not None:
        # Not first after a long build.
        parse_reference(name)
    parsed = parse_dockerfile(dockerfile)
    inputs = BuildInputs(dict(build_args or {}), this_platform())
    with open_context(context) as opened:
        builder = Builder(
            parsed,
            opened.tree(),
            inputs,
            network=network,
            limits=limits or DEFAULT_LIMITS,
            store=store or default_store(),
            on_progress=on_progress,
            use_cache=use_cache,
        )
        stage = _find_target(parsed, target)
        try:
            async with asyncio.timeout(timeout):
                return await builder.build(stage, name)
        except TimeoutError:
            message = f"the build did not end within {timeout:g} s"
            hint = "raise the limit: --timeout, or build_timeout_sec in task.toml"
            if builder.instruction is None:
                raise ImageError(message, hint=hint) from None
            line, text = builder.instruction.line, builder.instruction.text
            raise line_error(line, f"{text}: {message}", hint) from None


def _find_target(dockerfile: Dockerfile, target: str | None) -> Stage:
    if target is None:
        return dockerfile.stages[-1]
    stage = dockerfile.find_stage(target)
    if stage is None:
        names = ", ".join(one.name or str(one.position) for one in dockerfile.stages)
        raise ImageError(f"the Dockerfile has no stage {target!r}", hint=f"it has {names}")
    return stage
