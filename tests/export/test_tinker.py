"""Tinker: inputs and shifted targets."""

from export.rollouts import conversation, record
from paddock.export.samples import samples
from paddock.export.tinker import datum


def test_targets_are_one_token_ahead() -> None:
    (sample,) = samples(record(), conversation(2))
    converted = datum(sample, advantage=-2.0)
    tokens = converted["model_input"]["chunks"][0]["tokens"]
    inputs = {name: each["data"] for name, each in converted["loss_fn_inputs"].items()}
    assert tokens[1:] == inputs["target_tokens"][:-1]
    assert inputs["mask"] == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert inputs["advantages"] == [-2.0 * each for each in inputs["mask"]]
    assert inputs["target_tokens"][2] == 100
    assert inputs["logprobs"][2] == -0.25
