"""One object for each call that can be trained on: ids, logprobs, and whose tokens they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.trace import sent_temperature
from paddock.export import Form, checks
from paddock.export.trees import export_tree, find_tree_problems
from paddock.rollouts.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    """Each call is a sample of its own; `reward` is None where it is unknown."""
    if policy.rejects(record) is not None:
        return
    graph = Graph.of(calls)
    for call, reason in zip(calls, policy.rejections(calls), strict=True):
        if reason is not None:
            continue
        node = graph.nodes[call.id]
        yield {
            "rollout_id": record.rollout_id,
            "task_id": record.task_id,
            "outcome": record.outcome,
            "reward": record.reward,
            "call": call.id,
            "role": call.role,
            "label": node.label,
            "parent": node.parent,
            "continues": node.continues,
            "shared_tokens": node.shared_tokens,
            "prompt_token_ids": list(call.prompt_token_ids),
            "completion_token_ids": list(call.completion_token_ids),
            "logprobs": list(call.logprobs),
            "loss_mask": loss_mask(call),
            "finish_reason": call.finish_reason,
            "weight_version": call.weight_version,
            "admitted_version": call.admitted_version,
            "temperature": sent_temperature(call),
            "logprobs_kind": call.logprobs_kind,
        }


def loss_mask(call: Call) -> list[int]:
    """1 for the tokens that the model sampled, 0 for those of its prompt."""
    return [0] * len(call.prompt_token_ids) + [1] * len(call.completion_token_ids)


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    yield from checks.token_ids(document["prompt_token_ids"], "prompt_token_ids")
    yield from checks.token_ids(document["completion_token_ids"], "completion_token_ids")
    yield from checks.equal_lengths(document, "completion_token_ids", "logprobs")
    yield from checks.logprobs(document["logprobs"], "logprobs")
    yield from checks.reward(document["reward"])


FORM = Form(
    summary="one object for each call: ids, logprobs, mask; with --tree, for each tree of forks",
    export=export,
    find_problems=find_problems,
    export_tree=export_tree,
    find_tree_problems=find_tree_problems,
)
