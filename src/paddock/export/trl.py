"""What a TRL `rollout_func` returns: one row for each sample, or columns with a value for each.

TRL reads `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` (1 for tokens of the model); every other column,
`reward` among them, goes to the reward functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.export import Form, checks
from paddock.export.samples import Sample, samples, sampling_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord

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
        **sampling_metadata(sample),
    }


def columns(each: Iterable[Sample]) -> dict[str, list[Any]]:
    """What a `rollout_func` has to return for these samples, in their order."""
    rows = [row(sample) for sample in each]
    return {name: [values[name] for values in rows] for name in rows[0]} if rows else {name: [] for name in REQUIRED}


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.training_sequence(
        document,
        ids=("prompt_ids", "completion_ids"),
        aligned=("completion_ids", "logprobs", "env_mask"),
        mask_name="env_mask",
        logprobs_name="logprobs",
    )
    yield from checks.reward(document["reward"])


def validate(document: dict[str, Any]) -> None:
    """TRL has no class for a row; the first thing that it does with one is to pad it."""
    import torch
    from trl.trainer.utils import pad

    columns = ("completion_ids", "logprobs", "env_mask")
    padded = [pad([torch.tensor(document[name])], 0) for name in columns]
    if len({tensor.shape for tensor in padded}) > 1:
        raise ValueError("completion_ids, logprobs and env_mask have different shapes")


FORM = Form(
    summary="columns of a TRL rollout_func",
    export=export,
    find_problems=find_problems,
    package="trl",
    validate=validate,
)
