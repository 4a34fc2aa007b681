"""The client for code that is not async: the same methods on a loop thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from anyio.from_thread import BlockingPortal

from paddock.client.client import Client
from paddock.errors import ClientError
from paddock.net import check_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.types import CallResult, StepResult, ToolInfo

ObservationT = TypeVar("ObservationT")
GOODBYE_SECONDS = 5.0
"""How long a process that ends waits for a client that nobody closed."""


class SyncClient(Generic[ObservationT]):
    """Like `Client`, without `await`. Use it in `with`, or call `close` when done.

    One that is forgotten is closed when it is collected, or when the process ends.
    """

    def __init__(self, target: str | Callable[[], Any], **options: Any) -> None:
        self._client: Client[ObservationT] = Client(target, **options)
        self._starting = threading.Lock()
        self._thread: LoopThread | None = None
        self._forgotten: weakref.finalize[Any, Any] | None = None
        self._closed = False

    @classmethod
    def connect(cls, target: str | Callable[[], Any], **options: Any) -> Self:
        """A client that is connected already. Raises ConnectFailed."""
        return cls(target, **options).__enter__()

    def __enter__(self) -> Self:
        self._closed = False
        try:
            self._portal.call(self._client.__aenter__)
        except BaseException:
            if thread := self._detached():
                thread.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _portal(self) -> BlockingPortal:
        if (thread := self._thread) is not None:
            # Before the lock: another thread may have held it when this process was forked off.
            check_process(thread.pid)
        with self._starting:
            if self._closed:
                raise ClientError("the client is closed", hint="make a new one")
            if self._thread is None:
                self._thread = LoopThread()
                self._forgotten = weakref.finalize(self, self._thread.leave, self._client.close)
            return self._thread.portal

    def _detached(self) -> LoopThread | None:
        """The loop thread, if there is one, which is no longer ours: the caller ends it."""
        with self._starting:
            thread, self._thread = self._thread, None
            if self._forgotten is not None:
                self._forgotten.detach()
            return thread

    def reset(self, /, *, timeout: float | None = None, **arguments: Any) -> StepResult[ObservationT]:
        return self._portal.call(partial(self._client.reset, timeout=timeout, **arguments))

    def step(self, action: Any, *, timeout: float | None = None) -> StepResult[ObservationT]:
        return self._portal.call(partial(self._client.step, action, timeout=timeout))

    def state(self, *, timeout: float | None = None) -> Any:
        return self._portal.call(partial(self._client.state, timeout=timeout))

    def tools(self, *, timeout: float | None = None) -> list[ToolInfo]:
        return self._portal.call(partial(self._client.tools, timeout=timeout))

    def call_tool(self, name: str, /, **arguments: Any) -> CallResult:
        return self._portal.call(partial(self._client.call_tool, name, **arguments))

    def schema(self) -> dict[str, Any]:
        return self._portal.call(self._client.schema)

    def metadata(self) -> dict[str, Any]:
        return self._portal.call(self._client.metadata)

    def close(self) -> None:
        """End the session and the loop thread. In a forked child both are the parent's, and stay as they are."""
        self._closed = True
        if (known := self._thread) is not None and known.pid != os.getpid():
            self._thread = None
            return
        if thread := self._detached():
            try:
                thread.portal.call(self._client.close)
            finally:
                thread.end()


class LoopThread:
    """An event loop on a thread of its own, which does not keep the process alive."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        started: Future[BlockingPortal] = Future()
        run = partial(asyncio.run, self._serve(started))
        self._thread = threading.Thread(target=run, name="paddock-client", daemon=True)
        self._thread.start()
        self._portal = started.result()

    @property
    def portal(self) -> BlockingPortal:
        """The way onto the loop. Raises ClientError in a forked child, which has no such thread."""
        check_process(self.pid)
        return self._portal

    async def _serve(self, started: Future[BlockingPortal]) -> None:
        self._loop = asyncio.get_running_loop()
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    def end(self) -> None:
        """Let what runs on the loop finish, and wait for the thread. A forked child has none."""
        if self.pid != os.getpid():
            return
        self.portal.call(self.portal.stop)
        self._thread.join()

    def leave(self, close: Callable[[], Awaitable[None]]) -> None:
        """Say goodbye and end. A loop that hangs is left behind.

        The portal would wait for it without end. The collector may call this on the thread itself, and a process
        that was forked off has no such thread.
        """
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._start_goodbye, close)
        if threading.current_thread() is not self._thread:
            self._thread.join(GOODBYE_SECONDS)

    def _start_goodbye(self, close: Callable[[], Awaitable[None]]) -> None:
        self._goodbye = asyncio.ensure_future(self._say_goodbye(close))

    async def _say_goodbye(self, close: Callable[[], Awaitable[None]]) -> None:
        try:
            await close()
        finally:
            await self._portal.stop(cancel_remaining=True)
