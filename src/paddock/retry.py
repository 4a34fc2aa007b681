"""Retry with a deadline, full jitter backoff, and the server's `Retry-After`.

Knows no wire: the caller decides which failures may be retried, because it knows what was sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound=Exception)

jitter = random.uniform


class Deadline:
    """The wall-clock time that one operation may take, connecting and retrying included."""

    __slots__ = ("_ends_at", "_started_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started_at = time.monotonic()
        self._ends_at = self._started_at + seconds

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._ends_at - time.monotonic()

    @property
    def seconds_spent(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started_at


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to pause between attempts, and how many attempts to make."""

    first_seconds: float = 0.25
    longest_seconds: float = 5.0
    attempts: int = 6
    startup_seconds: float = 0.0
    """While the other side starts up, for this long, attempts are not counted and pauses stay short."""
    startup_pause_seconds: float = 0.5

    def pause(self, attempt: int, retry_after: float | None = None, *, is_startup: bool = False) -> float:
        """Seconds before attempt number `attempt` + 1: full jitter, and at least what the server requested."""
        longest = self.startup_pause_seconds if is_startup else self.longest_seconds
        return max(jitter(0.0, min(longest, self.first_seconds * 2.0 ** min(attempt, 16))), retry_after or 0.0)


@dataclass(frozen=True, slots=True)
class FailedAttempt(Generic[ErrorT]):
    """An attempt that failed and will be repeated after `pause` seconds."""

    attempt: int
    error: ErrorT
    pause: float


async def retry(
    work: Callable[[float], Awaitable[T]],
    *,
    errors: type[ErrorT],
    deadline: Deadline,
    backoff: Backoff,
    may_retry: Callable[[ErrorT], bool],
    attempt_seconds: float | None = None,
    before_retry: Callable[[FailedAttempt[ErrorT]], Awaitable[None]] | None = None,
    counts: Callable[[ErrorT], bool] | None = None,
) -> T:
    """Call `work` until it succeeds. `work` gets the seconds that this attempt may take, and must respect them.

    `before_retry` runs before each pause; what it raises ends the retrying. A failure for which `counts` is False is
    limited by the deadline alone. The last failure is raised, with `attempts` in its `data`.
    """
    attempt = counted = 0
    while True:
        attempt += 1
        seconds = deadline.seconds_left
        try:
            return await work(seconds if attempt_seconds is None else min(attempt_seconds, seconds))
        except errors as error:
            is_startup = deadline.seconds_spent < backoff.startup_seconds
            counted += not is_startup and (counts is None or counts(error))
            pause = backoff.pause(attempt - 1, getattr(error, "retry_after", None), is_startup=is_startup)
            if isinstance(data := getattr(error, "data", None), dict):
                data["attempts"] = attempt
            if not may_retry(error) or counted >= backoff.attempts or pause >= deadline.seconds_left:
                raise
            if before_retry is not None:
                await before_retry(FailedAttempt(attempt, error, pause))
            await asyncio.sleep(pause)


def parse_retry_after(value: str | None, *, longest_seconds: float) -> float | None:
    """Seconds from a `Retry-After` header, which holds a number or a date; None if it holds neither."""
    text = (value or "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    # NaN compares false, and becomes None.
    return min(max(seconds, 0.0), longest_seconds) if seconds == seconds else None
