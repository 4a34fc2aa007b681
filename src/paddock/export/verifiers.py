"""A `Trace` of verifiers (v1, schema version 1), as prime-rl reads it: one for each rollout.

Its nodes are the input and the completion of each call, linked where a call continues another. So its branches are
those of our graph, and the tokens along a branch are exactly those that the inference engine saw. Messages between
two calls are in one node, which has the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.roles import SYSTEM_ROLES
from paddock.capture.trace import sent_temperature
from paddock.export import Form, checks, conversation
from paddock.models.message_text import content_text
from paddock.rollouts.graph import Graph
from paddock.store.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.rollouts.graph import CallNode
    from paddock.store.record import RolloutRecord

FINISH = ("stop", "length", "tool_calls")


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    if policy.rejects(record) is not None:
        return
    rejections = dict(zip((call.id for call in calls), policy.rejections(calls), strict=True))
    builder = _NodeBuilder(Graph.of(calls), rejections)
    for call in calls:
        if call.prompt_token_ids and call.completion_token_ids:
            builder.add(call)
    if not any(any(node["mask"]) for node in builder.nodes):
        return
    rewards = {"reward": None if record.reward is None else {"score": record.reward, "weight": 1.0}}
    yield {
        "version": 1,
        "id": record.rollout_id,
        "task": {"type": "PaddockTask", "data": {"id": record.task_id, "prompt": record.instruction or None}},
        "agent": {"config": {"model": record.model or None}, "name": record.agent},
        "nodes": builder.nodes,
        "calls": builder.calls,
        "rewards": rewards,
        "metrics": dict(record.reward_parts),
        "info": {
            "outcome": record.outcome,
            "batch_id": record.batch_id,
            "member": record.member,
            "weight_versions": {call.id: call.weight_version for call in calls},
            "temperatures": {call.id: sent_temperature(call) for call in calls},
            "logprobs_kinds": {call.id: str(call.logprobs_kind) for call in calls},
        },
        "is_completed": True,
        "ok": record.outcome is Outcome.OK,
        "stop_condition": None if record.outcome is Outcome.OK else str(record.outcome),
        "is_timeout": record.outcome is Outcome.TIMEOUT,
        "errors": [{"type": str(record.outcome), "message": record.error}] if record.error else [],
    }


class _NodeBuilder:
    def __init__(self, graph: Graph, rejections: dict[str, str | None]) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self._graph = graph
        self._rejections = rejections
        self._answer_nodes: dict[str, int] = {}
        """The node of each call's answer."""

    def add(self, call: Call) -> None:
        position = self._graph.nodes[call.id]
        parent = None if position.continues is None else self._answer_nodes.get(position.continues)
        added, message = self._input(position, parent)
        if added:
            parent = self._append(parent, message, added, call.started)
        sampled, trained = list(call.completion_token_ids), self._rejections[call.id] is None
        node = self._append(parent, answer(call), sampled, call.ended or call.started, sampled=True)
        if trained:
            self.nodes[node] |= {"mask": [True] * len(sampled), "logprobs": list(call.logprobs)}
        self._answer_nodes[call.id] = node
        self.calls.append(model_call(call, node))

    def _input(self, position: CallNode, parent: int | None) -> tuple[list[int], dict[str, Any]]:
        """The tokens of a call's prompt beyond the call that it continues, and the last message in them."""
        call = position.call
        messages = conversation.messages(call)
        last = plain(messages[-1]) if messages else {"role": "user", "content": ""}
        if parent is None or position.continues is None:
            return list(call.prompt_token_ids), last
        before = self._graph.nodes[position.continues].call
        return list(call.prompt_token_ids[len(before.prompt_token_ids) + len(before.completion_token_ids) :]), last

    def _append(
        self, parent: int | None, message: dict[str, Any], ids: list[int], at: float, *, sampled: bool = False
    ) -> int:
        node = {"parent": parent, "message": message, "sampled": sampled, "timestamp": at, "token_ids": ids}
        self.nodes.append({**node, "mask": [False] * len(ids), "logprobs": []})
        return len(self.nodes) - 1


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """An input message in the few roles that verifiers knows."""
    role, text = message.get("role"), content_text(message.get("content"))
    if role == "tool":
        return {"role": "tool", "tool_call_id": str(message.get("tool_call_id") or ""), "content": text}
    return {"role": "system" if role in SYSTEM_ROLES else "user", "content": text}


def answer(call: Call) -> dict[str, Any]:
    content = call.message.get("content")
    tools = [
        {
            "id": str(each.get("id") or ""),
            "name": str((each.get("function") or {}).get("name") or ""),
            "arguments": str((each.get("function") or {}).get("arguments") or ""),
        }
        for each in call.message.get("tool_calls") or ()
    ]
    return {
        "role": "assistant",
        "content": content if isinstance(content, str) else None,
        "reasoning_content": call.message.get("reasoning_content"),
        "tool_calls": tools or None,
    }


def model_call(call: Call, node: int) -> dict[str, Any]:
    return {
        "node": node,
        "model": call.model or None,
        "finish_reason": call.finish_reason if call.finish_reason in FINISH else None,
        "usage": {
            "prompt_tokens": len(call.prompt_token_ids),
            "completion_tokens": len(call.completion_token_ids),
        },
        "time": {"start": call.started, "end": call.ended or call.started},
    }


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    for number, node in enumerate(document["nodes"]):
        yield from checks.equal_lengths(node, "token_ids", "mask")
        if node["parent"] is not None and not 0 <= node["parent"] < number:
            yield f"node {number} has a parent that does not come before it"
        if len(node["logprobs"]) != sum(node["mask"]):
            yield f"node {number} has not one logprob for each trained token"
        yield from checks.logprobs(node["logprobs"], f"logprobs of node {number}")
    score = document["rewards"]["reward"]
    yield from checks.reward(score and score["score"])


def validate(document: dict[str, Any]) -> None:
    from verifiers.v1 import WireTrace

    for branch in WireTrace.model_validate(document).branches:
        if not len(branch.token_ids) == len(branch.sampled_mask) == len(branch.logprobs):
            raise ValueError("a branch has tokens, mask and logprobs of different lengths")


FORM = Form(
    summary="a Trace of verifiers (v1)",
    export=export,
    find_problems=find_problems,
    package="verifiers",
    validate=validate,
    needs_whole_calls=True,
)
