"""slime's `Sample` (and Miles'), as `Sample.from_dict` takes it: one for each sample.

Siblings of one rollout share `rollout_id`. A sample of a rollout that nobody scored has `remove_sample`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export import checks
from paddock.rollouts.export.samples import Sample, samples, sampling
from paddock.rollouts.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = True
PACKAGE = "slime"
STATUS = {
    Outcome.OK: "completed",
    Outcome.TIMEOUT: "truncated",
    Outcome.BUDGET: "truncated",
    Outcome.CANCELLED: "aborted",
}
"""Every other outcome is `failed`."""


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    said = {call.id: str(call.message.get("content") or "") for call in calls}
    for sample in samples(record, calls, policy):
        yield document(record, sample, "\n".join(filter(None, (said[name] for name in sample.calls))))


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
            **sampling(sample),
        },
    }


def complaints(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.token_ids(document["tokens"], "tokens")
    yield from checks.equal_lengths(document, "loss_mask", "rollout_log_probs")
    if document["response_length"] != len(document["loss_mask"]):
        yield "response_length is not the length of loss_mask"
    yield from checks.mask(document["loss_mask"], "loss_mask")
    yield from checks.logprobs(document["rollout_log_probs"], "rollout_log_probs")
    yield from checks.masked_logprobs(document["rollout_log_probs"], document["loss_mask"], "rollout_log_probs")
    yield from checks.reward(document["reward"])


def accept(document: dict[str, Any]) -> None:
    from slime.utils.types import Sample as Theirs

    Theirs.from_dict(document)
