"""What a TRL `rollout_func` returns: one row for each sample, or columns with a value for each.

TRL reads `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` (1 for tokens of the model); every other column,
`reward` among them, goes to the reward functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export import checks
from paddock.rollouts.export.samples import Sample, samples, sampling

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = False
PACKAGE = "trl"
REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    yield from map(row, samples(record, calls, policy))


def row(sample: Sample) -> dict[str, Any]:
    return {
        "prompt_ids": sample.prompt_ids,
        "completion_ids": sample.response_ids,
        "logprobs": sample.logprobs,
        "env_mask": sample.mask,
        "reward": sample.reward,
        "rollout_id": sample.rollout_id,
        "task_id": sample.task_id,
        "group_id": sample.group_id,
        "is_last": sample.is_last,
        "weight_versions": list(sample.weight_versions),
        **sampling(sample),
    }


def columns(found: Iterable[Sample]) -> dict[str, list[Any]]:
    """What a `rollout_func` has to return for these samples, in their order."""
    rows = [row(sample) for sample in found]
    return {name: [each[name] for each in rows] for name in rows[0]} if rows else {name: [] for name in REQUIRED}


def complaints(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.token_ids(document["prompt_ids"], "prompt_ids")
    yield from checks.token_ids(document["completion_ids"], "completion_ids")
    yield from checks.equal_lengths(document, "completion_ids", "logprobs", "env_mask")
    yield from checks.mask(document["env_mask"], "env_mask")
    yield from checks.logprobs(document["logprobs"], "logprobs")
    yield from checks.masked_logprobs(document["logprobs"], document["env_mask"], "logprobs")
    yield from checks.reward(document["reward"])


def accept(document: dict[str, Any]) -> None:
    """TRL has no class for it; its padding is what every row goes through first."""
    import torch
    from trl.trainer.utils import pad

    columns = ("completion_ids", "logprobs", "env_mask")
    padded = [pad([torch.tensor(document[name])], 0) for name in columns]
    if len({tensor.shape for tensor in padded}) > 1:
        raise ValueError("completion_ids, logprobs and env_mask have different shapes")
