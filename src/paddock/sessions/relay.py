"""A thread for every session, where an environment must not leave its own.

Only one thread at a time holds the interpreter's lock. Where jobs are short and compute, threads that are
all awake at once wake up in vain, and each time for longer than a step takes. So they run as a relay: whoever
has done its job wakes the next one and goes to sleep, and the loop rests until the last has come in.
"""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from enum import Enum
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final

from paddock.sessions.jobs import PATIENCE, Job, Returns, Runner, Turns

FIRST_STEP = 2
"""The number of a session's first step, after it was built and reset. Those two are not like the others."""
WIDE_AWAKE = 16
"""For how many turns the loop does not rest, after it did so in vain."""


class Message(Enum):
    GO_HOME = "go home"


GO_HOME: Final = Message.GO_HOME


class Relay(Turns[tuple["OwnThread", Job]]):
    """The threads of all sessions that have one of their own."""

    def __init__(self, returns: Returns) -> None:
        super().__init__(returns)
        self.numbers = itertools.count()
        self.size = 0
        self._carrier: OwnThread | None = None
        """The thread that begins the next job once it has done its own."""
        self._finish: SimpleQueue[None] = SimpleQueue()
        self._is_awaited = False
        """Whether the loop rests."""
        self._awake = 0

    # -- on the loop ------------------------------------------------------------------------------

    def is_for_one(self) -> bool:
        """Whether there is nobody to hand over to."""
        return self.size == 1 and not self.waiting

    def is_held_up(self) -> bool:
        carrier = self._carrier
        return carrier is None or monotonic() - carrier.began > PATIENCE

    def begin_one(self) -> None:
        with suppress(IndexError):
            thread, job = self.waiting.popleft()
            self._carrier = thread
            thread.begin(job)

    def begin_all(self) -> None:
        while self.waiting:
            self.begin_one()

    def _hand_out(self) -> None:
        super()._hand_out()
        if self.waiting and not self.pace.is_long():
            self._rest()

    def _rest(self) -> None:
        """Let the threads run: the loop would wake up for each client they answer, only to wait for the lock."""
        if self._awake:
            self._awake -= 1
            return
        self._is_awaited = True
        if self.waiting:
            try:
                self._finish.get(timeout=PATIENCE)
            except Empty:
                self._awake = WIDE_AWAKE
        self._is_awaited = False

    # -- on a thread ------------------------------------------------------------------------------

    def goes_on_after(self, thread: OwnThread) -> bool:
        return self._carrier is thread and bool(self.waiting)

    def pass_on(self, last: OwnThread) -> None:
        """`last` has done its job. Another may carry on by now, if it was held up."""
        while self._carrier is last:
            try:
                thread, job = self.waiting.popleft()
            except IndexError:
                self._carrier = None
                if self.waiting:
                    # It came while we stopped.
                    self._carrier = last
                elif self._is_awaited:
                    self._is_awaited = False
                    self._finish.put(None)
            else:
                self._carrier = thread
                thread.begin(job)
                return


class OwnThread(Runner):
    """One session's thread, and nobody else's."""

    def __init__(self, relay: Relay) -> None:
        self.began = 0.0
        """When its last job did."""
        self._relay = relay
        self._inbox: SimpleQueue[Job | Message] = SimpleQueue()
        self._is_up = False
        self._closed = False
        relay.size += 1

    def submit(self, job: Job) -> None:
        if self._relay.is_for_one():
            self.begin(job)
        else:
            self._relay.add((self, job))

    def begin(self, job: Job) -> None:
        self.began = monotonic()
        try:
            if not self._is_up:
                self._start()
        except RuntimeError as error:
            job.error = error
            self._relay.returns.put(job, late=True)
            return
        self._inbox.put(job)
        if self._closed:
            self._go_home()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._relay.size -= 1
            self._go_home()

    def _go_home(self) -> None:
        if self._is_up:
            self._is_up = False
            self._inbox.put(GO_HOME)

    def _start(self) -> None:
        name = f"paddock-own-{next(self._relay.numbers)}"
        threading.Thread(target=self._work, name=name, daemon=True).start()
        self._is_up = True

    def _work(self) -> None:
        relay, done = self._relay, 0
        while (job := self._inbox.get()) is not GO_HOME:
            relay.pace.run(job, done - FIRST_STEP)
            relay.hand_in(job, self.began, more=relay.goes_on_after(self))
            done += 1
            del job
            relay.pass_on(self)
