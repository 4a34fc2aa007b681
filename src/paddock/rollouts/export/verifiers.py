"""A `Trace` of verifiers (v1, schema version 1), as prime-rl reads it: one for each rollout.

Its nodes are what calls were given and what they sampled, linked where a call goes on wholly from another. So
its branches are ours, and the tokens along a branch are exactly those that the engine saw. Messages that came
between two calls stand in one node, under the last of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.export import checks, conversation
from paddock.rollouts.graph import Graph
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.trace import sent_temperature

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.export.policy import Policy
    from paddock.rollouts.graph import Node
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

WHOLE = True
PACKAGE = "verifiers"
FINISH = ("stop", "length", "tool_calls")


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    if policy.refuses(record) is not None:
        return
    refused = dict(zip((call.id for call in calls), policy.refusals(calls), strict=True))
    building = _Nodes(Graph.of(calls), refused)
    for call in calls:
        if call.prompt_token_ids and call.completion_token_ids:
            building.add(call)
    if not any(any(node["mask"]) for node in building.nodes):
        return
    rewards = {"reward": None if record.reward is None else {"score": record.reward, "weight": 1.0}}
    yield {
        "version": 1,
        "id": record.rollout_id,
        "task": {"type": "PaddockTask", "data": {"id": record.task_id, "prompt": record.instruction or None}},
        "agent": {"config": {"model": record.model or None}, "name": record.agent},
        "nodes": building.nodes,
        "calls": building.calls,
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


class _Nodes:
    def __init__(self, graph: Graph, refused: dict[str, str | None]) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self._graph = graph
        self._refused = refused
        self._ends: dict[str, int] = {}
        """The node that each call's answer is."""

    def add(self, call: Call) -> None:
        known = self._graph.nodes[call.id]
        parent = None if known.continues is None else self._ends.get(known.continues)
        given, message = self._given(known, parent)
        if given:
            parent = self._append(parent, message, given, call.started)
        sampled, trained = list(call.completion_token_ids), self._refused[call.id] is None
        node = self._append(parent, answer(call), sampled, call.ended or call.started, sampled=True)
        if trained:
            self.nodes[node] |= {"mask": [True] * len(sampled), "logprobs": list(call.logprobs)}
        self._ends[call.id] = node
        self.calls.append(model_call(call, node))

    def _given(self, known: Node, parent: int | None) -> tuple[list[int], dict[str, Any]]:
        """The tokens that a call was given beyond what it goes on from, and the last message in them."""
        call = known.call
        told = conversation.messages(call)
        last = plain(told[-1]) if told else {"role": "user", "content": ""}
        if parent is None or known.continues is None:
            return list(call.prompt_token_ids), last
        before = self._graph.nodes[known.continues].call
        return list(call.prompt_token_ids[len(before.prompt_token_ids) + len(before.completion_token_ids) :]), last

    def _append(
        self, parent: int | None, message: dict[str, Any], ids: list[int], at: float, *, sampled: bool = False
    ) -> int:
        node = {"parent": parent, "message": message, "sampled": sampled, "timestamp": at, "token_ids": ids}
        self.nodes.append({**node, "mask": [False] * len(ids), "logprobs": []})
        return len(self.nodes) - 1


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """An input message in the few roles that verifiers knows."""
    role, said = message.get("role"), conversation.text(message)
    if role == "tool":
        return {"role": "tool", "tool_call_id": str(message.get("tool_call_id") or ""), "content": said}
    return {"role": "system" if role in ("system", "developer") else "user", "content": said}


def answer(call: Call) -> dict[str, Any]:
    said = call.message.get("content")
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
        "content": said if isinstance(said, str) else None,
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


def complaints(document: dict[str, Any]) -> Iterator[str]:
    for number, node in enumerate(document["nodes"]):
        yield from checks.equal_lengths(node, "token_ids", "mask")
        if node["parent"] is not None and not 0 <= node["parent"] < number:
            yield f"node {number} has a parent that does not come before it"
        if len(node["logprobs"]) != sum(node["mask"]):
            yield f"node {number} has not one logprob for each trained token"
        yield from checks.logprobs(node["logprobs"], f"logprobs of node {number}")
    score = document["rewards"]["reward"]
    yield from checks.reward(score and score["score"])


def accept(document: dict[str, Any]) -> None:
    from verifiers.v1 import WireTrace

    for branch in WireTrace.model_validate(document).branches:
        if not len(branch.token_ids) == len(branch.sampled_mask) == len(branch.logprobs):
            raise ValueError("a branch has tokens, mask and logprobs of different lengths")
