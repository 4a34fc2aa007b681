"""Whether a rollout ended because of its model endpoint, decided from when its calls got bytes. No IO, no clock.

The rule: time that the endpoint took without an answer is never charged to the policy. A rollout fails for the model

- if its time is up while a call is in flight that has received no byte for its stall limit, or
- if refused, broken and unanswered calls took more than half of the agent's time, or
- if it ended by itself and the endpoint failed its last call, or never accepted one.

A call that is still producing tokens when the time is up is an ordinary timeout. A request that is refused for what
it says is the agent's own affair once another was answered: the reward is kept, and the refusal is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paddock.rollouts.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Blamed = Literal["endpoint", "request", "context"]
"""Who is to blame for a failed call: the endpoint, what was asked, or a conversation that is too long."""

LARGEST_LOST_SHARE = 0.5
"""Of the agent's time. If more was lost at the endpoint, what the agent did with the rest says nothing."""
CONTEXT = "the conversation is longer than the model's context"


@dataclass(frozen=True, slots=True)
class CallSummary:
    """One model call. Times are in seconds, all on one clock; None is what has not happened."""

    began: float
    attempt_began: float | None = None
    """The last attempt at it. None before the first, and while it waits after a refusal."""
    last_byte: float | None = None
    """Of that attempt."""
    ended: float | None = None
    streamed: bool = True
    error: str | None = None
    fault: Blamed | None = None
    unanswered: bool = False
    """It was cut off, by the agent or by us."""

    @property
    def answered(self) -> bool:
        return self.ended is not None and self.error is None and not self.unanswered

    def is_in_flight(self, at: float) -> bool:
        return self.ended is None or (self.unanswered and self.ended >= at)

    def silence(self, until: float) -> float:
        """Seconds without a byte of an answer before `until`. Attempts that were cut off brought none."""
        heard = self.began if self.last_byte is None else self.last_byte
        return max(0.0, (until if self.ended is None else min(until, self.ended)) - heard)


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds without a byte after which a call counts as stalled."""

    streamed: float
    whole: float
    """Of an answer that is not streamed: its first byte comes when all of it was sampled."""

    def of(self, call: CallSummary) -> float:
        return self.streamed if call.streamed else self.whole


@dataclass(frozen=True, slots=True)
class AgentTime:
    """When the agent was at work."""

    began: float
    ended: float
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class Blame:
    """What the calls say about the end of a rollout. Without an outcome, `error` is only to be reported."""

    outcome: Outcome | None = None
    error: str | None = None


def judge_calls(calls: Sequence[CallSummary], time: AgentTime, limits: StallLimits) -> Blame:
    """Whether the model endpoint, or a full context, ended the rollout."""
    lost = lost_seconds(calls, time)
    share = lost / max(time.ended - time.began, 1e-9)
    last_error = next((call.error for call in reversed(calls) if call.fault == "endpoint" and call.error), None)
    why = f"; it last said: {last_error}" if last_error else ""
    spent = f"{lost:.1f} of {time.ended - time.began:.1f} s went into calls that the endpoint did not answer{why}"
    if time.timed_out:
        flying = [call for call in calls if call.is_in_flight(time.ended)]
        if flying and all(call.silence(time.ended) >= limits.of(call) for call in flying):
            silence = min(call.silence(time.ended) for call in flying)
            return Blame(Outcome.MODEL, f"the endpoint sent nothing for {silence:.1f} s until the time was up{why}")
        if share > LARGEST_LOST_SHARE:
            return Blame(Outcome.MODEL, spent)
        # An endpoint that never accepted anything gave the policy no chance, however long the agent asked.
        concluded = [call for call in calls if not call.unanswered]
        never = None if any(call.answered for call in calls) else endpoint_failure(concluded)
        return Blame(None, refused_requests(calls)) if never is None else Blame(Outcome.MODEL, never)
    if (failure := endpoint_failure(calls)) is not None:
        return Blame(Outcome.MODEL, failure)
    ended = by_end(calls)
    last = ended[-1] if ended else None
    if last is None or last.answered:
        return Blame()
    if last.fault is None:
        stalled = last.silence(time.ended) >= limits.of(last) or share > LARGEST_LOST_SHARE
        return Blame(Outcome.MODEL, spent) if last.unanswered and stalled else Blame()
    if last.fault == "context":
        # Without a single answer the policy had no chance: the context is too small for this agent.
        served = any(call.answered for call in calls)
        return Blame(Outcome.BUDGET if served else Outcome.MODEL, f"{CONTEXT}: {last.error}")
    return Blame(None, f"the endpoint refused the last request: {last.error}")


def endpoint_failure(calls: Sequence[CallSummary]) -> str | None:
    """How the endpoint failed the agent's most recent call; None once a later one was answered.

    A request that was refused for what it says is the agent's affair, unless none was ever answered.
    """
    failure = None
    served = any(call.answered for call in calls)
    for call in by_end(calls):
        if call.answered:
            failure = None
        elif call.fault == "endpoint" or (call.fault == "request" and not served):
            failure = call.error
    return failure


def refused_requests(calls: Sequence[CallSummary]) -> str | None:
    """How many requests were refused for what they say, or for their length, and how the last one was."""
    refusals = [call for call in calls if call.fault in ("request", "context")]
    if not refusals:
        return None
    return f"the endpoint refused {len(refusals)} of {len(calls)} requests, the last one with: {refusals[-1].error}"


def lost_seconds(calls: Sequence[CallSummary], time: AgentTime) -> float:
    """How much of the agent's time passed in calls that were refused, broken or not answered. None counts twice."""
    total, reached = 0.0, time.began
    for start, stop in sorted(_lost(calls, time)):
        start, stop = max(start, reached), min(stop, time.ended)
        if stop > start:
            total += stop - start
            reached = stop
    return total


def by_end(calls: Iterable[CallSummary]) -> list[CallSummary]:
    """Those that have ended, the last one last."""
    return sorted((call for call in calls if call.ended is not None), key=lambda call: call.ended or 0.0)


def _lost(calls: Sequence[CallSummary], time: AgentTime) -> Iterable[tuple[float, float]]:
    starts = sorted(call.began for call in calls)
    for call in calls:
        end = time.ended if call.ended is None else call.ended
        if call.fault == "endpoint" and not call.unanswered:
            # Until the agent asks again: it waits before it does, and can do nothing else.
            yield call.began, next((start for start in starts if start >= end), time.ended)
            continue
        if call.attempt_began is None:
            if not call.answered and call.fault is None:
                yield call.began, end
            continue
        if call.attempt_began > call.began:
            yield call.began, call.attempt_began
        if not call.answered and call.fault in (None, "endpoint"):
            yield end - call.silence(end), end
