"""The example that learns: what it trains on is exactly what its policy sampled, and none of it is too old."""

from typing import Any

import pytest

from .processes import run_client

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    return run_client("trl", "grpo_tiny.py")


@pytest.fixture(scope="module")
def steps(answer: dict[str, Any]) -> list[dict[str, Any]]:
    assert isinstance(answer["steps"], list), answer["steps"]["failed"]
    return answer["steps"]


def test_every_conversation_is_one_sample(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        assert step["groups"] >= 4
        assert step["samples"] == step["rollouts"] == 4 * step["groups"]
    assert {name for step in steps for name in step["sources"]} == {"after", "find"}


def test_the_tokens_of_a_sample_are_those_that_were_sent_and_sampled(steps: list[dict[str, Any]]) -> None:
    assert [step["invented"] for step in steps] == [0] * len(steps)
    assert all(step["trained"] > 0 for step in steps)


def test_captured_logprobs_are_those_of_the_weights_that_sampled(steps: list[dict[str, Any]]) -> None:
    differences = [step["difference"] for step in steps if step["difference"] is not None]
    assert differences
    assert all(each < 1e-4 for each in differences)


def test_no_sample_is_older_than_the_limit(steps: list[dict[str, Any]]) -> None:
    assert all(step["staleness"] <= 1 for step in steps)


def test_an_update_moves_the_weights_and_the_control_would_not(steps: list[dict[str, Any]]) -> None:
    assert all(step["moved"] for step in steps)
    assert all(step["control"] == 0 for step in steps)


def test_token_mode_has_the_words_of_the_policy(answer: dict[str, Any]) -> None:
    assert answer["tokenizer"] == {"same": True, "text": True}
