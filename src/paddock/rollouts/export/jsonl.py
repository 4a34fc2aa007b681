"""One object for each call that can be trained on: ids, logprobs, and whose tokens they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call


def export(record: RolloutRecord, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    """Each call is a sample of its own; `reward` is None where nobody knows."""
    for call in calls:
        if not call.trainable:
            continue
        yield {
            "rollout_id": record.rollout_id,
            "task_id": record.task_id,
            "outcome": record.outcome,
            "reward": record.reward,
            "call": call.id,
            "role": call.role,
            "parent": call.parent,
            "shared_tokens": call.shared_tokens,
            "prompt_token_ids": call.prompt_token_ids,
            "completion_token_ids": call.completion_token_ids,
            "logprobs": call.logprobs,
            "loss_mask": loss_mask(call),
            "finish_reason": call.finish_reason,
            "weight_version": call.weight_version,
        }


def loss_mask(call: Call) -> list[int]:
    """1 for the tokens that the model sampled, 0 for those it was given."""
    return [0] * len(call.prompt_token_ids) + [1] * len(call.completion_token_ids)
