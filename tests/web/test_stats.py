"""The arithmetic of means and chances."""

import math

import pytest

from paddock.rollouts.batch import BatchGroup
from paddock.store.record import RolloutRecord
from paddock.store.reward_sums import RewardSums
from paddock.web.stats import confidence, pass_at, wilson


def sums(*rewards: float) -> RewardSums:
    binary = sum(reward in (0, 1) for reward in rewards)
    passed = sum(reward >= 1 for reward in rewards)
    squares = sum(reward * reward for reward in rewards)
    return RewardSums(len(rewards), len(rewards), passed, binary, sum(rewards), squares)


@pytest.mark.parametrize("passed", range(9))
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_pass_at_k_is_what_a_batch_says(k: int, passed: int) -> None:
    rewards = [1.0] * passed + [0.0] * (8 - passed)
    group = BatchGroup("t", [RolloutRecord("r", "t", reward=reward) for reward in rewards])
    assert pass_at(k, 8, passed) == pytest.approx(group.pass_at(k))


def test_pass_at_k_needs_k_samples() -> None:
    assert pass_at(4, 3, 3) is None
    assert pass_at(1, 0, 0) is None
    assert pass_at(8, 100_000, 50_000) == pytest.approx(1 - 0.5**8, abs=1e-4)


def test_wilson_stays_between_0_and_1() -> None:
    # Known values: 8 of 10.
    assert wilson(0.8, 10) == pytest.approx([0.4901625, 0.9433178], abs=1e-6)
    assert wilson(0.0, 5)[0] == 0.0
    assert wilson(1.0, 5)[1] == 1.0


def test_rewards_between_have_a_normal_interval() -> None:
    rewards = [0.2, 0.4, 0.9, 0.5]
    mean = sum(rewards) / 4
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / 3 / 4)
    assert confidence(sums(*rewards)) == pytest.approx([mean - 1.95996 * spread, mean + 1.95996 * spread], abs=1e-4)


def test_no_interval_without_samples() -> None:
    assert confidence(sums()) is None
    assert confidence(sums(0.5)) is None
    assert confidence(sums(1.0)) == pytest.approx(wilson(1.0, 1))
