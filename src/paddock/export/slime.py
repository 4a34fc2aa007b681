"""slime's `Sample` (and Miles'), as `Sample.from_dict` takes it: one for each sample.

Samples of one rollout share `rollout_id`. A sample without a reward has `remove_sample`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.export import Form, checks
from paddock.export.samples import Sample, samples, sampling_metadata
from paddock.store.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord

STATUS = {
    Outcome.OK: "completed",
    Outcome.TIMEOUT: "truncated",
    Outcome.BUDGET: "truncated",
    Outcome.CANCELLED: "aborted",
}
"""Every other outcome is `failed`."""


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    texts = {call.id: str(call.message.get("content") or "") for call in calls}
    for sample in samples(record, calls, policy):
        yield document(record, sample, "\n".join(filter(None, (texts[name] for name in sample.calls))))


def document(record: RolloutRecord, sample: Sample, response: str) -> dict[str, Any]:
    assert record.outcome is not None
    return {
        "prompt": record.instruction,
        "tokens": sample.prompt_ids + sample.response_ids,
        "response": response,
        "response_length": len(sample.response_ids),
        "reward": sample.reward,
        "loss_mask": sample.mask,
        "rollout_log_probs": sample.logprobs,
        "weight_versions": [version for version in sample.weight_versions if version is not None],
        "status": "truncated" if sample.finish_reason == "length" else STATUS.get(record.outcome, "failed"),
        "remove_sample": sample.reward is None,
        "session_id": sample.rollout_id,
        "rollout_id": sample.rollout_id,
        "metadata": {
            "task_id": sample.task_id,
            "group_id": sample.group_id,
            "label": sample.label,
            "is_last": sample.is_last,
            "reward_parts": sample.reward_parts,
            **sampling_metadata(sample),
        },
    }


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    if document["response_length"] != len(document["loss_mask"]):
        yield "response_length is not the length of loss_mask"
    yield from checks.training_sequence(
        document,
        ids=("tokens",),
        aligned=("loss_mask", "rollout_log_probs"),
        mask_name="loss_mask",
        logprobs_name="rollout_log_probs",
    )
    yield from checks.reward(document["reward"])


def validate(document: dict[str, Any]) -> None:
    from slime.utils.types import Sample as SlimeSample

    SlimeSample.from_dict(document)


FORM = Form(
    summary="slime's Sample",
    export=export,
    find_problems=find_problems,
    package="slime",
    validate=validate,
    needs_whole_calls=True,
)
