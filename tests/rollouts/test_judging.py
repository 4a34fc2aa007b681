"""Who decides how a rollout ended."""

import pytest

from paddock.rollouts.blame import Blame
from paddock.rollouts.judging import ModelUse, judge_model, judge_sandbox, judge_stop
from paddock.rollouts.outcome import Outcome

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
    ("use", "aborted", "timed_out", "outcome"),
    [
        (ModelUse(FINE), None, False, None),
        (ModelUse(FINE), None, True, Outcome.TIMEOUT),
        (ModelUse(FAILED), None, True, Outcome.MODEL),
        (ModelUse(FAILED), None, False, None),
        (ModelUse(FAILED, lost="c0 was not kept"), None, True, Outcome.ENVIRONMENT),
        (ModelUse(FAILED, lost="c0 was not kept"), "stopped", True, Outcome.CANCELLED),
    ],
)
def test_who_stopped_it_decides_first(
    use: ModelUse, aborted: str | None, timed_out: bool, outcome: Outcome | None
) -> None:
    ending = judge_stop(use, aborted=aborted, timed_out=timed_out)
    assert (ending and ending.outcome) == outcome


def test_a_timeout_tells_what_was_refused() -> None:
    use = ModelUse(Blame(None, "the endpoint refused 2 of 3 requests"))
    ending = judge_stop(use, aborted=None, timed_out=True)
    assert ending == (Outcome.TIMEOUT, "the agent did not finish in time; the endpoint refused 2 of 3 requests")


def test_a_sandbox_that_used_too_much_is_over_its_budget() -> None:
    endings = [judge_sandbox(*exit) for exit in ((0, None), (None, None), (None, "memory"))]
    assert [ending and ending.outcome for ending in endings] == [None, Outcome.SANDBOX, Outcome.BUDGET]
