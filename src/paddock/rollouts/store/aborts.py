"""Asking a running rollout to stop, across processes: a file in the store's folder that bears its id.

Whoever runs rollouts looks for such files a few times a second, once for all of them.
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

LOOK_EVERY = 0.25
LONGEST_REASON = 200
ASKED = "somebody asked for it to be stopped"


class Aborts:
    """The folder `aborts` of a store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "aborts"
        self._watches: dict[asyncio.AbstractEventLoop, _Watch] = {}

    def ask(self, rollout_id: str, reason: str = ASKED) -> None:
        """Have a rollout stopped. Raises StoreError if the folder cannot be written, or if that is no id."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._file(rollout_id).write_text(reason[:LONGEST_REASON])
        except OSError as error:
            raise StoreError(
                f"the store cannot be told to stop {rollout_id}: {error.strerror or error}",
                hint="make the folder of the store writable",
            ) from error

    def asked(self, rollout_id: str) -> str | None:
        """Why a rollout is to be stopped; None if it is not."""
        try:
            return self._file(rollout_id).read_text(errors="replace")[:LONGEST_REASON] or ASKED
        except OSError:
            return None

    def settle(self, rollout_id: str) -> None:
        """The rollout has ended: nothing is left to be stopped."""
        with suppress(OSError):
            self._file(rollout_id).unlink()

    @asynccontextmanager
    async def heeded(self, rollout_id: str, abort: Abort) -> AsyncIterator[None]:
        """While the block runs, `abort` is called, at most once, as soon as somebody asks for it."""
        loop = asyncio.get_running_loop()
        watch = self._watches.get(loop)
        if watch is None:
            watch = self._watches[loop] = _Watch(self)
        watch.add(rollout_id, abort)
        try:
            yield
        finally:
            if watch.remove(rollout_id):
                self._watches.pop(loop, None)

    def names(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except OSError:
            return []

    def _file(self, rollout_id: str) -> Path:
        if not rollout_id or "/" in rollout_id or "\0" in rollout_id or rollout_id in (".", ".."):
            raise StoreError(f"{rollout_id!r} is no id of a rollout", hint="paddock trace list shows them")
        return self._folder / rollout_id


class _Watch:
    """Looks for the rollouts of one event loop."""

    def __init__(self, aborts: Aborts) -> None:
        self._aborts = aborts
        self._running: dict[str, Abort] = {}
        self._asked: set[str] = set()
        self._under_way: set[asyncio.Task[None]] = set()
        self._looking = asyncio.ensure_future(self._look())

    def add(self, rollout_id: str, abort: Abort) -> None:
        self._running[rollout_id] = abort

    def remove(self, rollout_id: str) -> bool:
        """True if it was the last."""
        del self._running[rollout_id]
        self._asked.discard(rollout_id)
        if not self._running:
            self._looking.cancel()
        return not self._running

    async def _look(self) -> None:
        while True:
            for rollout_id in self._aborts.names():
                if rollout_id in self._running and rollout_id not in self._asked:
                    self._asked.add(rollout_id)
                    reason = self._aborts.asked(rollout_id) or ASKED
                    task = asyncio.ensure_future(self._running[rollout_id](reason))
                    self._under_way.add(task)
                    task.add_done_callback(self._under_way.discard)
            await asyncio.sleep(LOOK_EVERY)
