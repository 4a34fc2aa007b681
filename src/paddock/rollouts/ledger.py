"""Sandboxes with an owner: each one is in the store from its start to its end, so that none is forgotten."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from paddock.rollouts.sandbox import end_leftover, open_sandbox
from paddock.rollouts.store import SandboxEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine
    from typing import Any

    from paddock.rollouts.sandbox.base import Sandbox, SandboxSpec
    from paddock.rollouts.store import Recovery, Store


@asynccontextmanager
async def owned_sandbox(
    store: Store, backend: str, spec: SandboxSpec, *, rollout_id: str, consent: bool, timeout: float
) -> AsyncIterator[Sandbox]:
    """A sandbox that the ledger knows. It is gone when the block ends, however it ends."""
    sandbox = await open_sandbox(backend, spec, consent=consent, timeout=timeout)
    try:
        entry = SandboxEntry(
            sandbox_id=sandbox.id,
            backend=backend,
            rollout_id=rollout_id,
            host_pid=sandbox.host_pid,
            host_start_time=sandbox.host_start_time,
            paths=[str(path) for path in sandbox.host_paths],
            created_at=time.time(),
        )
        await store.run(store.note_sandbox, entry)
        yield sandbox
    finally:
        await unhurried(_close(store, sandbox))


async def _close(store: Store, sandbox: Sandbox) -> None:
    await sandbox.close()
    await store.run(store.end_sandbox, sandbox.id)


async def unhurried(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even if the caller is cancelled meanwhile; the cancellation comes after it."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
        raise


def recover(store: Store) -> Recovery:
    """Give every rollout of a dead process its outcome, and end the sandboxes it left behind."""
    return store.recover(_end)


def _end(entry: SandboxEntry) -> bool:
    return end_leftover(entry.host_pid, entry.host_start_time, entry.paths)
