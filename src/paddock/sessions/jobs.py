"""What threads do for sessions, how they are told and how the loop hears of the end."""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections import deque
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from paddock.errors import EnvironmentFailure
from paddock.protocol.redact import told

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("paddock.sessions")
COMPUTES = 0.0005
WAITS = 0.0002
"""Jobs that compute and wait for less run one after the other: another thread would only wait for the lock."""
PATIENCE = 0.005
"""How long they wait for the one before them to end."""
TOGETHER = 32
HELD_SECONDS = 0.001
"""How many answers leave together, and for how long their jobs may have run. Each answer wakes a client, and a client
that wakes wants a core that the next step needs."""
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


def call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """From a thread: have the loop call it soon, unless it has ended."""
    try:
        loop.call_soon_threadsafe(function)
    except RuntimeError:
        if not loop.is_closed():
            raise


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

    def send(self) -> None:
        """After `run`, on any thread: answer whoever waits for it, where that can be done without the loop."""

    def is_awaited(self) -> bool:
        """Whether the loop must hear of the end at once. Asked after `send`."""
        return True


class Call(Job):
    """A plain function. `done(value, error)` runs on the loop."""

    def __init__(self, function: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.call = function  # type: ignore[method-assign]
        self._done = done

    def finish(self) -> None:
        self._done(self.value, self.error)


class Returns:
    """Jobs that have ended, on their way back to the loop. Answers leave together, one wake-up carries all."""

    def __init__(self) -> None:
        self._held: deque[Job] = deque()
        self._held_since = 0.0
        self._ended: deque[Job] = deque()
        self._waking = False
        self._loop = asyncio.get_running_loop()

    def hold(self, job: Job, began: float, *, more: bool) -> bool:
        """From a thread, after `run`. With `more` to come, its answer waits for theirs; False if it does not."""
        self._held.append(job)
        now = monotonic()
        if len(self._held) == 1:
            self._held_since = began
        if not more or len(self._held) >= TOGETHER or now - self._held_since > HELD_SECONDS:
            self.release(late=now - began >= PATIENCE)
            return False
        return True

    def is_holding(self) -> bool:
        return bool(self._held)

    def release(self, *, late: bool = False) -> None:
        """From anywhere: send the answers that are held."""
        while self._held:
            try:
                job = self._held.popleft()
            except IndexError:
                return
            job.send()
            self.put(job, late=late)

    def put(self, job: Job, *, late: bool) -> None:
        """From a thread. What nobody waits for is found by the next `deliver`."""
        self._ended.append(job)
        if (late or job.is_awaited()) and not self._waking:
            self._waking = True
            call_on(self._loop, self.deliver)

    def deliver(self) -> None:
        """Finish what has ended so far."""
        self.release()
        # The flag falls before the queue is emptied, so a job that ends meanwhile wakes us again.
        self._waking = False
        while self._ended:
            try:
                self._ended.popleft().finish()
            except Exception:
                logger.exception("the end of a job could not be dealt with")


class Runner(ABC):
    """Where the jobs of a session are done."""

    @abstractmethod
    def submit(self, job: Job) -> None:
        """On the loop. Threads hear of it at the end of the loop's turn, together with all others of that turn."""

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
                # A future takes no StopIteration, and the rest is not for the loop to obey.
                is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if is_plain else RuntimeError(told(error)))

        self.submit(Call(function, done))
        return await future


class Pace:
    """Whether jobs, lately, were worth a thread each: most computed for long, or waited for something."""

    def __init__(self) -> None:
        self._long = 0.0
        self._is_sure = True
        """Whether the last job that was weighed was like those before it."""

    def is_long(self) -> bool:
        return self._long > 0.5

    def run(self, job: Job, number: int) -> bool:
        """Carry out the job with this number on its thread, and say whether it was weighed.

        Only some are, but all as long as they are not what was expected: what comes in thousands changes at once.
        """
        if self._is_sure and number % WEIGHED_EVERY:
            job.run()
            return False
        began, computed = monotonic(), thread_time()
        job.run()
        computed, took = thread_time() - computed, monotonic() - began
        was_long = computed > COMPUTES or took - computed > WAITS
        self._long += (was_long - self._long) / SMOOTHING
        self._is_sure = was_long == self.is_long()
        return True


class Turns(ABC, Generic[WaitingT]):
    """Begins the jobs of one turn of the loop at its end: all at once, or one that the others follow."""

    def __init__(self, returns: Returns) -> None:
        self.returns = returns
        self.waiting: deque[WaitingT] = deque()
        self.pace = Pace()
        self._loop = asyncio.get_running_loop()
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

    def hand_in(self, job: Job, began: float, *, more: bool) -> None:
        """On a thread that has run it. What is held must not wait for a job that hangs: somebody has to look."""
        if self.returns.hold(job, began, more=more) and not self._looking:
            call_on(self._loop, self._look_later)

    def _hand_out(self) -> None:
        self._handing_out = False
        if self.pace.is_long():
            self.begin_all()
        elif self.is_held_up():
            self.begin_one()
        self._look_later()

    def _look_later(self) -> None:
        if (self.waiting or self.returns.is_holding()) and not self._looking:
            self._looking = True
            self._loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        """What waits behind a job that turns out long goes to other threads, and what has ended before it leaves."""
        self._looking = False
        self.returns.release()
        if self.waiting and not self._handing_out and self.is_held_up():
            self.begin_all()
        self._look_later()
