"""Threads for environments whose code is not async.

A bounded pool serves everybody. A thread whose job overstays does not count against the bound any
more, so hung steps cannot starve the others. Results reach the loop in batches: one wake-up carries
all jobs that finished since the last.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections import deque
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.errors import EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Callable

OVERSTAY = 1.0

ResultT = TypeVar("ResultT")


async def awaited(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call and, if it is async, await. What asks the process to end becomes an ordinary failure."""
    try:
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, KeyboardInterrupt) as error:
        raise EnvironmentFailure(f"{type(error).__name__}: {error}", error_type=type(error).__name__) from error


class Job:
    """One call on a thread. `done(value, error)` runs on the loop when it has ended."""

    __slots__ = ("argument", "done", "environment", "error", "function", "started", "value")

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        environment: Any,
        argument: Any,
        done: Callable[[Any, BaseException | None], None],
    ) -> None:
        self.function = function
        self.environment = environment
        self.argument = argument
        self.done = done
        self.started = 0.0
        self.value: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        self.started = monotonic()
        try:
            self.value = self.function(self.environment, self.argument)
        except BaseException as error:
            # An environment may raise SystemExit or GeneratorExit; neither is ours to obey.
            self.error = error


class Threads:
    """A pool of daemon threads bound to one event loop."""

    def __init__(self, limit: int, name: str = "paddock") -> None:
        self.limit = limit
        self._name = name
        self._numbers = itertools.count()
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._running: dict[int, Job] = {}
        self._finished: deque[Job] = deque()
        self._waking = False
        self._count = 0
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        self._closed = False

    @property
    def count(self) -> int:
        return self._count

    def overstaying(self) -> int:
        """How many jobs have run for longer than they should."""
        limit = monotonic() - OVERSTAY
        return sum(1 for job in list(self._running.values()) if job.started < limit)

    def submit(self, job: Job) -> None:
        self._jobs.put(job)
        if self._count < self.limit and self._jobs.qsize() > self._count - len(self._running):
            self._grow()

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Run `function` on a thread and wait for it. Cancelling stops the waiting, not the function."""
        future: asyncio.Future[ResultT] = self._loop.create_future()

        def done(value: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self.submit(Job(lambda _environment, _argument: function(), None, None, done))
        return await future

    def compensate(self) -> None:
        """Give the waiting jobs threads in place of those whose jobs overstay. Called now and then."""
        if self._count == len(self._running) and not self._jobs.empty():
            for _ in range(min(self.limit + self.overstaying() - self._count, self._jobs.qsize())):
                self._grow()

    def close(self) -> None:
        """Let idle threads end. Threads with a hung job are daemons and end with the process."""
        self._closed = True
        for _ in range(self._count):
            self._jobs.put(None)

    def _grow(self) -> None:
        self._count += 1
        number = next(self._numbers)
        threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True).start()

    def _work(self, number: int) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                break
            self._running[number] = job
            job.run()
            del self._running[number]
            self._finished.append(job)
            if not self._waking:
                self._waking = True
                self._wake()
            if self._count > self.limit and self._jobs.empty():
                break
        with self._lock:
            self._count -= 1

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            if not self._closed and not self._loop.is_closed():
                raise

    def _deliver(self) -> None:
        # The flag falls before the queue is emptied, so a job that ends meanwhile wakes us again.
        self._waking = False
        while self._finished:
            job = self._finished.popleft()
            job.done(job.value, job.error)
