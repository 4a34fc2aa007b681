"""Who broke: the outcome of a rollout whose agent has ended, from what the model and the sandbox did. No IO.

Exit codes do not decide. The `judge_` functions are called in this order, and the first that returns an ending
decides: who stopped the rollout, how the sandbox ended, and what the model endpoint did.

For the endpoint the rule is: time that it took without an answer is never charged to the policy. A rollout fails for
the model

- if its time is up while a call is in flight that has received no byte for its stall limit, or
- if refused, broken and unanswered calls took more than half of the agent's time, or
- if it ended by itself and the endpoint failed its last call, or never accepted one.

A call that is still producing tokens when the time is up is an ordinary timeout. A request that is refused for what
it says is the agent's own affair once another was answered: the reward is kept, and the refusal is reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paddock.capture.call_summary import CallSummary, by_end, endpoint_failure
from paddock.store.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LARGEST_LOST_SHARE = 0.5
"""The share of the agent's time that may be lost at the endpoint. Above it, the reward does not judge the policy."""
CONTEXT = "the conversation is longer than the model's context"


class Ending(NamedTuple):
    """How a rollout or a step ends: the outcome, and its error."""

    outcome: Outcome
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelUse:
    """What the model calls of a rollout say about its end."""

    blame: Blame
    exhausted: str | None = None
    """The budget that was used up."""
    storage_error: str | None = None
    """Why a call could not be stored."""


def judge_stop(
    use: ModelUse, *, abort_reason: str | None, timed_out: bool, divergence: str | None = None
) -> Ending | None:
    """The ending of a rollout that did not end by itself, left the recorded one, or whose calls are incomplete."""
    if abort_reason is not None:
        return Ending(Outcome.CANCELLED, abort_reason)
    if divergence is not None:
        return Ending(Outcome.TASK, divergence)
    if use.storage_error is not None:
        return Ending(Outcome.ENVIRONMENT, f"calls could not be recorded: {use.storage_error}")
    if timed_out and use.blame.outcome is not None:
        return Ending(use.blame.outcome, use.blame.error)
    if timed_out:
        refusals = f"; {use.blame.error}" if use.blame.error else ""
        return Ending(Outcome.TIMEOUT, f"the agent did not finish in time{refusals}")
    return None


def judge_sandbox(exit_code: int | None, killed_for: str | None) -> Ending | None:
    """The ending of a rollout whose sandbox used too much, or ended before the agent did."""
    if killed_for:
        return Ending(Outcome.BUDGET, f"the sandbox used more {killed_for} than allowed")
    if exit_code is None:
        return Ending(Outcome.SANDBOX, "the sandbox ended by itself")
    return None


def judge_model(use: ModelUse) -> Ending | None:
    """The ending of a rollout that the endpoint or a budget ended.

    The endpoint comes first: answers that broke off may have used up the tokens, and the agent got nothing for them.
    """
    if use.blame.outcome is not None:
        return Ending(use.blame.outcome, use.blame.error)
    if use.exhausted is not None:
        return Ending(Outcome.BUDGET, f"the budget of {use.exhausted} was used up")
    return None


# -- the model endpoint --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StallLimits:
    """Seconds without a byte after which a call counts as stalled."""

    streamed: float
    whole: float
    """The limit of a response that is not streamed: its first byte comes when all of it is sampled."""

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
    why = f"; its last error: {last_error}" if last_error else ""
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
        refused_all = None if any(call.answered for call in calls) else endpoint_failure(concluded)
        return Blame(None, refused_requests(calls)) if refused_all is None else Blame(Outcome.MODEL, refused_all)
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
