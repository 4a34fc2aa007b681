"""Connections lent to a thread that steps for their sessions.

A step on a thread costs two wake-ups: its request wakes the loop, and the loop wakes the thread. Loop and thread
then take turns at the interpreter's lock, and each other's memory out of the cache. So a thread whose steps are short
reads the next requests itself. It gives a connection back when anything but a plain step arrives, and the loop calls
a session home before it touches it. A step that is under way then ends as an ordinary one.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from paddock.sessions.jobs import PATIENCE, Job, call_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.sessions.jobs import Pace, Returns, Runner
    from paddock.sessions.session import Session
    from paddock.sessions.work import StepAside

logger = logging.getLogger("paddock.sessions")
STAYS_OUT = 0.05
"""A step that takes longer is called home, so that the loop sees its client leave."""
LONGEST_TURN = 0.0005
"""How long a thread, which keeps the interpreter's lock while it is busy, makes the loop wait for it."""


class ShortTurns:
    """In force for as long as anything is lent in this process, and no longer: threads that wait in their steps are
    slower with them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loans = 0
        self._usual = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._loans == 0:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(LONGEST_TURN)
            self._loans += 1

    def end(self) -> None:
        with self._lock:
            self._loans -= 1
            if self._loans == 0:
                sys.setswitchinterval(self._usual)


short_turns = ShortTurns()


class Line(Protocol):
    """A connection that a thread reads, instead of the loop."""

    def watch(self) -> Watch:
        """What a thread waits on, for this line and others of its kind. Raises OSError."""

    def lend(self) -> None:
        """On the loop, which reads no more."""

    def read(self) -> bytes:
        """What is there, without waiting. Empty at the end of the connection."""

    def take_back(self, unread: bytes) -> None:
        """On the loop, which goes on with `unread` and reads what follows."""


class Watch(Protocol):
    """Several lines of one kind, and a bell."""

    def add(self, line: Any) -> None:
        """Raises OSError."""

    def remove(self, line: Any) -> None: ...

    def wait(self) -> Sequence[Line]:
        """Those with something to read, as soon as there are any. None of them after `wake`."""

    def wake(self) -> None: ...
    def close(self) -> None: ...


class Lent:
    """One session and its connection."""

    __slots__ = ("door", "is_home", "is_reading", "line", "session", "step", "unread")

    def __init__(self, step: StepAside, line: Line) -> None:
        self.session = step.session
        self.door = step.door
        self.line = line
        self.step: StepAside | None = step
        """The one that waits for its turn, is carried out, or is left for the loop to conclude."""
        self.is_home = False
        self.is_reading = False
        """Whether the thread has bytes that it may have to give back."""
        self.unread = b""


class Loan(Job):
    """Sessions in the hands of one thread."""

    lasts = True

    def __init__(
        self, runner: Runner, watch: Watch, returns: Returns, pace: Pace | None, ended: Callable[[Loan], None]
    ) -> None:
        self.runner = runner
        self.slow_for = 0.0
        """For how long a step has kept other sessions waiting, once it has ended."""
        self._watch = watch
        self._returns = returns
        self._pace = pace
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        """Held to read, to begin a step, to conclude one, and to call home."""
        self._by_session: dict[Session, Lent] = {}
        self._by_line: dict[Line, Lent] = {}
        self._waiting: deque[Lent] = deque()
        """Those with a step that the loop has begun."""
        self._given_back: deque[Lent] = deque()
        self._is_over = False
        self._takes_more = True
        """Whether others may join: not once a step has kept them waiting."""
        self._began: float | None = None
        """When the step did that is being carried out."""
        self._done = 0
        self._is_looked_after = False
        self._ended = ended

    # -- on the loop ------------------------------------------------------------------------------

    def begin(self, step: StepAside, line: Line) -> None:
        """Take the first one. Raises OSError, and then it is over."""
        try:
            self.take(step, line)
        except OSError:
            self._watch.close()
            raise
        short_turns.begin()

    def take(self, step: StepAside, line: Line) -> bool:
        """Have the thread carry out a step, and read on for its session. False if it is about to end."""
        with self._lock:
            if self._is_over or not self._takes_more:
                return False
            self._watch.add(line)
            line.lend()
            lent = self._by_session[step.session] = self._by_line[line] = Lent(step, line)
            self._waiting.append(lent)
        self._watch.wake()
        return True

    def call_home(self, session: Session) -> None:
        """From now on the thread reads nothing, begins nothing and answers nothing for this session."""
        with self._lock:
            lent = self._by_session.get(session)
            if lent is None:
                return
            self._forget(lent)
            is_waiting = lent in self._waiting
            if is_waiting:
                self._waiting.remove(lent)
            has_bytes = lent.is_reading
        if is_waiting and lent.step is not None:
            self.runner.submit(lent.step)
        if not has_bytes:
            self._take_back(lent)

    def call_all_home(self) -> None:
        with self._lock:
            sessions = list(self._by_session)
        for session in sessions:
            self.call_home(session)

    def look_after(self, now: float) -> None:
        """Call everybody home if a step takes so long that the loop should see its client leave, or others wait."""
        began = self._began
        is_alone = len(self._by_session) < 2
        if began is not None and now - began > (STAYS_OUT if is_alone else PATIENCE):
            self._takes_more = False
            self.call_all_home()

    def finish(self) -> None:
        short_turns.end()
        self._ended(self)
        if self.error is not None:
            logger.error("connections could not be read", exc_info=self.error)
            for lent in self._by_line.values():
                lent.is_reading = False
            self.call_all_home()
        self._take_given_back()
        self._watch.close()

    def _take_given_back(self) -> None:
        while self._given_back:
            self._take_back(self._given_back.popleft())

    def _take_back(self, lent: Lent) -> None:
        if lent.step is None:
            lent.door.rest()
        lent.line.take_back(lent.unread)

    def _look_later(self) -> None:
        self._loop.call_later(PATIENCE, self._look)

    def _look(self) -> None:
        self.look_after(monotonic())
        if self._began is not None and not self._is_over:
            self._look_later()
        else:
            self._is_looked_after = False

    # -- on the thread ----------------------------------------------------------------------------

    def call(self) -> None:
        while not self._is_over:
            ready = self._watch.wait()
            while (lent := self._next_waiting()) is not None:
                self._carry_out(lent)
            for line in ready:
                if (lent := self._begin(line)) is not None:
                    self._carry_out(lent)
            with self._lock:
                self._is_over = not self._by_session

    def _next_waiting(self) -> Lent | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _begin(self, line: Line) -> Lent | None:
        """Read a request and begin its step. None if there is none, or it is not for us."""
        with self._lock:
            lent = self._by_line.get(line)
            if lent is None or lent.step is not None:
                return None
            lent.is_reading, lent.unread = True, line.read()
        action = lent.door.read_aside(lent.unread)
        with self._lock:
            lent.is_reading = False
            if action is None or lent.is_home:
                self._give_back(lent)
                return None
            lent.unread = b""
            lent.step = lent.session.begin_step(action, lent.door)
        return lent

    def _carry_out(self, lent: Lent) -> None:
        step = lent.step
        assert step is not None
        self._run(step)
        with self._lock:
            if not lent.is_home:
                step.send()
                if step.is_answered and step.unsent is None:
                    lent.step = None
                    lent.session.stepped(step)
                    return
                self._give_back(lent)
        self._returns.put(step, late=True)

    def _run(self, step: StepAside) -> None:
        self._began = began = monotonic()
        if not self._is_looked_after and len(self._by_session) > 1:
            self._is_looked_after = True
            call_on(self._loop, self._look_later)
        self._done += 1
        if self._pace is None:
            step.run()
        elif self._pace.run(step, self._done) and self._pace.is_long():
            call_on(self._loop, self.call_all_home)
        self._began = None
        if not self._takes_more:
            self.slow_for = monotonic() - began

    # -- with the lock held -----------------------------------------------------------------------

    def _give_back(self, lent: Lent) -> None:
        """On the thread: the loop has to go on with it."""
        if not lent.is_home:
            self._forget(lent)
        self._given_back.append(lent)
        call_on(self._loop, self._take_given_back)

    def _forget(self, lent: Lent) -> None:
        lent.is_home = True
        del self._by_session[lent.session], self._by_line[lent.line]
        self._watch.remove(lent.line)
        if not self._by_session:
            self._watch.wake()
