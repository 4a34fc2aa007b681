"""A thread with an event loop, for methods that are not async: one per client, started when first needed.

Safe inside and outside a running loop and from several threads. The thread ends with `close`, or with its owner.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.net import check_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str = "paddock-fleet") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._running: RunningLoop | None = None

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        """Run an async function on the thread's loop and wait for its result."""

        async def work() -> T:
            return await function(*arguments, **named)

        if (running := self._running) is not None:
            # Before the lock: another thread may have held it when this process was forked off.
            check_process(running.pid)
        # Under the lock, so that `close` cannot stop the loop between the two and leave the caller waiting.
        with self._lock:
            if self._running is None:
                self._running = RunningLoop(self._name)
                weakref.finalize(self, self._running.stop)
            future = self._running.submit(work())
        try:
            return future.result()
        except BaseException:
            # The caller was interrupted: what it waited for has no owner any more.
            future.cancel()
            raise

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this very thread."""
        running = self._running
        return running is not None and running.is_current

    def close(self) -> None:
        """End the thread. A later call starts another. In a forked child it is the parent's, and stays as it is."""
        if self._running is not None and self._running.pid != os.getpid():
            self._running = None
            return
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.stop()


class RunningLoop:
    """A daemon thread that runs an event loop until `stop`."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=_run, args=(started,), name=name, daemon=True)
        self._thread.start()
        self.loop = started.result()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self) -> None:
        if self.pid != os.getpid():
            return
        if not self._ended.is_set():
            self._ended.set()
            self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.is_current:
            self._thread.join()


def _run(started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.call_soon(started.set_result, loop)
        loop.run_forever()
