"""GRPO: an update of the policy from samples. Knows no environment, no server and no text."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy import Policy

    from paddock.export.samples import Sample
    from paddock.train.sampled import ScoredGroup

Control = Literal["zero", "shuffled"] | None
"""What to put in place of the advantages, to see that the policy does not learn without them."""
LOWEST, HIGHEST = 0.8, 1.28
"""Beyond these importance ratios a token is pushed no further."""
UPDATES = 4
RATE = 2e-3
SLOW_STEPS = 10
"""The rate grows over so many steps: Adam knows too little at first, and would spoil what the policy can do."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as tensors: rows are sequences, columns are their tokens but the first."""

    sequences: list[list[int]]
    mask: Tensor
    """1 where the policy sampled the token, 0 where it was given."""
    logprobs: Tensor
    """What the endpoint said when it sampled."""
    advantages: Tensor


@dataclass(frozen=True, slots=True)
class Report:
    ratio: float
    """The mean importance ratio after the last but one update."""
    entropy: float
    """Mean surprise of the trained tokens under the policy before the update, in nats."""
    tokens: int
    """How many were trained on."""


def advantages(groups: Sequence[ScoredGroup], control: Control = None) -> list[float]:
    """How much better each sample's rollout did than the others of its group, in standard deviations."""
    values = [group.advantage(sample) for group in groups for sample in group.samples]
    if control == "zero":
        return [0.0] * len(values)
    if control == "shuffled":
        random.Random(0).shuffle(values)
    return values


def collate(groups: Sequence[ScoredGroup], control: Control = None) -> Batch:
    samples = [sample for group in groups for sample in group.samples]
    sequences = [sample.prompt_ids + sample.response_ids for sample in samples]
    longest = max(len(ids) for ids in sequences)

    def padded(values: list[float], before: int) -> list[float]:
        return [0.0] * (before - 1) + values + [0.0] * (longest - before - len(values))

    return Batch(
        sequences,
        torch.tensor([padded([float(m) for m in sample.mask], len(sample.prompt_ids)) for sample in samples]),
        torch.tensor([padded(sample.logprobs, len(sample.prompt_ids)) for sample in samples]),
        torch.tensor(advantages(groups, control)),
    )


def difference(policy: Policy, samples: Sequence[Sample], version: int) -> float:
    """The largest |logprob now - logprob when sampled| of the samples that this version sampled: 0 if the capture is
    exact. NaN if there are none."""
    own = [each for each in samples if set(each.weight_versions) == {str(version)}]
    if not own:
        return math.nan
    with torch.no_grad():
        computed = policy.logprobs([sample.prompt_ids + sample.response_ids for sample in own])
    worst = 0.0
    for row, sample in zip(computed.tolist(), own, strict=True):
        sampled = zip(row[len(sample.prompt_ids) - 1 :], sample.logprobs, sample.mask, strict=False)
        worst = max(worst, *(abs(now - before) for now, before, mask in sampled if mask))
    return worst


class Trainer:
    """Updates the policy in place."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1 / SLOW_STEPS, total_iters=SLOW_STEPS)

    def step(self, batch: Batch) -> Report:
        """Several updates on one batch; afterwards the policy has the next version."""
        entropy, ratio = 0.0, torch.ones(())
        pushed = batch.advantages[:, None]
        for number in range(UPDATES):
            current = self._policy.logprobs(batch.sequences)
            if number == 0:
                entropy = float(-(current.detach() * batch.mask).sum() / batch.mask.sum())
            ratio = ((current - batch.logprobs) * batch.mask).exp()
            gain = torch.minimum(ratio * pushed, ratio.clamp(LOWEST, HIGHEST) * pushed)
            loss = -(gain * batch.mask).sum() / batch.mask.sum()
            self._optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
            self._optimizer.step()
        self._schedule.step()
        self._policy.version += 1
        mean = float((ratio.detach() * batch.mask).sum() / batch.mask.sum())
        return Report(mean, entropy, int(batch.mask.sum()))
