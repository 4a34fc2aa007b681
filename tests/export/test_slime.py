"""slime: samples with a status."""

from export.rollouts import END, conversation, exported, forked
from paddock.store.outcome import Outcome


def test_samples_of_a_rollout_share_its_id_and_have_a_status() -> None:
    lines = exported("slime", forked(), instruction="do it")
    assert {line["rollout_id"] for line in lines} == {"r1"}
    assert [line["status"] for line in lines] == ["completed"] * 3
    assert lines[0]["tokens"][-lines[0]["response_length"] :] == [100, 200, END, 60, 101, 201, END, 61, 102, 202, END]
    assert lines[0]["response"] == "said 0\nsaid 1\nsaid 2"
    (cut,) = exported("slime", conversation(1, finish_reason="length"))
    assert cut["status"] == "truncated"
    (late,) = exported("slime", conversation(1), outcome=Outcome.TIMEOUT)
    assert late["status"] == "truncated"
