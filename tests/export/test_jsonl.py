"""The forms of single calls: JSON lines, OpenEnv's trace, and recordings. Only whole answers are exported."""

import json
from typing import Any

from paddock.capture.trace import Call, Level, Role
from paddock.export import export_rollout
from paddock.models.replay import Script
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

RECORD = RolloutRecord("r1", "t1", outcome=Outcome.OK, reward=0.5)


def call(index: int, **changes: Any) -> Call:
    whole: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [7, 8],
        "logprobs": [-0.5, -0.25],
        "tokens": ["Hel", "lo"],
        "message": {"role": "assistant", "content": "Hello"},
        "request": {"messages": [{"role": "user", "content": "hi"}]},
        "finish_reason": "stop",
        "level": Level.TOKENS,
    }
    return Call(f"c{index}", index, **{**whole, **changes})


CALLS = [
    call(0),
    call(1, role=Role.RETRIED),
    call(2, aborted=True),
    call(3, error="boom"),
    call(4, logprobs=[-0.5]),
    call(5, prompt_token_ids=[]),
    call(6, prompt_token_ids=[1, 2, 3, 7, 8, 9], parent="c0", shared_tokens=5),
]


def exported(form: str, record: RolloutRecord = RECORD, calls: list[Call] | None = None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in export_rollout(form, record, CALLS if calls is None else calls)]


def test_only_whole_answers_are_lines() -> None:
    lines = exported("jsonl")
    assert [line["call"] for line in lines] == ["c0", "c6"]
    assert lines[1]["loss_mask"] == [0] * 6 + [1] * 2
    assert (lines[1]["continues"], lines[1]["shared_tokens"], lines[1]["reward"]) == ("c0", 5, 0.5)


def test_an_unknown_reward_stays_unknown() -> None:
    for reward in (None, 0.0):
        record = RolloutRecord("r1", "t1", outcome=Outcome.VERIFIER, reward=reward)
        assert [line["reward"] for line in exported("jsonl", record)] == [reward] * 2
        assert exported("openenv", record)[0]["turns"][0]["metadata"]["reward"] == reward


def test_openenv_has_one_object_with_a_turn_for_each() -> None:
    (trace,) = exported("openenv")
    assert trace["schema_version"] == 1
    assert [turn["node_id"] for turn in trace["turns"]] == ["r1/c0", "r1/c6"]
    for turn in trace["turns"]:
        assert len(turn["loss_mask"]) == len(turn["prompt_token_ids"]) + len(turn["completion_token_ids"])
        assert len(turn["per_token_logps"]) == len(turn["completion_token_ids"])


def test_nothing_to_train_on_is_no_object() -> None:
    assert exported("openenv", calls=CALLS[1:6]) == []
    assert exported("jsonl", calls=[]) == []


def test_a_recording_can_be_played() -> None:
    script = Script.parse(exported("replay"))
    (task,) = script.tasks
    assert task.turns[0].completion_ids == [7, 8]  # type: ignore[union-attr]
