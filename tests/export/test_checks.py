"""The checks that forms share."""

from typing import Any

import pytest

from export.rollouts import conversation, exported, problems


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"logprobs": [float("nan")] * 3}, "logprobs holds a value that is not finite"),
        ({"logprobs": [0.5] * 3}, "logprobs holds 0.5, and no probability is above 1"),
        ({"logprobs": [-0.5] * 2}, "lengths differ: completion_ids 3, logprobs 2, env_mask 3"),
        ({"env_mask": [0, 0, 0], "logprobs": [0.0] * 3}, "env_mask lets nothing be trained on"),
        ({"env_mask": [1, 2, 1]}, "env_mask holds something else than 0 and 1"),
        ({"env_mask": [1, 0, 1]}, "logprobs is not 0 where the mask is"),
        ({"prompt_ids": []}, "prompt_ids is empty"),
        ({"completion_ids": [1, -2, 3]}, "completion_ids holds something that is no token id"),
        ({"reward": float("inf")}, "the reward inf is no finite number"),
        ({"reward": None}, "it has no reward"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_row_is_found(change: dict[str, Any], expected: str) -> None:
    (row,) = exported("trl", conversation(1))
    assert problems("trl", {**row, **change}) == [expected]
