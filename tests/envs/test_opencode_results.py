"""The shapes that tools answer with, from records and calls."""

import pytest

from paddock.capture.trace import Call, Role
from paddock.envs.opencode.results import TAIL, Status, result_of, state_of, status_of, turns_of
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord


def record(**values: object) -> RolloutRecord:
    return RolloutRecord("r1", "task", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "stage", "status"),
    [
        (None, "queued", Status.QUEUED),
        (None, "model", Status.RUNNING),
        (None, "verifier", Status.RUNNING),
        (Outcome.OK, "done", Status.FINISHED),
        (Outcome.TIMEOUT, "done", Status.FINISHED),
        (Outcome.BUDGET, "done", Status.FINISHED),
        (Outcome.CANCELLED, "agent", Status.ABORTED),
        (Outcome.MODEL, "done", Status.FAILED),
        (Outcome.VERIFIER, "done", Status.FAILED),
    ],
)
def test_every_rollout_is_in_one_of_five_states(outcome: Outcome | None, stage: str, status: Status) -> None:
    assert status_of(record(outcome=outcome, stage=stage)) is status


def test_every_outcome_has_a_state() -> None:
    ended = {status_of(record(outcome=outcome, stage="done")) for outcome in Outcome}
    assert ended == {Status.FINISHED, Status.FAILED, Status.ABORTED}


def test_a_queued_rollout_has_not_begun() -> None:
    assert state_of(record(started_at=5.0)).started_at is None
    assert state_of(record(started_at=5.0, stage="agent")).started_at == 5.0


def test_turns_are_in_order_and_name_their_parent_by_turn() -> None:
    calls = [
        Call(
            "c1", 1, parent="c0", prompt_token_ids=[1, 2, 3], completion_token_ids=[4], logprobs=[-0.5], tokens=["a"]
        ),
        Call("c0", 0, role=Role.TITLE, usage={"prompt_tokens": 7}, started=1.0, ended=1.5),
        Call("c2", 2, aborted=True),
        Call("c3", 3, error="status 500", parent="gone"),
    ]
    first, second, third, fourth = turns_of(calls)
    assert (first.turn, first.role, first.prompt_token_count, first.latency_s) == (0, "title", 7, 0.5)
    assert (second.parent, second.per_token_logps, second.completion_tokens) == (0, [-0.5], ["a"])
    assert (second.prompt_token_count, second.completion_token_count, second.trainable) == (3, 1, True)
    assert (third.error, third.trainable) == ("aborted", False)
    assert (fourth.error, fourth.parent) == ("status 500", None)


def test_a_result_says_why_there_is_no_reward_and_keeps_the_end_of_logs() -> None:
    ended = record(
        outcome=Outcome.OK, reward_reason="no tests", agent_log="x" * TAIL + "end", started_at=1, finished_at=3
    )
    result = result_of(ended, [])
    assert (result.reward, result.reward_reason, result.wall_s) == (None, "no tests", 2)
    assert result.agent_log_tail.endswith("end")
    assert len(result.agent_log_tail) == TAIL
