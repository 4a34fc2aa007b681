"""Trees: a rollout and its forks in one document, with each shared token once.

A node is a run of tokens: tokens that the agent sent, or the completion of one call. Calls that were replayed are the
same node in all rollouts. Tokens that were sent are shared as far as they are equal. `value` is the mean reward of
the rollouts through a node. `advantage` is that value less the value at the branch point: at the nearest node above
that more rollouts go through.

    advantage(node) = value(node) - value(branch point of node)

Above the first branch point, all rollouts of the tree are compared with themselves, so it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from paddock.capture.trace import sent_temperature, shared_prefix
from paddock.export import checks
from paddock.export.samples import group_id_of
from paddock.rollouts.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord


def identity_of(record: RolloutRecord, call: Call) -> str:
    """Which sample a call is: the same for a recorded call and all that replay it."""
    return call.replayed_from or f"{record.rollout_id}/{call.id}"


@dataclass(slots=True)
class TreeNode:
    """A run of tokens that always come together."""

    tokens: list[int]
    parent: TreeNode | None = None
    call: Call | None = None
    """The call that sampled them; None for tokens that were sent."""
    sample: str | None = None
    """Which sample it is: see `identity_of`."""
    is_trained: bool = False
    rollouts: dict[str, None] = field(default_factory=dict)
    """The ids of the rollouts that have it, in their order."""
    inputs: dict[int, TreeNode] = field(default_factory=dict)
    """Children that were sent, by their first tokens."""
    samples: dict[str, TreeNode] = field(default_factory=dict)
    """Children that were sampled."""

    def children(self) -> Iterator[TreeNode]:
        yield from self.inputs.values()
        yield from self.samples.values()

    def add_input(self, tokens: list[int], rollout_id: str) -> TreeNode:
        """Tokens that were sent after this node; returns the node in which they end."""
        node = self
        while tokens:
            child = node.inputs.get(tokens[0])
            if child is None:
                child = node.inputs[tokens[0]] = TreeNode(tokens, node)
            shared = shared_prefix(child.tokens, tokens)
            if shared < len(child.tokens):
                child = child.split(shared)
            child.rollouts[rollout_id] = None
            node, tokens = child, tokens[shared:]
        return node

    def add_sample(self, sample: str, call: Call, rollout_id: str, *, is_trained: bool) -> TreeNode:
        """The completion of a call after this node."""
        child = self.samples.get(sample)
        if child is None:
            child = self.samples[sample] = TreeNode(list(call.completion_token_ids), self, call, sample)
        child.is_trained |= is_trained
        child.rollouts[rollout_id] = None
        return child

    def split(self, size: int) -> TreeNode:
        """Make the first `size` tokens a node of their own, above this one; returns that node."""
        assert self.parent is not None
        upper = TreeNode(self.tokens[:size], self.parent, rollouts=dict(self.rollouts))
        self.parent.inputs[upper.tokens[0]] = upper
        self.tokens, self.parent = self.tokens[size:], upper
        upper.inputs[self.tokens[0]] = self
        return upper


def export_tree(
    rollouts: Sequence[tuple[RolloutRecord, Sequence[Call]]], policy: Policy, tree_id: str
) -> Iterator[dict[str, Any]]:
    """The document of one tree; none if nothing of it may be trained on."""
    accepted = [(record, calls) for record, calls in rollouts if policy.rejects(record) is None]
    root = TreeNode([])
    for record, calls in accepted:
        root.rollouts[record.rollout_id] = None
        _add_rollout(root, record, calls, policy)
    nodes = list(_below(root))
    if not any(node.is_trained for node in nodes):
        return
    rewards = {record.rollout_id: record.reward for record, _ in accepted}
    numbers = {id(node): number for number, node in enumerate(nodes)}
    yield {
        "tree_id": tree_id,
        "task_id": accepted[0][0].task_id,
        "group_id": group_id_of(accepted[0][0]),
        "rollouts": [_describe_rollout(record) for record, _ in accepted],
        "nodes": [_describe_node(node, numbers, rewards) for node in nodes],
    }


def _add_rollout(root: TreeNode, record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> None:
    for call in calls:
        # In a tree the call that is replayed and the recorded one are the same.
        call.is_copy = False
    trained = {call.id for call, reason in zip(calls, policy.rejections(calls), strict=True) if reason is None}
    for path in Graph.of(calls).branches():
        while path and path[-1].id not in trained:
            path = path[:-1]
        node, before = root, 0
        for call in path:
            node = node.add_input(list(call.prompt_token_ids[before:]), record.rollout_id)
            if call.completion_token_ids:
                sample = identity_of(record, call)
                node = node.add_sample(sample, call, record.rollout_id, is_trained=call.id in trained)
            before = len(call.prompt_token_ids) + len(call.completion_token_ids)


def _below(root: TreeNode) -> Iterator[TreeNode]:
    """All nodes below the root, each after its parent."""
    pending = [*root.children()][::-1]
    while pending:
        node = pending.pop()
        yield node
        pending += [*node.children()][::-1]


def _describe_rollout(record: RolloutRecord) -> dict[str, Any]:
    return {
        "rollout_id": record.rollout_id,
        "parent": record.fork.get("source"),
        "at": record.fork.get("at"),
        "outcome": str(record.outcome),
        "reward": record.reward,
        "reward_parts": dict(record.reward_parts),
    }


def _describe_node(node: TreeNode, numbers: dict[int, int], rewards: dict[str, float | None]) -> dict[str, Any]:
    call, size = node.call, len(node.tokens)
    value, baseline = value_of(node.rollouts, rewards), value_of(_branch_point(node).rollouts, rewards)
    described: dict[str, Any] = {
        "id": numbers[id(node)],
        "parent": numbers.get(id(node.parent)),
        "rollout_ids": list(node.rollouts),
        "tokens": node.tokens,
        "mask": [int(node.is_trained)] * size,
        "logprobs": list(call.logprobs) if call is not None and node.is_trained else [0.0] * size,
        "value": value,
        "advantage": None if value is None or baseline is None else value - baseline,
    }
    if call is not None:
        described |= {
            "call": node.sample,
            "role": call.role,
            "finish_reason": call.finish_reason,
            "weight_version": call.weight_version,
            "temperature": sent_temperature(call),
            "logprobs_kind": call.logprobs_kind,
        }
    return described


def value_of(rollout_ids: dict[str, None], rewards: dict[str, float | None]) -> float | None:
    """The mean reward of rollouts; None if no reward is known."""
    scored = [reward for rollout_id in rollout_ids if (reward := rewards[rollout_id]) is not None]
    return fmean(scored) if scored else None


def _branch_point(node: TreeNode) -> TreeNode:
    """The nearest node above that more rollouts have. The root if there is none."""
    above = node
    while above.parent is not None and above.rollouts.keys() == node.rollouts.keys():
        above = above.parent
    return above


def find_tree_problems(document: dict[str, Any]) -> Iterator[str]:
    """What is wrong with a tree, by our own rules."""
    for number, node in enumerate(document["nodes"]):
        if node["id"] != number or (node["parent"] is not None and node["parent"] >= number):
            yield f"node {number} does not follow its parent"
        yield from checks.token_ids(node["tokens"], f"tokens of node {number}")
        yield from checks.equal_lengths(node, "tokens", "mask", "logprobs")
        yield from checks.logprobs(node["logprobs"], f"logprobs of node {number}")
        yield from checks.masked_logprobs(node["logprobs"], node["mask"], f"logprobs of node {number}")
    yield from checks.mask([value for node in document["nodes"] for value in node["mask"]], "mask")
    for rollout in document["rollouts"]:
        yield from checks.reward(rollout["reward"])
