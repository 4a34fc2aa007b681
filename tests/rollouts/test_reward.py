import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.rollouts.outcome import Reward
from paddock.rollouts.reward import parse_reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"1", 1.0),
        (b" 0.5\n", 0.5),
        (b"-2.", -2.0),
        (b"+.25", 0.25),
        (b"1e-3\r\n", 0.001),
        (b"0", 0.0),
        (b"7.5e1", 75.0),
    ],
)
def test_one_number_is_the_reward(text: bytes, value: float) -> None:
    assert parse_reward(text, None) == Reward(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"1 2", "not one number"),
        (b"1.0\n1.0", "not one number"),
        (b"1_0", "not one number"),
        (b"0x1", "not one number"),
        ("١".encode(), "not one number"),
        (b"\xff", "not one number"),
        (b"true", "not one number"),
        (b"NaN", "not finite"),
        (b"-inf", "not finite"),
        (b"1e999", "not finite"),
        (b"1" * 5000, "5000 bytes"),
    ],
)
def test_anything_else_is_unknown_and_says_why(text: bytes, reason: str) -> None:
    reward = parse_reward(text, None)
    assert reward.value is None
    assert reason in str(reward.reason)
    assert parse_reward(text, b'{"reward": 1.0}').value is None


def test_no_file_is_unknown() -> None:
    assert parse_reward(None, None) == Reward.unknown("the verifier wrote no reward")


@pytest.mark.parametrize(
    ("data", "value", "parts"),
    [
        ({"reward": 0.5}, 0.5, {}),
        ({"reward": 1, "speed": 0.25, "note": "fine", "done": True}, 1.0, {"speed": 0.25}),
        ({"reward": 0.5, "parts": {"a": 1, "b": 0, "c": "x"}, "d": 2}, 0.5, {"a": 1.0, "b": 0.0, "d": 2.0}),
        ({"score": 0.3, "total": 9}, 0.3, {"total": 9.0}),
        ({"total": 0.3, "a": 1}, 0.3, {"a": 1.0}),
        ({"accuracy": 0.7}, 0.7, {"accuracy": 0.7}),
        ({"parts": {"accuracy": 0.7}}, 0.7, {"accuracy": 0.7}),
    ],
)
def test_named_numbers_are_value_and_parts(data: object, value: float, parts: dict[str, float]) -> None:
    assert parse_reward(None, json.dumps(data).encode()) == Reward(value, None, parts)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not valid JSON"),
        (b"0.5", "not an object"),
        (b"{}", "no number"),
        (b'{"a": 1, "b": 0}', "several numbers and none is 'reward': a, b"),
        (b'{"reward": "1"}', "no number under 'reward'"),
        (b'{"reward": true}', "no number under 'reward'"),
        (b'{"reward": NaN}', "not finite: reward"),
        (b'{"reward": 1, "parts": {"a": Infinity}}', "not finite: a"),
        (b'{"reward": ' + b"9" * 5000 + b"}", "not finite"),
        (b"[" * 60_000, "not valid JSON"),
        (b'{"reward": 1, "x": "' + b"x" * 70_000 + b'"}', "bytes"),
    ],
    ids=range(11),
)
def test_an_object_without_a_clear_value_is_unknown(text: bytes, reason: str) -> None:
    reward = parse_reward(None, text)
    assert reward.value is None
    assert reason in str(reward.reason)


def test_parts_are_kept_where_the_value_is_unknown() -> None:
    assert parse_reward(None, b'{"a": 1, "b": 0}').parts == {"a": 1.0, "b": 0.0}


def test_the_text_decides_and_the_object_gives_the_parts() -> None:
    assert parse_reward(b"0.25", b'{"reward": 0.25, "a": 0.5}') == Reward(0.25, None, {"a": 0.5})
    assert parse_reward(b"0.25", b"broken") == Reward(0.25)


@given(
    st.none() | st.binary(max_size=60),
    st.none() | st.binary(max_size=60) | st.text().map(lambda text: json.dumps({text: 1}).encode()),
)
def test_whatever_is_written_gives_a_finite_value_or_a_reason(text: bytes | None, data: bytes | None) -> None:
    reward = parse_reward(text, data)
    assert reward.reason if reward.value is None else math.isfinite(reward.value)


def test_two_different_rewards_are_unknown() -> None:
    both = parse_reward(b"1.0", b'{"reward": 0.0, "parts": {"a": 0.0}}')
    assert (both.value, both.reason) == (None, "reward.txt says 1, but reward.json says 0")
    assert parse_reward(b"1.0", b'{"reward": 1, "parts": {"a": 0.0}}').value == 1.0
    assert parse_reward(b"1.0", b'{"accuracy": 0.5}').value == 1.0
