"""Abort requests across processes: a file in the store's folder, named after the rollout that has to stop.

A process that runs rollouts polls the folder a few times a second, once for all of them.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from paddock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from pathlib import Path

    Abort = Callable[[str], Coroutine[object, object, None]]

POLL_SECONDS = 0.25
MAX_REASON_CHARACTERS = 200
DEFAULT_REASON = "an abort was requested"


class Aborts:
    """The folder `aborts` of a store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "aborts"
        self._pollers: dict[asyncio.AbstractEventLoop, _Poller] = {}

    def request(self, rollout_id: str, reason: str = DEFAULT_REASON) -> None:
        """Request that a rollout stops. Raises StoreError if the folder cannot be written, or if that is no id."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._file(rollout_id).write_text(reason[:MAX_REASON_CHARACTERS])
        except OSError as error:
            raise StoreError(
                f"the store cannot take the request to stop {rollout_id}: {error.strerror or error}",
                hint="make the folder of the store writable",
            ) from error

    def reason_for(self, rollout_id: str) -> str | None:
        """Why a rollout has to stop; None without a request."""
        try:
            return self._file(rollout_id).read_text(errors="replace")[:MAX_REASON_CHARACTERS] or DEFAULT_REASON
        except OSError:
            return None

    def clear(self, rollout_id: str) -> None:
        """Remove the request for a rollout that has ended."""
        with suppress(OSError):
            self._file(rollout_id).unlink()

    @asynccontextmanager
    async def watch(self, rollout_id: str, abort: Abort) -> AsyncIterator[None]:
        """While the block runs, `abort` is called, at most once, as soon as it is requested, in any process."""
        loop = asyncio.get_running_loop()
        poller = self._pollers.get(loop)
        if poller is None:
            poller = self._pollers[loop] = _Poller(self)
        poller.add(rollout_id, abort)
        try:
            yield
        finally:
            if poller.remove(rollout_id):
                self._pollers.pop(loop, None)

    def requested_ids(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except OSError:
            return []

    def _file(self, rollout_id: str) -> Path:
        if not rollout_id or "/" in rollout_id or "\0" in rollout_id or rollout_id in (".", ".."):
            raise StoreError(f"{rollout_id!r} is no id of a rollout", hint="paddock trace list shows them")
        return self._folder / rollout_id


class _Poller:
    """Polls for the rollouts of one event loop."""

    def __init__(self, aborts: Aborts) -> None:
        self._aborts = aborts
        self._running: dict[str, Abort] = {}
        self._requested: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._polling = asyncio.ensure_future(self._poll())

    def add(self, rollout_id: str, abort: Abort) -> None:
        self._running[rollout_id] = abort

    def remove(self, rollout_id: str) -> bool:
        """True if it was the last."""
        del self._running[rollout_id]
        self._requested.discard(rollout_id)
        if not self._running:
            self._polling.cancel()
        return not self._running

    async def _poll(self) -> None:
        while True:
            for rollout_id in self._aborts.requested_ids():
                if rollout_id in self._running and rollout_id not in self._requested:
                    self._requested.add(rollout_id)
                    reason = self._aborts.reason_for(rollout_id) or DEFAULT_REASON
                    task = asyncio.ensure_future(self._running[rollout_id](reason))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(POLL_SECONDS)
