"""Whether a thread that is woken lets its waker finish first, or pushes it off the core.

The waker still has the interpreter's lock and is about to sleep: who pushes it aside gets nothing but a second
sleep. So the threads of a relay tell the scheduler that they do not push. On a machine whose cores are all taken,
though, they would then also wait for everybody else; as soon as they get up late, they push like the others.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from time import monotonic

from paddock.sessions.jobs import SMOOTHING

LATE = 0.0003
"""How long it may take on average, in seconds, from the call to the thread that runs."""
TRY_AGAIN = 10.0


class Courtesy:
    """What all threads of a relay have agreed on."""

    def __init__(self) -> None:
        self.is_on = sys.platform == "linux" and _is_usual()
        self._delay = 0.0
        self._again = 0.0

    def got_up(self, called: float) -> None:
        """On a thread that was called at `called` and now runs."""
        now = monotonic()
        if self.is_on:
            self._delay += (now - called - self._delay) / SMOOTHING
            if self._delay > LATE:
                self.is_on = False
                self._again = now + TRY_AGAIN
        elif now > self._again > 0:
            self.is_on = True
            self._delay = 0.0

    def follow(self, was_on: bool) -> bool:
        """On a thread: do as agreed, if that has changed since `was_on`. Returns what it does from now on."""
        if was_on is not self.is_on and sys.platform == "linux":
            # Processes inherit it. Most are started while an environment is built or reset, and so before this.
            with suppress(OSError):
                policy = os.SCHED_BATCH if self.is_on else os.SCHED_OTHER
                os.sched_setscheduler(0, policy, os.sched_param(0))
        return self.is_on


def _is_usual() -> bool:
    """Whether this process is scheduled as most are. Some C libraries, as Alpine's, cannot tell."""
    try:
        return os.sched_getscheduler(0) == os.SCHED_OTHER
    except OSError:
        return False
