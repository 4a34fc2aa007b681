"""An event loop on a thread of its own, for methods that are not async.

The thread starts with the first call. It ends with `close`, with its owner, or with the process, which it does not
keep alive. Calls are safe inside and outside a running loop, and from several threads. A forked child has no such
thread: a call there raises ClientError, and `close` does nothing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.errors import ClientError
from paddock.processes import check_process

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

COLLECTED_SECONDS = 5.0
"""How long a process that ends, or the garbage collector, waits for the cleanup of an owner that was never closed."""


class LoopThread:
    """One per owner. `cleanup` runs on the loop before it stops, also when the owner was never closed."""

    def __init__(self, name: str = "paddock-loop", *, cleanup: Callable[[], Awaitable[None]] | None = None) -> None:
        self._name = name
        self._cleanup = cleanup
        self._lock = threading.Lock()
        self._running: RunningLoop | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def call(self, function: Callable[..., Awaitable[T]], /, *arguments: Any, **keywords: Any) -> T:
        """Run an async function on the loop and wait for its result."""
        running, future = self._submit(function, *arguments, **keywords)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._running is running:
                raise
            raise ClientError("the client was closed during the call") from None
        except BaseException:
            # The caller was interrupted: no other caller awaits the result.
            future.cancel()
            raise

    def submit(
        self, function: Callable[..., Awaitable[T]], /, *arguments: Any, **keywords: Any
    ) -> concurrent.futures.Future[T]:
        """Start an async function on the loop. Cancelling the future cancels it."""
        return self._submit(function, *arguments, **keywords)[1]

    def _submit(
        self, function: Callable[..., Awaitable[T]], /, *arguments: Any, **keywords: Any
    ) -> tuple[RunningLoop, concurrent.futures.Future[T]]:
        async def work() -> T:
            return await function(*arguments, **keywords)

        if (running := self._running) is not None:
            # Before the lock: another thread may have held it when this process was forked off.
            check_process(running.pid)
        # Under the lock, so that `close` cannot stop the loop between the two and leave the caller waiting.
        with self._lock:
            if self._running is None:
                self._running = RunningLoop(self._name)
                self._finalizer = weakref.finalize(self, self._running.abandon, self._cleanup)
            return self._running, self._running.submit(work())

    @property
    def is_current(self) -> bool:
        """Whether the caller is on this thread."""
        running = self._running
        return running is not None and running.is_current

    def close(self) -> None:
        """Run the cleanup, cancel the calls of other threads, and end the thread. A later call starts another."""
        if self._running is not None and self._running.pid != os.getpid():
            self._running = None
            return
        with self._lock:
            running, self._running = self._running, None
            if self._finalizer is not None:
                self._finalizer.detach()
        if running is not None:
            try:
                if self._cleanup is not None and not running.is_current:
                    running.submit(_run(self._cleanup)).result()
            finally:
                running.stop()


class RunningLoop:
    """A daemon thread that runs an event loop until `stop`."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._thread = threading.Thread(target=_run_loop, args=(started,), name=name, daemon=True)
        self._thread.start()
        self.loop = started.result()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on the loop's thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the loop, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, *, timeout: float | None = None) -> None:
        """Cancel what runs on the loop, and wait for the thread. May be called again, and on the thread itself."""
        if self.pid != os.getpid():
            return
        if not self.loop.is_closed():
            try:
                self.loop.call_soon_threadsafe(self.loop.stop)
            except RuntimeError:  # It was closed in between.
                return
        if not self.is_current:
            self._thread.join(timeout)

    def abandon(self, cleanup: Callable[[], Awaitable[None]] | None) -> None:
        """Clean up and stop without a caller: a loop that hangs is left behind after `COLLECTED_SECONDS`.

        The garbage collector may call this on the thread itself, where nothing can be waited for.
        """
        if self.pid != os.getpid() or not self._thread.is_alive():
            return
        if cleanup is not None:
            future = self.submit(_run(cleanup))
            # A cleanup that has ended by now calls this here, not on the loop, which has to be woken up then.
            future.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
            if not self.is_current:
                self._thread.join(COLLECTED_SECONDS)
        else:
            self.stop(timeout=COLLECTED_SECONDS)


async def _run(cleanup: Callable[[], Awaitable[None]]) -> None:
    await cleanup()


def _run_loop(started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.call_soon(started.set_result, loop)
        loop.run_forever()
