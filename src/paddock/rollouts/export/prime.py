"""prime-rl's `TrainingSample`, one for each sample: one flat sequence, with a mask, a logprob and a temperature for
every token. Advantages are the trainer's to compute; `reward` and `group_id` are what it needs for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export import checks
from paddock.rollouts.export.samples import Sample, samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = False
PACKAGE = "prime_rl"
ENGINES_OWN = 1.0
"""The temperature of engines that were told none."""


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    for sample in samples(record, calls, policy):
        yield training_sample(sample)


def training_sample(sample: Sample) -> dict[str, Any]:
    before = len(sample.prompt_ids)
    ids = sample.prompt_ids + sample.response_ids
    told = {value for value in sample.metadata["temperatures"] if value is not None} or {ENGINES_OWN}
    return {
        "token_ids": ids,
        "mask": [False] * before + list(map(bool, sample.mask)),
        "logprobs": [0.0] * before + sample.logprobs,
        # One rollout has one temperature; should an agent have had several, the hottest says least too much.
        "temperatures": [max(told)] * len(ids),
        "env_name": sample.task_id,
        "advantages": None,
        "reward": sample.reward,
        "rollout_id": sample.rollout_id,
        "group_id": sample.group_id,
        "branch": sample.branch,
        "weight_versions": list(sample.weight_versions),
        "logprobs_kinds": sample.metadata["logprobs_kinds"],
    }


def complaints(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.token_ids(document["token_ids"], "token_ids")
    yield from checks.equal_lengths(document, "token_ids", "mask", "logprobs", "temperatures")
    yield from checks.mask(document["mask"], "mask")
    yield from checks.logprobs(document["logprobs"], "logprobs")
    yield from checks.masked_logprobs(document["logprobs"], document["mask"], "logprobs")
    yield from checks.reward(document["reward"])


def accept(document: dict[str, Any]) -> None:
    from prime_rl.transport.types import TrainingSample

    TrainingSample(**{name: document[name] for name in TrainingSample.__struct_fields__ if name in document})
