"""What a sandbox backend must get right, check by check.

Inside, `sh` and `python3` must be there. Most checks share one sandbox; those that break theirs open another.
What only an isolating backend can promise is skipped for the others, and so are images without one to open.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.testing.sandbox import commands, egress, ending, files, images, isolation, ports
from paddock.testing.sandbox.subject import SANDBOX, SPEC, SandboxSubject

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.sandbox.base import Sandbox, SandboxSpec
    from paddock.sandbox.images.image import Image
    from paddock.testing.checks import Announce, Result

__all__ = ["check_sandbox", "commands", "egress", "ending", "files", "images", "isolation", "ports"]

CHECK_SECONDS = 60.0


async def check_sandbox(
    open: Callable[[SandboxSpec], Awaitable[Sandbox]],
    *,
    image: Image | None = None,
    announce: Announce | None = None,
) -> list[Result]:
    """Examine a backend, given the function that opens a sandbox of it. Raises if not even one can be opened.

    `image` is one of the backend's `image_provider`, with `sh`, `cat`, `id` and `touch`.
    """
    async with await open(SPEC) as shared:
        subject = SandboxSubject(open, shared, image)
        return await SANDBOX.run(subject, timeout=CHECK_SECONDS, announce=announce)
