"""The times and the failure of each model call, from which a rollout decides whether its endpoint failed. No IO."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paddock.capture.errors import Fault


@dataclass(slots=True)
class CallTimes:
    """When the endpoint got a request and sent bytes, on the clock of `time.monotonic`."""

    began: float = field(default_factory=time.monotonic)
    attempt_began: float | None = None
    """When the last attempt began. None before the first, and until the next one after it failed."""
    last_byte: float | None = None
    """When the last attempt received its last byte."""
    ended: float | None = None
    streamed: bool = True
    fault: Fault | None = None

    def start_attempt(self, *, streamed: bool) -> None:
        self.attempt_began, self.streamed, self.last_byte = time.monotonic(), streamed, None

    def record_byte(self) -> None:
        self.last_byte = time.monotonic()

    def end_attempt(self) -> None:
        """The attempt failed, and another one follows."""
        self.attempt_began = self.last_byte = None


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One model call. Times are those of `CallTimes`, all on one clock; None is what has not happened."""

    began: float
    attempt_began: float | None = None
    last_byte: float | None = None
    ended: float | None = None
    streamed: bool = True
    error: str | None = None
    fault: Fault | None = None
    unanswered: bool = False
    """The agent or the proxy aborted it."""

    @property
    def answered(self) -> bool:
        return self.ended is not None and self.error is None and not self.unanswered

    def is_in_flight(self, at: float) -> bool:
        return self.ended is None or (self.unanswered and self.ended >= at)

    def silence(self, until: float) -> float:
        """Seconds without a byte of a response before `until`. Aborted attempts count as silent."""
        last = self.began if self.last_byte is None else self.last_byte
        return max(0.0, (until if self.ended is None else min(until, self.ended)) - last)


def endpoint_failure(calls: Sequence[CallSummary]) -> str | None:
    """How the endpoint failed the agent's most recent call; None once a later one was answered.

    A request that was refused for its content is the agent's fault, unless no call was ever answered.
    """
    failure = None
    any_answered = any(call.answered for call in calls)
    for call in by_end(calls):
        if call.answered:
            failure = None
        elif call.fault == "endpoint" or (call.fault == "request" and not any_answered):
            failure = call.error
    return failure


def by_end(calls: Iterable[CallSummary]) -> list[CallSummary]:
    """The calls that have ended, in the order in which they did."""
    return sorted((call for call in calls if call.ended is not None), key=lambda call: call.ended or 0.0)
