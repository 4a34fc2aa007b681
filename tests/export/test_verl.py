"""verl: staleness and extra fields."""

from export.rollouts import conversation, exported


def test_extra_fields_have_the_range_of_weight_versions() -> None:
    calls = conversation(2)
    calls[0].weight_version, calls[1].weight_version = "step-4", "step-6"
    (output,) = exported("verl", calls, reward_parts={"tests": 0.5})
    extra = output["extra_fields"]
    assert (extra["min_global_steps"], extra["max_global_steps"]) == (4, 6)
    assert extra["reward_extra_info"] == {"tests": 0.5}
    assert output["metrics"] == {"generate_sequences": 1.0}
    assert "min_global_steps" not in exported("verl", conversation(1))[0]["extra_fields"]
