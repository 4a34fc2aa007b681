"""verl's `AgentLoopOutput`, one for each sample. Staleness is told where verl looks for it, in `extra_fields`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export import checks
from paddock.rollouts.export.policy import number_of
from paddock.rollouts.export.samples import Sample, samples, sampling

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = False
PACKAGE = "verl"


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    seconds = {call.id: (call.ended or call.started) - call.started for call in calls}
    for sample in samples(record, calls, policy):
        yield agent_loop_output(sample, generating=sum(seconds[name] for name in sample.calls))


def agent_loop_output(sample: Sample, *, generating: float = 0.0) -> dict[str, Any]:
    """The fields of the output; `generating` is how many seconds the model took."""
    extra = {
        "rollout_id": sample.rollout_id,
        "task_id": sample.task_id,
        "group_id": sample.group_id,
        "label": sample.label,
        "is_last": sample.is_last,
        "outcome": sample.outcome,
        "reward_extra_info": sample.reward_parts,
        # A dict, because verl makes an array of these values, and cannot of lists.
        "sampling": sampling(sample),
    }
    told = [*sample.weight_versions, *sample.metadata.get("admitted_versions", ())]
    steps = [step for version in told if version is not None and (step := number_of(version)) is not None]
    if steps:
        extra |= {"min_global_steps": min(steps), "max_global_steps": max(steps)}
    return {
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "response_mask": sample.mask,
        "response_logprobs": sample.logprobs,
        "reward_score": sample.reward,
        "num_turns": 2 * len(sample.calls),
        "metrics": {"generate_sequences": generating},
        "extra_fields": extra,
    }


def complaints(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.token_ids(document["prompt_ids"], "prompt_ids")
    yield from checks.token_ids(document["response_ids"], "response_ids")
    yield from checks.equal_lengths(document, "response_ids", "response_mask", "response_logprobs")
    yield from checks.mask(document["response_mask"], "response_mask")
    yield from checks.logprobs(document["response_logprobs"], "response_logprobs")
    yield from checks.masked_logprobs(document["response_logprobs"], document["response_mask"], "response_logprobs")
    yield from checks.reward(document["reward_score"])


def accept(document: dict[str, Any]) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    made = AgentLoopOutput.model_validate(document).as_dict()
    if made["responses"].shape != made["response_mask"].shape:
        raise ValueError("responses and response_mask have different shapes")
