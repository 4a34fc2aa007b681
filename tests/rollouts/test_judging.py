"""Who decides how a rollout ended."""

from typing import Any

import pytest

from paddock.capture.call_summary import CallSummary
from paddock.limits import stall_seconds
from paddock.rollouts.judging import (
    AgentTime,
    Blame,
    ModelUse,
    StallLimits,
    judge_calls,
    judge_model,
    judge_sandbox,
    judge_stop,
    lost_seconds,
)
from paddock.store.outcome import Outcome

FINE = Blame()
FAILED = Blame(Outcome.MODEL, "the endpoint broke")


@pytest.mark.parametrize(
    ("use", "ending"),
    [
        (ModelUse(FINE), None),
        (ModelUse(FINE, exhausted="tokens"), (Outcome.BUDGET, "the budget of tokens was used up")),
        (ModelUse(FAILED), (Outcome.MODEL, "the endpoint broke")),
        (ModelUse(FAILED, exhausted="tokens"), (Outcome.MODEL, "the endpoint broke")),
        (ModelUse(Blame(None, "one request was refused")), None),
    ],
)
def test_a_budget_that_broken_answers_used_up_is_not_charged(
    use: ModelUse, ending: tuple[Outcome, str | None] | None
) -> None:
    assert judge_model(use) == ending


@pytest.mark.parametrize(
    ("use", "abort_reason", "timed_out", "outcome"),
    [
        (ModelUse(FINE), None, False, None),
        (ModelUse(FINE), None, True, Outcome.TIMEOUT),
        (ModelUse(FAILED), None, True, Outcome.MODEL),
        (ModelUse(FAILED), None, False, None),
        (ModelUse(FAILED, storage_error="c0 was not kept"), None, True, Outcome.ENVIRONMENT),
        (ModelUse(FAILED, storage_error="c0 was not kept"), "stopped", True, Outcome.CANCELLED),
    ],
)
def test_who_stopped_it_decides_first(
    use: ModelUse, abort_reason: str | None, timed_out: bool, outcome: Outcome | None
) -> None:
    ending = judge_stop(use, abort_reason=abort_reason, timed_out=timed_out)
    assert (ending and ending.outcome) == outcome


def test_a_timeout_names_refused_requests() -> None:
    use = ModelUse(Blame(None, "the endpoint refused 2 of 3 requests"))
    ending = judge_stop(use, abort_reason=None, timed_out=True)
    assert ending == (Outcome.TIMEOUT, "the agent did not finish in time; the endpoint refused 2 of 3 requests")


def test_a_sandbox_that_used_too_much_is_over_its_budget() -> None:
    endings = [judge_sandbox(*exit) for exit in ((0, None), (None, None), (None, "memory"))]
    assert [ending and ending.outcome for ending in endings] == [None, Outcome.SANDBOX, Outcome.BUDGET]


# -- the model endpoint ----------------------------------------------------------------------------

LIMITS = StallLimits(streamed=25.0, whole=50.0)
UP = AgentTime(0.0, 100.0, timed_out=True)
"""The agent had 100 seconds."""


def answered(began: float, ended: float, **changes: Any) -> CallSummary:
    options = {"attempt_began": began, "last_byte": ended, **changes}
    return CallSummary(began, ended=ended, **options)


def refused(began: float, ended: float, status: int = 429, **changes: Any) -> CallSummary:
    options = {"attempt_began": began, "fault": "endpoint", "error": f"no: {status}", **changes}
    return CallSummary(began, ended=ended, **options)


def in_flight(began: float, last_byte: float | None = None, **changes: Any) -> CallSummary:
    """It was cut off when the time was up."""
    options = {"attempt_began": began, "last_byte": last_byte, "ended": 100.1, **changes}
    return CallSummary(began, unanswered=True, error="the call was cut off", **options)


@pytest.mark.parametrize(
    ("calls", "outcome"),
    [
        ([], None),
        ([answered(0, 30), answered(40, 99)], None),
        ([in_flight(0)], Outcome.MODEL),
        ([answered(0, 70), in_flight(74)], Outcome.MODEL),
        ([answered(0, 70), in_flight(76)], None),
        ([answered(0, 30), in_flight(30, 99.9)], None),
        ([in_flight(0, 99.9, fault="endpoint")], None),
        ([answered(0, 30), in_flight(30, 70)], Outcome.MODEL),
        ([answered(0, 30), in_flight(30, 80)], None),
        ([answered(0, 30), in_flight(60, streamed=False)], None),
        ([answered(0, 30), in_flight(49, streamed=False)], Outcome.MODEL),
        ([answered(0, 30), in_flight(40), in_flight(40, 99.9)], Outcome.MODEL),
        ([answered(0, 60), in_flight(70), in_flight(70, 99.9)], None),
        ([answered(0, 60), in_flight(61, attempt_began=98.0)], Outcome.MODEL),
        ([answered(0, 60), in_flight(61, 98.5, attempt_began=98.0)], None),
        ([answered(0, 40), *(refused(at, at + 1) for at in range(40, 100, 5))], Outcome.MODEL),
        ([answered(0, 60), *(refused(at, at + 1) for at in range(60, 100, 5))], None),
        ([answered(0, 40), refused(40, 41)], Outcome.MODEL),
        ([answered(0, 60), refused(60, 61)], None),
        ([refused(0, 55, 503), answered(55, 60), in_flight(60, 99.9)], Outcome.MODEL),
        ([answered(0, 99, attempt_began=60.0)], Outcome.MODEL),
        ([answered(0, 99, attempt_began=40.0)], None),
        ([in_flight(10, attempt_began=None)], Outcome.MODEL),
        ([refused(at, at + 1, 400, fault="request") for at in range(0, 100, 5)], Outcome.MODEL),
        ([answered(0, 10), *(in_flight(at, ended=at + 9) for at in range(10, 100, 10))], Outcome.MODEL),
    ],
)
def test_when_the_time_is_up(calls: list[CallSummary], outcome: Outcome | None) -> None:
    blame = judge_calls(calls, UP, LIMITS)
    assert blame.outcome is outcome
    assert (blame.error is None) == (outcome is None)


@pytest.mark.parametrize("fault", ["request", "context"])
def test_requests_that_were_refused_until_the_time_was_up_are_reported(fault: str) -> None:
    calls = [answered(0, 1), *(refused(at, at + 1, 400, fault=fault) for at in range(1, 100, 5)), answered(99, 100)]
    blame = judge_calls(calls, UP, LIMITS)
    assert (blame.outcome, blame.error) == (
        None,
        "the endpoint refused 20 of 22 requests, the last one with: no: 400",
    )


@pytest.mark.parametrize(
    ("calls", "outcome", "words"),
    [
        ([], None, None),
        ([refused(0, 1, 500), answered(1, 2)], None, None),
        ([answered(0, 1), refused(1, 2, 500)], Outcome.MODEL, "500"),
        ([refused(0, 1, 400, fault="request")], Outcome.MODEL, "400"),
        ([answered(0, 1), refused(1, 2, 400, fault="request")], None, "refused the last request: no: 400"),
        ([answered(0, 1), refused(1, 2, 400, fault="request"), answered(2, 3)], None, None),
        ([answered(0, 1), refused(1, 2, 400, fault="context")], Outcome.BUDGET, "context"),
        ([refused(1, 2, 400, fault="context")], Outcome.MODEL, "context"),
        ([answered(0, 1), in_flight(1, ended=9.9)], Outcome.MODEL, "did not answer"),
        ([answered(0, 9), in_flight(9.5, ended=9.9)], None, None),
        ([in_flight(0, 4.5, ended=5.0)], None, None),
    ],
)
def test_when_the_agent_ended_by_itself(calls: list[CallSummary], outcome: Outcome | None, words: str | None) -> None:
    blame = judge_calls(calls, AgentTime(0.0, 10.0), LIMITS)
    assert blame.outcome is outcome
    assert words in blame.error if words is not None and blame.error else blame.error is words


def test_time_that_several_calls_lost_at_once_counts_once() -> None:
    calls = [in_flight(0, ended=30.0), in_flight(10, ended=40.0), refused(90, 95)]
    assert lost_seconds(calls, UP) == 50.0


def test_a_short_rollout_has_a_short_stall_limit_unless_one_is_given() -> None:
    assert [stall_seconds(None, seconds) for seconds in (20, 600)] == [5, 60]
    assert stall_seconds(90, 20) == 90
