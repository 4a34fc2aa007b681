"""OpenEnv's `TrainingTrace`, schema version 1: one object for each rollout, one turn for each trainable call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.trace import sent_temperature
from paddock.export import Form, checks
from paddock.export.jsonl import loss_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    if policy.rejects(record) is not None:
        return
    refused = policy.rejections(calls)
    turns = [turn(record, call) for call, reason in zip(calls, refused, strict=True) if reason is None]
    if turns:
        yield {"schema_version": 1, "turns": turns}


def turn(record: RolloutRecord, call: Call) -> dict[str, Any]:
    return {
        "node_id": f"{record.rollout_id}/{call.id}",
        "prompt_token_ids": list(call.prompt_token_ids),
        "completion_token_ids": list(call.completion_token_ids),
        "per_token_logps": list(call.logprobs),
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
            "weight_version": call.weight_version,
            "temperature": sent_temperature(call),
            "logprobs_kind": call.logprobs_kind,
        },
    }


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    names = [turn["node_id"] for turn in document["turns"]]
    if len(set(names)) < len(names):
        yield "two turns have the same node_id"
    for each in document["turns"]:
        sampled = {"completion_token_ids": each["completion_token_ids"], "per_token_logps": each["per_token_logps"]}
        whole = {
            "loss_mask": each["loss_mask"],
            "prompt and completion": each["prompt_token_ids"] + each["completion_token_ids"],
        }
        yield from checks.equal_lengths(sampled, *sampled)
        yield from checks.equal_lengths(whole, *whole)
        yield from checks.mask(each["loss_mask"], "loss_mask")
        yield from checks.logprobs(each["per_token_logps"], "per_token_logps")
        yield from checks.reward(each["metadata"]["reward"])


def validate(document: dict[str, Any]) -> None:
    from openenv.core.harness.training import TrainingTrace

    TrainingTrace.model_validate(document)


FORM = Form(
    summary="OpenEnv's TrainingTrace",
    export=export,
    find_problems=find_problems,
    package="openenv",
    validate=validate,
    needs_whole_calls=True,
)
