"""OpenEnv's `TrainingTrace`, schema version 1: one object for each rollout, one turn for each trainable call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export.jsonl import loss_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call


def export(record: RolloutRecord, calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    turns = [turn(record, call) for call in calls if call.trainable]
    if turns:
        yield {"schema_version": 1, "turns": turns}


def turn(record: RolloutRecord, call: Call) -> dict[str, Any]:
    return {
        "node_id": f"{record.rollout_id}/{call.id}",
        "prompt_token_ids": call.prompt_token_ids,
        "completion_token_ids": call.completion_token_ids,
        "per_token_logps": call.logprobs,
        "loss_mask": loss_mask(call),
        "request": call.request,
        "response": {"message": call.message, "finish_reason": call.finish_reason, "usage": call.usage},
        "metadata": {
            "rollout_id": record.rollout_id,
            "task_id": record.task_id,
            "reward": record.reward,
            "outcome": record.outcome,
            "role": call.role,
            "parent": call.parent,
        },
    }
