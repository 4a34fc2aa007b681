"""Sandboxes with an owner: each one is in the store from its start to its end, so that none is forgotten."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from paddock.rollouts.sandbox import end_elsewhere, end_leftover, new_sandbox_id, open_sandbox
from paddock.rollouts.sandbox.base import host_folder
from paddock.rollouts.store import SandboxEntry
from paddock.rollouts.unhurried import unhurried

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.rollouts.sandbox.base import Sandbox, SandboxSpec
    from paddock.rollouts.store import Recovery, Store


@asynccontextmanager
async def owned_sandbox(
    store: Store, backend: str, spec: SandboxSpec, *, rollout_id: str | None, consent: bool, timeout: float
) -> AsyncIterator[Sandbox]:
    """A sandbox that the ledger knows before it exists. It is gone when the block ends, however it ends."""
    entry = SandboxEntry(new_sandbox_id(), backend, rollout_id, created_at=time.time())
    entry.paths = [str(host_folder(entry.sandbox_id))]
    sandbox: Sandbox | None = None
    try:
        await store.run(store.note_sandbox, entry)
        sandbox = opened = await open_sandbox(
            backend, spec, sandbox_id=entry.sandbox_id, consent=consent, timeout=timeout
        )
        entry.host_pid, entry.host_start_time = opened.host_pid, opened.host_start_time
        await store.run(store.note_sandbox, entry)
        yield opened
    finally:
        await unhurried(_close(store, entry, sandbox))


async def _close(store: Store, entry: SandboxEntry, sandbox: Sandbox | None) -> None:
    if sandbox is not None:
        await sandbox.close()
    await store.run(store.end_sandbox, entry.sandbox_id)


def recover(store: Store) -> Recovery:
    """Give every rollout of a dead process its outcome, and end the sandboxes it left behind."""
    return store.recover(_end)


def _end(entry: SandboxEntry) -> bool:
    gone = end_leftover(entry.host_pid, entry.host_start_time, entry.paths, sandbox_id=entry.sandbox_id)
    return end_elsewhere(entry.backend, entry.sandbox_id) and gone
