"""The one JSON shape of rollouts and calls."""

import orjson
import pytest

from paddock.capture.trace import Call, Event, Level, Role
from paddock.rollouts.rollout_json import SUMMARY, call_to_json, rollout_to_json, summarize
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

RECORD = RolloutRecord(
    "r1",
    "t1",
    outcome=Outcome.TIMEOUT,
    reward=0.0,
    call_count=2,
    trainable_calls=1,
    level="tokens",
    started_at=10.0,
    finished_at=12.5,
    agent_log="long",
)
CALL = Call(
    "c0",
    0,
    prompt_token_ids=[1],
    completion_token_ids=[2],
    logprobs=[-1.0],
    started=1.0,
    first_token=1.25,
    ended=2.0,
    level=Level.TOKENS,
)


def test_a_line_has_the_outcome_without_its_logs() -> None:
    line = summarize(RECORD)
    assert tuple(line) == (*SUMMARY, "calls")
    assert (line["outcome"], line["reward"], line["wall_s"], line["trainable"]) == ("timeout", 0.0, 2.5, True)
    assert "agent_log" not in line


def test_everything_is_plain_json() -> None:
    scores = [{"reward": 1.0}]
    whole = orjson.loads(orjson.dumps(rollout_to_json(RECORD, [CALL], [(3, Event(1.0, "stage", {"x": 1}))], scores)))
    assert whole["agent_log"] == "long"
    assert whole["call_count"] == 2
    assert [call["id"] for call in whole["calls"]] == ["c0"]
    assert whole["events"] == [{"seq": 3, "at": 1.0, "kind": "stage", "data": {"x": 1}}]
    assert whole["scores"] == scores


def test_a_call_says_whether_it_is_trainable_and_why_not() -> None:
    visible = call_to_json(CALL)
    assert (visible["ok"], visible["trainable"], visible["untrainable_because"]) == (True, True, None)
    assert (visible["timing"]["seconds"], visible["timing"]["seconds_to_first_token"]) == (1.0, 0.25)


@pytest.mark.parametrize(
    "changes", [{"role": Role.RETRIED}, {"aborted": True}, {"error": "x"}, {"logprobs": []}, {"prompt_token_ids": []}]
)
def test_a_call_that_is_not_whole_cannot_be_trained_on(changes: dict[str, object]) -> None:
    fields = {"prompt_token_ids": [1], "completion_token_ids": [2], "logprobs": [-1.0], **changes}
    visible = call_to_json(Call("c0", 0, **fields))  # type: ignore[arg-type]
    assert not visible["trainable"]
    assert visible["untrainable_because"]


def test_a_rollout_under_way_has_no_outcome_and_no_wall_time() -> None:
    line = summarize(RolloutRecord("r2", "t1", started_at=1.0))
    assert (line["outcome"], line["wall_s"], line["trainable"], line["stage"]) == (None, None, False, "queued")
