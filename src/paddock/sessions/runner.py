"""Threads for environments whose code is not async.

A bounded pool serves everybody. A thread whose job overstays does not count against the bound any
more, so hung steps cannot starve the others.

Threads and the loop take turns at the interpreter's lock, and a turn costs as much as a short step. So
there are as few turns as possible: the loop hands over what one look at its sockets brought, one thread
does all of it where jobs are short and compute, and what has ended comes back many at a time.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections import deque
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, TypeVar

from paddock.errors import EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Callable

OVERSTAY = 1.0
COMPUTES = 0.0005
WAITS = 0.0002
"""Jobs that compute and wait for less run one after the other: another thread would only wait for the lock."""
PATIENCE = 0.005
"""How long they wait for the one before them to end."""
WEIGHED_EVERY = 16
SMOOTHING = 16

ResultT = TypeVar("ResultT")


async def awaited(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call and, if it is async, await. What asks the process to end becomes an ordinary failure."""
    try:
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, KeyboardInterrupt) as error:
        raise EnvironmentFailure(f"{type(error).__name__}: {error}", error_type=type(error).__name__) from error


class Job:
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
            # An environment may raise SystemExit or GeneratorExit; neither is ours to obey.
            self.error = error

    def is_awaited(self) -> bool:
        """Whether the loop must hear of the end at once. Asked on the thread, after the end."""
        return True


class Call(Job):
    """A plain function. `done(value, error)` runs on the loop."""

    def __init__(self, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.call = function  # type: ignore[method-assign]
        self._done = done

    def finish(self) -> None:
        self._done(self.value, self.error)


class Returns:
    """Jobs that have ended, on their way back to the loop. One wake-up carries all since the last."""

    def __init__(self) -> None:
        self._ended: deque[Job] = deque()
        self._waking = False
        self._loop = asyncio.get_running_loop()

    def put(self, job: Job, *, late: bool) -> None:
        """From a thread. What nobody waits for is found by the next `deliver`."""
        self._ended.append(job)
        if (late or job.is_awaited()) and not self._waking:
            self._waking = True
            try:
                self._loop.call_soon_threadsafe(self.deliver)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise

    def deliver(self) -> None:
        """Finish what has ended so far."""
        # The flag falls before the queue is emptied, so a job that ends meanwhile wakes us again.
        self._waking = False
        while self._ended:
            self._ended.popleft().finish()


class Threads:
    """A pool of daemon threads bound to one event loop."""

    def __init__(self, limit: int, name: str = "paddock", returns: Returns | None = None) -> None:
        self.limit = limit
        self._name = name
        self._returns = returns or Returns()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._count = 0
        self._waiting: deque[Job] = deque()
        self._began: dict[int, float] = {}
        """When each running job began, by the number of its thread."""
        self._idle: list[threading.Lock] = []
        """The doors of idle threads, the one that was busy last at the end."""
        self._handing_out = False
        self._looking = False
        self._long = 0.0
        """The share of jobs, lately, that were worth a thread of their own."""
        self._closed = False

    @property
    def count(self) -> int:
        return self._count

    def overstaying(self) -> int:
        """How many jobs have run for longer than they should."""
        return self._running_for(OVERSTAY)

    def submit(self, job: Job) -> None:
        """On the loop. Threads hear of it at the end of the loop's turn, together with all others of that turn."""
        self._waiting.append(job)
        if not self._handing_out:
            self._handing_out = True
            self._loop.call_soon(self._hand_out)

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

        self.submit(Call(function, done))
        return await future

    def compensate(self) -> None:
        """Give the waiting jobs threads in place of those whose jobs overstay. Called now and then."""
        if self._waiting and self._count == len(self._began):
            for _ in range(min(self.limit + self.overstaying() - self._count, len(self._waiting))):
                self._grow()

    def close(self) -> None:
        """Let idle threads end. Threads with a hung job are daemons and end with the process."""
        self._closed = True
        while self._idle:
            self._idle.pop().release()

    # -- on the loop ------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        self._handing_out = False
        if self._long > 0.5:
            self._knock_for_each()
        elif self._all_are_held_up():
            self._knock()
        if not self._looking and self.limit > 1:
            self._looking = True
            self._loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """What waits behind a job that turns out long goes to other threads."""
        self._looking = False
        if self._waiting:
            if not self._handing_out and self._all_are_held_up():
                self._knock_for_each()
            self._looking = True
            self._loop.call_later(PATIENCE, self._look)

    def _all_are_held_up(self) -> bool:
        """Whether no thread that is awake will come for the next job soon."""
        return self._count - len(self._idle) <= self._running_for(PATIENCE)

    def _running_for(self, seconds: float) -> int:
        limit = monotonic() - seconds
        return sum(1 for began in list(self._began.values()) if began < limit)

    def _knock_for_each(self) -> None:
        for _ in range(min(len(self._waiting), len(self._idle) + self.limit - self._count)):
            self._knock()

    def _knock(self) -> None:
        """Wake an idle thread, or make one."""
        try:
            door = self._idle.pop()
        except IndexError:
            if self._count < self.limit:
                self._grow()
        else:
            door.release()

    def _grow(self) -> None:
        with self._lock:
            self._count += 1
        number = next(self._numbers)
        threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True).start()

    # -- on a thread ------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        door = threading.Lock()
        door.acquire()
        done = 0
        while (job := self._next(door)) is not None:
            self._began[number] = began = monotonic()
            if done % WEIGHED_EVERY:
                job.run()
            else:
                self._weigh(job)
            del self._began[number]
            self._returns.put(job, late=monotonic() - began >= PATIENCE)
            done += 1
            del job
            if self._count > self.limit and not self._waiting:
                break
        with self._lock:
            self._count -= 1

    def _weigh(self, job: Job) -> None:
        """Run it, and see whether it was worth a thread of its own."""
        began, computed = monotonic(), thread_time()
        job.run()
        computed, took = thread_time() - computed, monotonic() - began
        self._long += ((computed > COMPUTES or took - computed > WAITS) - self._long) / SMOOTHING

    def _next(self, door: threading.Lock) -> Job | None:
        """The next job, when there is one; None when the pool is closed."""
        while True:
            try:
                return self._waiting.popleft()
            except IndexError:
                if self._closed:
                    return None
            self._idle.append(door)
            if self._waiting or self._closed:
                # It came while we went to sleep. Whoever knocked for it found us or not.
                try:
                    self._idle.remove(door)
                except ValueError:
                    door.acquire()
            else:
                door.acquire()
