"""What a trainer gets: rollouts with their training sequences, alone or as the group that they are compared in."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paddock.errors import StreamError
from paddock.export.policy import version_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.export.samples import Sample
    from paddock.store.record import RolloutRecord
    from paddock.tasks.task import Task

SPREAD_FLOOR = 1e-4
"""Added to the standard deviation of a group's rewards, as trainers do."""
TOO_LONG = "too long"
TOO_OLD = "too old"
ZERO_ADVANTAGE = "zero advantage"


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """One rollout, and what can be trained on of it."""

    record: RolloutRecord
    """The rollout."""
    calls: list[Call]
    """All its model calls."""
    samples: list[Sample]
    """The sequences to train on."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What the model said."""
        return [call.message for call in self.calls if call.ok]

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of the calls in its samples; None if no call has a number."""
        numbers = [number for sample in self.samples for number in version_numbers(sample)]
        return (min(numbers), max(numbers)) if numbers else None

    @property
    def trained_tokens(self) -> int:
        """How many tokens the loss mask covers."""
        return sum(sum(sample.mask) for sample in self.samples)

    @property
    def logprob_sum(self) -> float:
        """Of the trained tokens: its negative, divided by their number, estimates the entropy of the policy."""
        return sum(sum(sample.logprobs) for sample in self.samples)

    def left_out_because(self, policy: Policy, max_tokens: int | None = None) -> str | None:
        """Why nothing of it can be trained on; None if something can. Short, so that reasons can be counted."""
        if self.record.reward is None and policy.unscored == "exclude":
            return f"unscored: {self.record.outcome}"
        if not self.samples:
            reasons = (reason for reason in policy.rejections(self.calls) if reason is not None)
            # What follows a colon names one process or one rollout.
            return f"untrainable tokens: {next(reasons, 'it made no model call').partition(':')[0]}"
        if max_tokens is not None and max(map(length, self.samples)) > max_tokens:
            return TOO_LONG
        return None


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """Rollouts of one task that are compared with each other; or one of them, if a stream delivers rollouts."""

    number: int
    """Of the unit in its stream."""
    source: str
    """The name of its source."""
    task: Task
    """The task of all its rollouts."""
    rollouts: Sequence[SampledRollout]
    """Those that can be trained on."""
    rewards: Sequence[float]
    """Of all rollouts of the group that have a reward, also of those that cannot be trained on."""
    version: int = 0
    """The trainer's weight version when the group was delivered."""
    staleness: int = 0
    """How many versions behind it the oldest call was."""
    is_whole: bool = True
    """Whether these are all rollouts of the group, and not one of them that was delivered alone."""

    @property
    def samples(self) -> list[Sample]:
        """The sequences of all its rollouts."""
        return [sample for rollout in self.rollouts for sample in rollout.samples]

    @property
    def mean(self) -> float | None:
        """The mean of the rewards; None without any."""
        return statistics.fmean(self.rewards) if self.rewards else None

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ, so that an advantage is not 0."""
        return len(set(self.rewards)) > 1

    @property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of all calls; None if no call has a number."""
        pairs = [pair for rollout in self.rollouts if (pair := rollout.versions) is not None]
        return (min(low for low, _ in pairs), max(high for _, high in pairs)) if pairs else None

    def delivered(self, version: int, staleness: int) -> ScoredGroup:
        return replace(self, version=version, staleness=staleness)

    def advantage(self, sample: Sample) -> float:
        """How much better its rollout did than the mean of the group, in standard deviations.

        Raises StreamError for a rollout that was delivered alone: it has nothing to be compared with."""
        if not self.is_whole:
            hint = 'compare sample.reward with your own baseline, or use deliver="group"'
            raise StreamError(f"a rollout of {self.task.id} was delivered alone, without its group", hint=hint)
        return advantage(sample.reward, self.rewards)


def advantage(reward: float | None, rewards: Sequence[float]) -> float:
    """How far a reward is above the mean of a group, in standard deviations. 0 for an unknown one."""
    if reward is None or not rewards:
        return 0.0
    return (reward - statistics.fmean(rewards)) / (statistics.pstdev(rewards) + SPREAD_FLOOR)


def version_numbers(sample: Sample) -> list[int]:
    """The numbers of the weight versions from which a sample's calls were sampled."""
    versions = (*sample.weight_versions, *sample.metadata.get("admitted_versions", ()))
    numbers = (version_number(version) for version in versions if version is not None)
    return [number for number in numbers if number is not None]


def length(sample: Sample) -> int:
    """Tokens that a trainer processes for it."""
    return len(sample.prompt_ids) + len(sample.response_ids)
