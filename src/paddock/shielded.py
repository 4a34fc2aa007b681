"""Work that finishes even if its caller is cancelled: releasing resources, storing an outcome."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

_running: set[asyncio.Task[Any]] = set()
"""The event loop holds only weak references to its tasks."""


async def run_shielded(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    _running.add(task)
    task.add_done_callback(_running.discard)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        raise
