"""verl's `AgentLoopOutput`, one for each sample. verl reads staleness from `extra_fields`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.export import Form, checks
from paddock.export.policy import version_number
from paddock.export.samples import Sample, samples, sampling_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    seconds = {call.id: (call.ended or call.started) - call.started for call in calls}
    for sample in samples(record, calls, policy):
        yield agent_loop_output(sample, generation_seconds=sum(seconds[name] for name in sample.calls))


def agent_loop_output(sample: Sample, *, generation_seconds: float = 0.0) -> dict[str, Any]:
    """The fields of the output; `generation_seconds` is how long the model took."""
    extra = {
        "rollout_id": sample.rollout_id,
        "task_id": sample.task_id,
        "group_id": sample.group_id,
        "label": sample.label,
        "is_last": sample.is_last,
        "outcome": sample.outcome,
        "reward_extra_info": sample.reward_parts,
        # A dict, because verl makes an array of these values, and cannot of lists.
        "sampling": sampling_metadata(sample),
    }
    versions = [*sample.weight_versions, *sample.metadata.get("admitted_versions", ())]
    steps = [step for version in versions if version is not None and (step := version_number(version)) is not None]
    if steps:
        extra |= {"min_global_steps": min(steps), "max_global_steps": max(steps)}
    return {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response_mask": sample.mask,
        "response_logprobs": sample.logprobs,
        "reward_score": sample.reward,
        "num_turns": 2 * len(sample.calls),
        "metrics": {"generate_sequences": generation_seconds},
        "extra_fields": extra,
    }


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.training_sequence(
        document,
        ids=("prompt_ids", "response_ids"),
        aligned=("response_ids", "response_mask", "response_logprobs"),
        mask_name="response_mask",
        logprobs_name="response_logprobs",
    )
    yield from checks.reward(document["reward_score"])


def validate(document: dict[str, Any]) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    tensors = AgentLoopOutput.model_validate(document).as_dict()
    if tensors["responses"].shape != tensors["response_mask"].shape:
        raise ValueError("responses and response_mask have different shapes")


FORM = Form(
    summary="verl's AgentLoopOutput",
    export=export,
    find_problems=find_problems,
    package="verl",
    validate=validate,
)
