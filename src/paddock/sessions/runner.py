"""Threads for environments whose code is not async.

A bounded pool serves everybody. A thread whose job overstays does not count against the bound any
more, so hung steps cannot starve the others.

Threads and the loop take turns at the interpreter's lock, and a turn costs as much as a short step. So
there are as few turns as possible: the loop hands over what one look at its sockets brought, one thread
does all of it where jobs are short and compute, and what has ended comes back many at a time.
"""

from __future__ import annotations

import itertools
import logging
import threading
from time import monotonic

from paddock.sessions.jobs import PATIENCE, Job, Returns, Runner, Turns

logger = logging.getLogger("paddock.sessions")
OVERSTAY = 1.0


class Threads(Turns[Job], Runner):
    """A pool of daemon threads bound to one event loop."""

    def __init__(self, limit: int, name: str = "paddock", returns: Returns | None = None) -> None:
        super().__init__(returns or Returns())
        self.limit = limit
        self._name = name
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._count = 0
        self._began: dict[int, float] = {}
        """When each running job began, by the number of its thread."""
        self._idle: list[threading.Lock] = []
        """The doors of idle threads, the one that was busy last at the end."""
        self._closed = False

    @property
    def count(self) -> int:
        return self._count

    def overstaying(self) -> int:
        """How many jobs have run for longer than they should."""
        return self._running_for(OVERSTAY)

    def submit(self, job: Job) -> None:
        self.add(job)

    def compensate(self) -> None:
        """Give the waiting jobs threads in place of those whose jobs overstay. Called now and then."""
        if self.waiting and self._count == len(self._began):
            for _ in range(min(self._room(), len(self.waiting))):
                self._grow()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().release()

    # -- on the loop ------------------------------------------------------------------------------

    def is_held_up(self) -> bool:
        return self._count - len(self._idle) <= self._running_for(PATIENCE)

    def begin_one(self) -> None:
        """Wake an idle thread, or make one. It takes the next job, and more as long as there are."""
        try:
            door = self._idle.pop()
        except IndexError:
            if self._room() > 0:
                self._grow()
        else:
            door.release()

    def begin_all(self) -> None:
        for _ in range(min(len(self.waiting), len(self._idle) + self._room())):
            self.begin_one()

    def _room(self) -> int:
        """How many threads may be added: a job that overstays does not count, whatever its thread does later."""
        free = self.limit - self._count
        return free if free > 0 else free + self.overstaying()

    def _running_for(self, seconds: float) -> int:
        limit = monotonic() - seconds
        return sum(1 for began in list(self._began.values()) if began < limit)

    def _grow(self) -> None:
        number = next(self._numbers)
        thread = threading.Thread(target=self._work, args=(number,), name=f"{self._name}-{number}", daemon=True)
        with self._lock:
            self._count += 1
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._count -= 1
            self._do_without(error)

    def _do_without(self, error: RuntimeError) -> None:
        """The system grants no more threads: those that are there do the work, and without any it fails."""
        logger.warning("%d threads are all that can be had: %s", self._count, error)
        while self.waiting and not self._count:
            job = self.waiting.popleft()
            job.error = error
            self.returns.put(job, late=True)

    # -- on a thread ------------------------------------------------------------------------------

    def _work(self, number: int) -> None:
        door = threading.Lock()
        door.acquire()
        done = 0
        while (job := self._next(door)) is not None:
            self._began[number] = began = monotonic()
            self.pace.run(job, done)
            del self._began[number]
            self.hand_in(job, began, more=bool(self.waiting))
            done += 1
            del job
            if self._count > self.limit and not self.waiting and self._room() < 0:
                break
        with self._lock:
            self._count -= 1

    def _next(self, door: threading.Lock) -> Job | None:
        """The next job, when there is one; None when the pool is closed."""
        while True:
            try:
                return self.waiting.popleft()
            except IndexError:
                if self._closed:
                    return None
            self._idle.append(door)
            if self.waiting or self._closed:
                # It came while we went to sleep. Whoever knocked for it found us or not.
                try:
                    self._idle.remove(door)
                except ValueError:
                    door.acquire()
            else:
                door.acquire()
