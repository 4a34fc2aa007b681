"""What the steps of a rollout are worth together."""

import pytest

from paddock.rollouts.judging import Ending
from paddock.rollouts.steps import StepRecord, min_reward_failure, total_reward, whole_ending
from paddock.store.outcome import Outcome, Reward
from paddock.tasks.settings import RewardStrategy, TaskStep


def results(*scores: float | None) -> list[StepRecord]:
    made = []
    for number, score in enumerate(scores):
        result = StepRecord(f"s{number}")
        result.begin()
        reward = Reward.unknown("broken") if score is None else Reward(score, None, {"a": score})
        result.end(Ending(Outcome.OK), reward)
        made.append(result)
    return made


def test_the_mean_leaves_out_steps_that_were_not_reached() -> None:
    reward = total_reward([*results(1.0, 0.0), StepRecord("unreached")], "mean")
    assert (reward.value, reward.parts) == (0.5, {"a": 0.5})


def test_final_takes_the_last_step_that_was_run() -> None:
    assert total_reward([*results(0.0, 0.75), StepRecord("unreached")], "final").value == 0.75


@pytest.mark.parametrize("strategy", ["mean", "final"])
def test_an_unknown_reward_makes_the_whole_reward_unknown(strategy: RewardStrategy) -> None:
    reward = total_reward(results(None, 1.0), strategy)
    assert (reward.value, reward.reason) == (None, "step s0: broken")


@pytest.mark.parametrize(
    ("least", "reward", "passes"),
    [
        ({"reward": 1.0}, Reward(1.0), True),
        ({"reward": 1.0}, Reward(0.9), False),
        ({"reward": 0.5, "safety": 1.0}, Reward(0.5, None, {"safety": 1.0}), True),
        ({"safety": 1.0}, Reward(1.0, None, {"safety": 0.0}), False),
        ({"safety": 0.0}, Reward(1.0), False),
        ({"reward": 0.0}, Reward.unknown("broken"), False),
    ],
)
def test_min_reward_names_rewards(least: dict[str, float], reward: Reward, passes: bool) -> None:
    assert (min_reward_failure(TaskStep("s", "go", min_reward=least), reward) is None) == passes


def test_the_ending_is_that_of_the_step_that_broke() -> None:
    late, broken, fine = results(1.0, 1.0, 1.0)
    late.end(Ending(Outcome.TIMEOUT, "too late"), Reward(1.0))
    broken.end(Ending(Outcome.MODEL, "no answer"), Reward.unknown("not verified"))
    assert whole_ending([late, fine]) == (Outcome.TIMEOUT, "step s0: too late")
    assert whole_ending([late, fine, broken]) == (Outcome.MODEL, "step s1: no answer")
