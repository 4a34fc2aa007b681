"""SkyRL's `GeneratorOutput`, one for each rollout, with a row for each sample.

This is SkyRL's step-wise form: the rows of a rollout follow each other, `is_last_step` marks the last, and the
advantage of that one counts for all. `skyrl.train.generators.utils.concatenate_generator_outputs` joins several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export import checks
from paddock.rollouts.export.samples import Sample, samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = False
PACKAGE = "skyrl"
ROWS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
OURS = ("rollout_id", "group_id", "temperatures", "logprobs_kinds")
"""What SkyRL does not read."""
NOT_HERE = (
    *("rollout_metrics", "trajectory_generation_times", "trajectory_time_splits", "rollout_expert_indices"),
    *("rollout_sample_support", "env_metrics", "pixel_values", "image_grid_thw"),
)


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    found = list(samples(record, calls, policy))
    if found:
        document = generator_output(found, [(found[0].group_id, record.member)] * len(found))
        told = {"temperatures": [each.metadata["temperatures"] for each in found]}
        told["logprobs_kinds"] = [each.metadata["logprobs_kinds"] for each in found]
        yield {**document, "rollout_id": record.rollout_id, "group_id": found[0].group_id, **told}


def generator_output(found: Iterable[Sample], trajectories: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Samples as SkyRL takes them, each with the `instance_id` and `repetition_id` of its trajectory."""
    rows = list(found)
    return {
        "prompt_token_ids": [sample.prompt_ids for sample in rows],
        "response_ids": [sample.response_ids for sample in rows],
        "rewards": [sample.reward for sample in rows],
        "loss_masks": [sample.mask for sample in rows],
        "stop_reasons": [sample.finish_reason or "stop" for sample in rows],
        "rollout_logprobs": [sample.logprobs for sample in rows],
        "trajectory_ids": [{"instance_id": name, "repetition_id": number} for name, number in trajectories],
        "is_last_step": [sample.is_last for sample in rows],
        **dict.fromkeys(NOT_HERE),
    }


def complaints(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.equal_lengths(document, *ROWS, "trajectory_ids", "is_last_step")
    if document["is_last_step"] != [False] * (len(document["is_last_step"]) - 1) + [True]:
        yield "is_last_step does not mark the last row and no other"
    for prompt, response, reward, mask, _, logprobs in zip(*(document[name] for name in ROWS), strict=False):
        yield from checks.token_ids(prompt, "prompt_token_ids")
        yield from checks.token_ids(response, "response_ids")
        lengths = {"response_ids": response, "loss_masks": mask, "rollout_logprobs": logprobs}
        yield from checks.equal_lengths(lengths, *lengths)
        yield from checks.mask(mask, "loss_masks")
        yield from checks.logprobs(logprobs, "rollout_logprobs")
        yield from checks.masked_logprobs(logprobs, mask, "rollout_logprobs")
        yield from checks.reward(reward)


def accept(document: dict[str, Any]) -> None:
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.utils.trainer_utils import validate_generator_output

    given = {name: value for name, value in document.items() if name not in OURS}
    given["trajectory_ids"] = [TrajectoryID(**each) for each in given["trajectory_ids"]]
    validate_generator_output(1, given, step_wise=True)
