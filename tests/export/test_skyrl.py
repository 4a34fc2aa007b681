"""SkyRL: one document per rollout, one row per sample."""

from export.rollouts import exported, forked


def test_the_last_row_of_a_rollout_is_marked() -> None:
    (output,) = exported("skyrl", forked(), member=3)
    assert output["is_last_step"] == [False, False, True]
    assert output["trajectory_ids"] == [{"instance_id": "b1/t1", "repetition_id": 3}] * 3
    assert output["rewards"] == [0.5] * 3
    assert output["stop_reasons"] == ["stop"] * 3
