"""SkyRL's `GeneratorOutput`, one for each rollout, with a row for each sample.

This is SkyRL's step-wise form: the rows of a rollout follow each other, `is_last_step` marks the last, and the
advantage of that one counts for all. `skyrl.train.generators.utils.concatenate_generator_outputs` joins several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.export import Form, checks
from paddock.export.samples import Sample, samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord

ROWS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs")
EXTRA_FIELDS = ("rollout_id", "group_id", "temperatures", "logprobs_kinds")
"""What SkyRL does not read."""
UNUSED_FIELDS = (
    *("rollout_metrics", "trajectory_generation_times", "trajectory_time_splits", "rollout_expert_indices"),
    *("rollout_sample_support", "env_metrics", "pixel_values", "image_grid_thw"),
)


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    rows = list(samples(record, calls, policy))
    if rows:
        group_id = rows[0].group_id
        yield {
            **generator_output(rows, [(group_id, record.member)] * len(rows)),
            "rollout_id": record.rollout_id,
            "group_id": group_id,
            "temperatures": [sample.metadata["temperatures"] for sample in rows],
            "logprobs_kinds": [sample.metadata["logprobs_kinds"] for sample in rows],
        }


def generator_output(rows: Sequence[Sample], trajectories: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Samples as SkyRL takes them, each with the `instance_id` and `repetition_id` of its trajectory."""
    return {
        "prompt_token_ids": [sample.prompt_ids for sample in rows],
        "response_ids": [sample.response_ids for sample in rows],
        "rewards": [sample.reward for sample in rows],
        "loss_masks": [sample.mask for sample in rows],
        "stop_reasons": [sample.finish_reason or "stop" for sample in rows],
        "rollout_logprobs": [sample.logprobs for sample in rows],
        "trajectory_ids": [{"instance_id": name, "repetition_id": number} for name, number in trajectories],
        "is_last_step": [sample.is_last for sample in rows],
        **dict.fromkeys(UNUSED_FIELDS),
    }


def find_problems(document: dict[str, Any]) -> Iterator[str]:
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


def validate(document: dict[str, Any]) -> None:
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.utils.trainer_utils import validate_generator_output

    output = {name: value for name, value in document.items() if name not in EXTRA_FIELDS}
    output["trajectory_ids"] = [TrajectoryID(**each) for each in output["trajectory_ids"]]
    validate_generator_output(1, output, step_wise=True)


FORM = Form(
    summary="SkyRL's GeneratorOutput",
    export=export,
    find_problems=find_problems,
    package="skyrl",
    validate=validate,
)
