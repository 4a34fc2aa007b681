"""A connection lent to the thread that steps for it, while its session is the only one.

A step on a thread costs two wake-ups: its request wakes the loop, and the loop wakes the thread. Where there is one
session there is nobody to share them with, and each takes longer than most steps. So its thread reads the next
request itself. It gives the connection back when anything but a plain step arrives, and the loop calls it home
before it touches the session. A thread that is called home finishes the step it is at, as an ordinary one.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Protocol

from paddock.sessions.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.session import Session
    from paddock.sessions.work import StepAside

logger = logging.getLogger("paddock.sessions")
STAYS_OUT = 0.05
"""A step that takes longer is called home, so that the loop sees its client leave."""


class Line(Protocol):
    """A connection that one thread reads, instead of the loop."""

    def lend(self) -> None:
        """On the loop, which reads no more."""

    def wait(self) -> None:
        """On the thread: until there is something to read, or `wake`."""

    def wake(self) -> None:
        """On the loop: let the thread look why."""

    def read(self) -> bytes | None:
        """What is there, without waiting. Empty at the end of the connection, None if there is nothing yet."""

    def take_back(self, unread: bytes) -> None:
        """On the loop, which goes on with `unread` and reads what follows."""

    def end(self) -> None:
        """On the loop: the thread is gone."""


class Loan(Job):
    """One session and its connection in the hands of a thread, for a row of steps."""

    lasts = True

    def __init__(self, session: Session, first: StepAside, line: Line, ended: Callable[[], None]) -> None:
        self.session = session
        self._line = line
        self._ended = ended
        self._door = first.door
        self._lock = threading.Lock()
        """Held to read, to begin a step, to conclude one, and to call home."""
        self._step: StepAside | None = first
        """The one that is carried out, or is left for the loop to conclude."""
        self._is_over = False
        self._is_reading = False
        """Whether the thread has bytes that it may have to give back."""
        self._is_taken_back = False
        self._unread = b""

    # -- on the loop ------------------------------------------------------------------------------

    def call_home(self) -> None:
        """From now on the thread reads nothing, begins nothing and answers nothing."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            has_bytes = self._is_reading
        self._line.wake()
        if not has_bytes:
            self._take_back(b"")

    def is_overdue(self, now: float) -> bool:
        """Whether it should be called home, so that the loop sees its client leave."""
        step = self._step
        return step is not None and now - step.started > STAYS_OUT

    def finish(self) -> None:
        self._ended()
        self._line.end()
        if self.error is not None:
            logger.error("session %s could not be read", self.session.id, exc_info=self.error)
        self._take_back(self._unread)
        if self._step is not None:
            self.session.stepped_aside(self._step)

    def _take_back(self, unread: bytes) -> None:
        if not self._is_taken_back:
            self._is_taken_back = True
            if self._step is None:
                self._door.rest()
            self._line.take_back(unread)

    # -- on the thread ----------------------------------------------------------------------------

    def call(self) -> None:
        step = self._step
        while step is not None and self._carry_out(step):
            step = self._next()

    def _carry_out(self, step: StepAside) -> bool:
        """False if it is left to the loop to conclude it."""
        step.run()
        with self._lock:
            if not self._is_over:
                step.send()
                self._is_over = not step.is_answered or step.unsent is not None
            if not self._is_over:
                self._step = None
                self.session.stepped(step)
            return not self._is_over

    def _next(self) -> StepAside | None:
        """The next step, when it arrives; None when the loan is over."""
        while True:
            self._line.wait()
            with self._lock:
                if self._is_over:
                    return None
                data = self._line.read()
                if data is None:
                    continue
                self._is_reading = True
            action = self._door.read_aside(data)
            with self._lock:
                self._is_reading = False
                if action is None or self._is_over:
                    self._is_over, self._unread = True, data
                    return None
                self._step = self.session.begin_step(action, self._door)
                return self._step
