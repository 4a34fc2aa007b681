"""Which process and event loop a client belongs to, and how one that was never closed is cleaned up.

A connection is read by the loop that opened it, in the process that opened it. Elsewhere a caller would wait for
replies that no loop reads, and a forked child would write into its parent's connection. So every call checks both: a
client belongs to the loop of its first call until it is closed. Then it may be opened anywhere.
"""

from __future__ import annotations

import asyncio
import os
import warnings
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from paddock.errors import ClientError
from paddock.processes import check_process

if TYPE_CHECKING:
    from collections.abc import Callable


class Ownership:
    """Which event loop and process a client belongs to."""

    __slots__ = ("_finalizer", "_loop", "_pid")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._finalizer: weakref.finalize[..., object] | None = None

    def check(self, client: object, abandon: Callable[[], bool] | None) -> None:
        """Raise ClientError unless the caller is on the loop of the first call.

        `abandon` closes the client's connections without waiting, and returns whether there were any. It is called
        if the client is garbage-collected while it is open, so it must not refer to the client.
        """
        loop, pid = asyncio.get_running_loop(), os.getpid()
        if loop is self._loop and pid == self._pid:
            return
        if self._loop is not None:
            check_process(self._pid)
            ended = ", which has ended" if self._loop.is_closed() else ""
            raise ClientError(
                f"the client belongs to another event loop{ended}",
                hint="make a client in each asyncio.run(), or close() it before the next one",
            )
        self._loop, self._pid = loop, pid
        if abandon is not None:
            self._finalizer = weakref.finalize(client, _clean_up, abandon, loop, pid, type(client).__name__)
            self._finalizer.atexit = False

    def release(self, abandon: Callable[[], bool] | None) -> bool:
        """The client is being closed. True if its connections may be closed on this loop; else nothing is left to do.

        In a forked child they are the parent's and stay as they are; those of a loop that has ended are abandoned.
        Raises ClientError if another loop still runs them.
        """
        loop, pid = self._loop, self._pid
        if loop is None or (loop is asyncio.get_running_loop() and pid == os.getpid()):
            self._detach()
            return True
        if pid == os.getpid() and not loop.is_closed():
            raise ClientError("the client belongs to another event loop", hint="close it where it was opened")
        self._detach()
        if pid == os.getpid() and abandon is not None:
            with suppress(RuntimeError):
                abandon()
        return False

    def _detach(self) -> None:
        if self._finalizer is not None:
            self._finalizer.detach()
        self._loop = self._finalizer = None


def _clean_up(abandon: Callable[[], bool], loop: asyncio.AbstractEventLoop, pid: int, name: str) -> None:
    """Clean up a client that was never closed. The collector may run on any thread, and in a forked child."""
    if pid != os.getpid():
        return
    # The loop may have ended, or end at this moment.
    with suppress(RuntimeError):
        if loop.is_running():
            loop.call_soon_threadsafe(_abandon, abandon, name)
        else:
            _abandon(abandon, name)


def _abandon(abandon: Callable[[], bool], name: str) -> None:
    try:
        was_open = abandon()
    except RuntimeError:
        # Its loop has ended, and cannot close the connection: the collector does.
        was_open = True
    if was_open:
        hint = "use it in `async with`, or call close()"
        warnings.warn(f"a {name} with an open session was never closed; {hint}", ResourceWarning, stacklevel=2)
