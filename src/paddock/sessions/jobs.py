"""What threads do for sessions, how they are told and how the loop hears of the end."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections import deque
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paddock.errors import EnvironmentFailure

if TYPE_CHECKING:
    from collections.abc import Callable

COMPUTES = 0.0005
WAITS = 0.0002
"""Jobs that compute and wait for less run one after the other: another thread would only wait for the lock."""
PATIENCE = 0.005
"""How long they wait for the one before them to end."""
WEIGHED_EVERY = 16
SMOOTHING = 16

ResultT = TypeVar("ResultT")
WaitingT = TypeVar("WaitingT")


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


class Runner(ABC):
    """Where the jobs of a session are done."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """On the loop. Threads hear of it at the end of the loop's turn, together with all others of that turn."""

    def expect(self) -> None:  # noqa: B027 (a pool has no use for it)
        """On the loop: a job is about to come. A thread may wake up for it already."""

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
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        self.submit(Call(function, done))
        return await future


class Pace:
    """Whether jobs, lately, were worth a thread each: most computed for long, or waited for something."""

    def __init__(self) -> None:
        self._long = 0.0

    def is_long(self) -> bool:
        return self._long > 0.5

    def weigh(self, job: Job) -> None:
        """Run it, and see."""
        began, computed = monotonic(), thread_time()
        job.run()
        computed, took = thread_time() - computed, monotonic() - began
        self._long += ((computed > COMPUTES or took - computed > WAITS) - self._long) / SMOOTHING


class Turns(ABC, Generic[WaitingT]):
    """Begins the jobs of one turn of the loop at its end: all at once, or one that the others follow."""

    def __init__(self, *, looks: bool = True) -> None:
        self.waiting: deque[WaitingT] = deque()
        self.pace = Pace()
        self._loop = asyncio.get_running_loop()
        self._looks = looks
        self._handing_out = False
        self._looking = False

    def add(self, item: WaitingT) -> None:
        self.waiting.append(item)
        if not self._handing_out:
            self._handing_out = True
            self._loop.call_soon(self._hand_out)

    @abstractmethod
    def is_held_up(self) -> bool:
        """Whether no thread that is awake will come for the next job soon."""

    @abstractmethod
    def begin_one(self) -> None: ...

    @abstractmethod
    def begin_all(self) -> None: ...

    def _hand_out(self) -> None:
        self._handing_out = False
        if self.pace.is_long():
            self.begin_all()
        elif self.is_held_up():
            self.begin_one()
        self._look_later()

    def _look_later(self) -> None:
        if self._looks and self.waiting and not self._looking:
            self._looking = True
            self._loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """What waits behind a job that turns out long goes to other threads."""
        self._looking = False
        if self.waiting and not self._handing_out and self.is_held_up():
            self.begin_all()
        self._look_later()
