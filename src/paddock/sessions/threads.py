"""Threads for environments whose code is not async.

A job runs on a thread and is finished on the event loop. `ThreadPool` is bounded and serves all sessions. A thread
whose job overstays does not count against the bound, so hung steps cannot starve the others. `OwnThread` serves one
session whose environment must not leave its thread.

Knows nothing of sessions or requests. `server/fastpath/threads.py` has faster variants with the same semantics.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.errors import EnvironmentFailure
from paddock.protocol.redact import describe_error

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("paddock.sessions")
OVERSTAY_SECONDS = 1.0
ResultT = TypeVar("ResultT")


async def call_or_await(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call and, if it is async, await. What asks the process to end becomes an ordinary failure."""
    try:
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, KeyboardInterrupt) as error:
        raise EnvironmentFailure(f"{type(error).__name__}: {error}", error_type=type(error).__name__) from error


class ThreadJob:
    """Something for a thread to do: `run` there, then `finish` on the loop."""

    value: Any = None
    error: BaseException | None = None

    def call(self) -> Any:
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError

    def run(self) -> None:
        try:
            self.value = self.call()
        except BaseException as error:
            # An environment may raise SystemExit or GeneratorExit. The thread must survive both.
            self.error = error


class FunctionJob(ThreadJob):
    """A plain function. `done(value, error)` runs on the loop."""

    def __init__(self, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.call = function  # type: ignore[method-assign]
        self._on_done = done

    def finish(self) -> None:
        self._on_done(self.value, self.error)


class Completions:
    """Jobs that have ended, on their way back to the loop. One wake-up of the loop finishes all of them."""

    def __init__(self) -> None:
        self._ended: deque[ThreadJob] = deque()
        self._is_waking = False
        self._loop = asyncio.get_running_loop()

    def add(self, job: ThreadJob) -> None:
        """From any thread: `job` has run."""
        self._ended.append(job)
        self._wake()

    def deliver(self) -> None:
        """On the loop: finish what has ended so far."""
        # The flag is cleared before the queue is emptied, so a job that ends meanwhile wakes the loop again.
        self._is_waking = False
        while self._ended:
            try:
                self._ended.popleft().finish()
            except Exception:
                logger.exception("the end of a job could not be handled")

    def _wake(self) -> None:
        if not self._is_waking:
            self._is_waking = True
            call_on(self._loop, self.deliver)


class Runner(ABC):
    """Where the jobs of a session run."""

    @abstractmethod
    def submit(self, job: ThreadJob) -> None:
        """On the loop: have a thread run `job`."""

    @abstractmethod
    def close(self) -> None:
        """Let idle threads end. Threads with a hung job are daemons and end with the process."""

    async def call(self, function: Callable[[], ResultT]) -> ResultT:
        """Run `function` on a thread and wait for it. Cancelling stops the waiting, not the function."""
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()

        def done(value: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                # A future takes no StopIteration, and SystemExit must not reach the loop.
                is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if is_plain else RuntimeError(describe_error(error)))

        self.submit(FunctionJob(function, done))
        return await future


class ThreadPool(Runner):
    """A bounded pool of daemon threads for one event loop."""

    def __init__(self, limit: int, completions: Completions, name: str = "paddock") -> None:
        self.limit = limit
        self.completions = completions
        self.waiting: deque[ThreadJob] = deque()
        self._name = name
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._count = 0
        self._began: dict[int, float] = {}
        """When each running job began, by the number of its thread."""
        self._idle: list[threading.Lock] = []
        """What each idle thread blocks on, the one that was busy last at the end."""
        self._closed = False

    @property
    def count(self) -> int:
        return self._count

    def submit(self, job: ThreadJob) -> None:
        self.waiting.append(job)
        self.wake_one()

    def wake_one(self) -> None:
        """Wake an idle thread, or start one. It takes the next job, and further ones while there are any."""
        try:
            wake_up = self._idle.pop()
        except IndexError:
            if self._room() > 0:
                self._start_thread()
        else:
            wake_up.release()

    def overstaying(self) -> int:
        """How many jobs have run for longer than they should."""
        return self.running_longer_than(OVERSTAY_SECONDS)

    def running_longer_than(self, seconds: float) -> int:
        limit = monotonic() - seconds
        return sum(1 for began in list(self._began.values()) if began < limit)

    def compensate(self) -> None:
        """Start threads in place of those whose jobs overstay. Called about ten times a second."""
        if self.waiting and self._count == len(self._began):
            for _ in range(min(self._room(), len(self.waiting))):
                self._start_thread()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().release()

    def run_job(self, job: ThreadJob, number: int, began: float) -> None:
        """On a thread: run the job, the thread's job with this number, and hand it to the loop."""
        job.run()
        self.completions.add(job)

    def _room(self) -> int:
        """How many threads may be added. A job that overstays does not count, whatever its thread does later."""
        free = self.limit - self._count
        return free if free > 0 else free + self.overstaying()

    def _start_thread(self) -> None:
        number = next(self._numbers)
        thread = threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True)
        with self._lock:
            self._count += 1
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._count -= 1
            self._go_without_thread(error)

    def _go_without_thread(self, error: RuntimeError) -> None:
        """The system grants no more threads: the existing ones do the work. If there is none, the jobs fail."""
        logger.warning("no thread beyond %d could be started: %s", self._count, error)
        while self.waiting and not self._count:
            job = self.waiting.popleft()
            job.error = error
            self.completions.add(job)

    def _work(self, number: int) -> None:
        wake_up = threading.Lock()
        wake_up.acquire()
        done = 0
        while (job := self._next(wake_up)) is not None:
            self._began[number] = began = monotonic()
            try:
                self.run_job(job, done, began)
            finally:
                self._began.pop(number, None)
            done += 1
            del job
            if self._count > self.limit and not self.waiting and self._room() < 0:
                break
        with self._lock:
            self._count -= 1

    def _next(self, wake_up: threading.Lock) -> ThreadJob | None:
        """The next job, when there is one; None when the pool is closed."""
        while True:
            try:
                return self.waiting.popleft()
            except IndexError:
                if self._closed:
                    return None
            self._idle.append(wake_up)
            if self.waiting or self._closed:
                # A job came between the two looks. Whoever added it has seen us in `_idle`, or not.
                try:
                    self._idle.remove(wake_up)
                except ValueError:
                    wake_up.acquire()
            else:
                wake_up.acquire()


class OwnThread(Runner):
    """One session's thread, started with its first job."""

    _numbers = itertools.count()

    def __init__(self, completions: Completions) -> None:
        self.completions = completions
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        self._is_started = False
        self._closed = False

    def submit(self, job: ThreadJob) -> None:
        self.begin(job)

    def begin(self, job: ThreadJob) -> None:
        """Have the thread run `job` now."""
        try:
            if not self._is_started:
                self._start()
        except RuntimeError as error:
            job.error = error
            self.completions.add(job)
            return
        self._jobs.put(job)
        if self._closed:
            self._stop()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._stop()

    def run_job(self, job: ThreadJob, number: int) -> None:
        """On the thread: run its job with this number, and hand it to the loop."""
        job.run()
        self.completions.add(job)

    def _start(self) -> None:
        threading.Thread(target=self._work, name=f"paddock-own-{next(self._numbers)}", daemon=True).start()
        self._is_started = True

    def _stop(self) -> None:
        if self._is_started:
            self._is_started = False
            self._jobs.put(None)

    def _work(self) -> None:
        done = 0
        while (job := self._jobs.get()) is not None:
            self.run_job(job, done)
            done += 1
            del job


class Threads:
    """All threads of one session manager: the pool, and what makes the other runners."""

    def __init__(self, limit: int) -> None:
        self.completions = Completions()
        self.pool = self.make_pool(limit)

    def make_pool(self, limit: int, name: str = "paddock") -> ThreadPool:
        return ThreadPool(limit, self.completions, name)

    def make_own_thread(self) -> OwnThread:
        return OwnThread(self.completions)


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """From a thread: have the loop call it soon, unless the loop has ended."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise
