"""The one place that tries again: a wall-clock budget, full jitter, and the server's own wish to wait.

Knows no wire. Whether a failure may be retried is asked of the caller, who knows what was sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from paddock.fleet.errors import FleetError, FleetTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

jitter = random.uniform


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to pause before trying again."""

    first: float = 0.25
    longest: float = 5.0
    attempts: int = 6
    """How often to try in all."""
    eager_for: float = 0.0
    """While something starts up, for this many seconds, tries are not counted and pauses stay short."""
    eager_pause: float = 0.5

    def pause(self, attempt: int, asked: float | None = None, *, eager: bool = False) -> float:
        """Seconds before try number `attempt` + 1: full jitter, and never less than the server asked for."""
        most = min(self.eager_pause if eager else self.longest, self.first * 2.0 ** min(attempt, 16))
        return max(jitter(0.0, most), asked or 0.0)


class Budget:
    """The time one operation may take, connecting and retrying included."""

    __slots__ = ("began", "deadline", "seconds")

    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self.seconds = seconds
        self.deadline = self.began + seconds

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began


@dataclass(frozen=True, slots=True)
class Failure:
    """A try that failed and will be repeated."""

    attempt: int
    error: FleetError
    pause: float


async def within(seconds: float, work: Awaitable[T], what: str) -> T:
    """The result of `work`. Raises FleetTimeout if it takes longer; a cancelled caller is cancelled at once."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise FleetTimeout(f"{what} took longer than {seconds:.3g} s") from error
        raise


async def retried(
    work: Callable[[], Awaitable[T]],
    *,
    what: str,
    budget: Budget,
    backoff: Backoff,
    attempt_seconds: float | None = None,
    may_retry: Callable[[FleetError], bool],
    before_retry: Callable[[Failure], Awaitable[None]] | None = None,
    counts: Callable[[FleetError], bool] | None = None,
) -> T:
    """The first result of `work`, tried again as long as `may_retry` agrees and the budget lasts.

    A failure for which `counts` is False is limited by the budget alone. `before_retry` is told of each failure
    before the pause; what it raises ends the retrying. The last failure is raised as it is, with `attempts` in its
    data.
    """
    attempt = 0
    counted = 0
    while True:
        attempt += 1
        seconds = budget.left if attempt_seconds is None else min(attempt_seconds, budget.left)
        try:
            return await within(seconds, work(), what)
        except FleetError as error:
            eager = budget.spent < backoff.eager_for
            counted += not eager and (counts is None or counts(error))
            pause = backoff.pause(attempt - 1, error.retry_after, eager=eager)
            error.data["attempts"] = attempt
            if not may_retry(error) or counted >= backoff.attempts or pause >= budget.left:
                raise
            if before_retry is not None:
                await within(budget.left, before_retry(Failure(attempt, error, pause)), what)
            await asyncio.sleep(pause)
