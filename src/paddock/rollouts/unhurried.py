"""Work that is finished even if whoever asked for it is cancelled: giving things back, writing an outcome down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

_unfinished: set[asyncio.Task[Any]] = set()
"""The loop itself forgets tasks that nobody holds."""


async def unhurried(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        raise
