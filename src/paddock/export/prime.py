"""prime-rl's `TrainingSample`, one for each sample: one flat sequence, with a mask, a logprob and a temperature for
every token. The trainer computes advantages, from `reward` and `group_id`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.export import Form, checks
from paddock.export.samples import Sample, samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord

DEFAULT_TEMPERATURE = 1.0
"""Of inference engines, if a request has none."""


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    for sample in samples(record, calls, policy):
        yield training_sample(sample)


def training_sample(sample: Sample) -> dict[str, Any]:
    context = len(sample.prompt_ids)
    ids = sample.prompt_ids + sample.response_ids
    temperatures = {value for value in sample.metadata["temperatures"] if value is not None}
    return {
        "token_ids": ids,
        "mask": [False] * context + list(map(bool, sample.mask)),
        "logprobs": [0.0] * context + sample.logprobs,
        # A rollout normally has one temperature. Of several, the highest overstates the probabilities least.
        "temperatures": [max(temperatures, default=DEFAULT_TEMPERATURE)] * len(ids),
        "env_name": sample.task_id,
        "advantages": None,
        "reward": sample.reward,
        "rollout_id": sample.rollout_id,
        "group_id": sample.group_id,
        "branch": sample.branch,
        "weight_versions": list(sample.weight_versions),
        "logprobs_kinds": sample.metadata["logprobs_kinds"],
    }


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.training_sequence(
        document,
        ids=("token_ids",),
        aligned=("token_ids", "mask", "logprobs", "temperatures"),
        mask_name="mask",
        logprobs_name="logprobs",
    )
    yield from checks.reward(document["reward"])


def validate(document: dict[str, Any]) -> None:
    from prime_rl.transport.types import TrainingSample

    TrainingSample(**{name: document[name] for name in TrainingSample.__struct_fields__ if name in document})


FORM = Form(
    summary="prime-rl's TrainingSample",
    export=export,
    find_problems=find_problems,
    package="prime_rl",
    validate=validate,
)
