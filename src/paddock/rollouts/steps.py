"""The steps of a rollout: what each one scored, which one was the last, and what all of them are worth. No IO.

As in Harbor, the reward is the mean of the steps that were run, or that of the last one of them. A step that was not
reached, because an earlier one scored less than its `min_reward`, does not count. A reward that is unknown ends the
rollout, and makes the whole reward unknown.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.rollouts.judging import Ending
from paddock.rollouts.verifier import VALUE_KEYS
from paddock.store.outcome import Outcome, Reward

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paddock.tasks.settings import RewardStrategy, TaskStep

NOT_ENDED = "the step has not ended"
NOT_REACHED = "the step was not reached"
CONTINUING_OUTCOMES = (Outcome.OK, Outcome.TIMEOUT)
"""Endings of a step after which the next one is run. After a used-up budget, no step could call the model."""


@dataclass(slots=True)
class StepRecord:
    """One step of a rollout, as the record has it."""

    name: str
    outcome: str | None = None
    """How the agent ended in this step; None if the step has not ended."""
    error: str | None = None
    reward: float | None = None
    reward_reason: str | None = NOT_ENDED
    """Why there is no reward."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    started_at: float | None = None
    """None: the step was not reached."""
    seconds: float | None = None
    """From the start of the step to the end of its tests."""
    exit_code: int | None = None
    """Of the agent's program."""
    test_exit_code: int | None = None
    verifier: dict[str, Any] = field(default_factory=dict)
    """The `mode` in which its tests were run, and the `reason` for it."""
    calls: int = 0
    workdir_blob: str | None = None
    """The work folder as the agent left it, a tar in the store."""
    artifact_blob: str | None = None
    """What the task keeps of the step, a tar in the store."""

    def begin(self) -> None:
        self.started_at = time.time()

    def end(self, ending: Ending, reward: Reward) -> None:
        self.outcome, self.error = ending
        self.reward, self.reward_reason, self.reward_parts = reward.value, reward.reason, dict(reward.parts)

    @property
    def is_over(self) -> bool:
        return self.outcome is not None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def min_reward_failure(step: TaskStep, reward: Reward) -> str | None:
    """Why no step is run after this one; None if the reward is high enough. An unknown one is too low."""
    for name, minimum in step.min_reward.items():
        value = _named_reward(reward, name)
        if value is None:
            return f"step {step.name} has no reward {name!r}, and min_reward is {minimum:g}"
        if value < minimum:
            return f"step {step.name} scored {value:g} for {name!r}, below its min_reward of {minimum:g}"
    return None


def _named_reward(reward: Reward, name: str) -> float | None:
    return reward.parts.get(name, reward.value if name in VALUE_KEYS else None)


def total_reward(results: Sequence[StepRecord], strategy: RewardStrategy) -> Reward:
    """The reward of all steps that were run."""
    run = [result for result in results if result.started_at is not None]
    unknown = next((result for result in run if result.reward is None), None)
    if unknown is not None:
        return Reward.unknown(f"step {unknown.name}: {unknown.reward_reason}")
    if not run:
        return Reward.unknown("no step was run")
    if strategy == "final":
        return Reward(run[-1].reward, None, run[-1].reward_parts)
    return Reward(_mean([result.reward or 0.0 for result in run]), None, _mean_parts([r.reward_parts for r in run]))


def _mean_parts(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A part that a step does not have counts as 0 there."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _mean([row.get(name, 0.0) for row in rows]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def whole_ending(results: Sequence[StepRecord]) -> Ending:
    """The ending of a rollout: that of the step that broke off, else of the first one whose time was up."""
    over = [result for result in results if result.outcome is not None]
    last = over[-1]
    chosen = last if last.outcome != Outcome.OK else next((r for r in over if r.outcome != Outcome.OK), last)
    assert chosen.outcome is not None
    error = None if chosen.error is None else f"step {chosen.name}: {chosen.error}"
    return Ending(Outcome(chosen.outcome), error)
