"""The example that learns: what it trains on is exactly what its policy sampled."""

from typing import Any

import pytest

from .processes import run_client

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    answer = run_client("trl", "grpo_tiny.py")["steps"]
    assert isinstance(answer, list), answer["failed"]
    return answer


def test_every_rollout_becomes_one_sample_of_its_group(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert (step["rollouts"], step["samples"], step["groups"]) == (28, 28, 7)
        assert step["calls"] == 3


def test_the_loss_mask_covers_exactly_the_sampled_tokens(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["trained"] == step["sampled"]
        assert step["captured"] == pytest.approx(step["logprobs"])


def test_importance_ratios_are_one_before_the_first_update(steps: list[dict[str, Any]]) -> None:
    assert all(step["difference"] < 1e-4 for step in steps)


def test_samples_carry_the_version_of_the_weights_that_sampled_them(steps: list[dict[str, Any]]) -> None:
    assert [step["versions"] for step in steps] == [["0"], ["1"]]


def test_an_update_moves_the_weights_and_the_control_would_not(steps: list[dict[str, Any]]) -> None:
    assert all(step["moved"] and step["advantages"] > 0 for step in steps)
    assert all(step["control"] == 0 for step in steps)
