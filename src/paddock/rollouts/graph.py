"""The calls of a rollout as a graph: which call continues which, the label of each, and token drift.

Calls are linked by exact token ids and by nothing else. A call continues another one *exactly* if its prompt begins
with the other's whole prompt and completion; only such calls may be in one training sequence. Most agents send the
conversation as text, and the chat template renders it again. Then often the prompt is the same and the completion has
other tokens: `Drift` measures the difference.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from paddock.capture.prefix_tree import Continuation, PrefixTree
from paddock.capture.trace import Call, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Label(StrEnum):
    """What a call is in the graph."""

    MAIN = "main"
    """The agent's conversation."""
    BRANCH = "branch"
    """Continues a call that another call has continued already."""
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    """Writes the summary that later replaces the conversation."""
    TITLE = "title"
    RETRIED = "retried"
    """Was requested again; its answer was dropped."""
    EDITED = "edited"
    """The conversation with another history: summarized, cut, or changed in the middle."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How a completion differs from the same text in the prompt that continues it."""

    sampled: int
    """Tokens that the model sampled."""
    returned: int
    """The number of tokens that the same answer has in the next prompt, up to its end token. If that token is not in
    the prompt, the number of tokens that are equal."""
    first_difference: int | None
    """Where in the completion the two differ first; None if all of it came back."""


@dataclass(slots=True)
class CallNode:
    """A call and its links."""

    call: Call
    parent: str | None = None
    """The call that this one continues: this prompt begins with its whole prompt and is longer. Its completion
    may differ. The same as `Call.parent`."""
    shared_tokens: int = 0
    """How many leading tokens of this prompt are the parent's prompt and completion."""
    continues: str | None = None
    """The call that this one continues exactly."""
    children: list[str] = field(default_factory=list)
    """Calls whose `parent` this is."""
    label: Label = Label.MAIN
    drift: Drift | None = None
    """None if no call continues this one."""


class Graph:
    """Made with `Graph.of`; not changed afterwards."""

    def __init__(self, nodes: dict[str, CallNode]) -> None:
        self.nodes = nodes
        """By call id, in the order the calls began."""

    @classmethod
    def of(cls, calls: Iterable[Call]) -> Graph:
        """Link and label the calls of one rollout. Calls without prompt ids have no links."""
        builder = _Builder()
        for call in sorted(calls, key=lambda call: call.index):
            builder.add(call)
        return cls(builder.nodes)

    def branches(self) -> list[list[Call]]:
        """Every path of calls that continue each other exactly, from its first call to its last.

        In the order in which the paths end. Calls without prompt ids are on no path."""
        inner = {node.continues for node in self.nodes.values()}
        leaves = [node for name, node in self.nodes.items() if name not in inner and node.call.prompt_token_ids]
        return [self.path(leaf.call.id) for leaf in leaves]

    def path(self, call_id: str) -> list[Call]:
        """The calls that a call continues exactly, from the first of them down to itself."""
        path = []
        current: str | None = call_id
        while current is not None:
            node = self.nodes[current]
            path.append(node.call)
            current = node.continues
        return path[::-1]


class _Builder:
    def __init__(self) -> None:
        self.nodes: dict[str, CallNode] = {}
        self._prefixes = PrefixTree()
        self._answered: set[str] = set()
        """Calls that another one continues."""
        self._tip: CallNode | None = None
        """The latest call of the agent's own conversation."""

    def add(self, call: Call) -> None:
        node = self.nodes[call.id] = CallNode(call)
        if not call.prompt_token_ids:
            node.label = label_of(call.role)
            return
        continuation = self._prefixes.add(call)
        self._link(node, continuation)
        node.label = self._label(node, continuation.shared_tokens)
        if call.role is not Role.RETRIED and node.parent is not None:
            answered = self.nodes[node.parent]
            answered.drift = answered.drift or drift(answered.call, call.prompt_token_ids)
            self._answered.add(node.parent)
        if call.role is Role.AGENT:
            self._tip = node

    def _link(self, node: CallNode, continuation: Continuation) -> None:
        node.shared_tokens = continuation.parent_tokens
        node.continues = None if continuation.whole is None else continuation.whole.id
        if continuation.parent is not None:
            node.parent = continuation.parent.id
            self.nodes[continuation.parent.id].children.append(node.call.id)

    def _label(self, node: CallNode, prefix: int) -> Label:
        """`prefix` is how much of the prompt any earlier call began with, whether or not this one continues it."""
        call = node.call
        if call.role is not Role.AGENT:
            return label_of(call.role)
        if self._tip is None:
            return Label.MAIN
        before = self.nodes.get(node.parent or "")
        if before is None:
            # The same prompt once more, or a beginning that only a part of an earlier prompt has.
            is_repeat = prefix == len(call.prompt_token_ids)
            return Label.BRANCH if is_repeat else Label.EDITED
        if before.call.id not in self._answered:
            return before.label if before.label in _INHERITED else Label.MAIN
        return Label.EDITED if _contains_answer(self._tip.call, call, prefix) else Label.BRANCH


_ROLES = {
    Role.SUBAGENT: Label.SUBAGENT,
    Role.COMPACTION: Label.COMPACTION,
    Role.TITLE: Label.TITLE,
    Role.RETRIED: Label.RETRIED,
}
_INHERITED = (Label.MAIN, Label.BRANCH)


def label_of(role: Role) -> Label:
    """The label of a call by its role alone."""
    return _ROLES.get(role, Label.MAIN)


def drift(call: Call, following: Sequence[int]) -> Drift:
    """The drift of `call` in a prompt that begins with its whole prompt."""
    sampled = call.completion_token_ids
    start = len(call.prompt_token_ids)
    repeated = following[start : start + len(sampled)]
    if repeated == sampled:
        return Drift(len(sampled), len(sampled), None)
    agreeing = next(
        (at for at, (one, other) in enumerate(zip(sampled, repeated, strict=False)) if one != other), len(repeated)
    )
    returned = agreeing
    if sampled:
        with suppress(ValueError):
            returned = following.index(sampled[-1], start + agreeing) + 1 - start
    return Drift(len(sampled), returned, agreeing)


def _contains_answer(tip: Call, call: Call, shared: int) -> bool:
    """Whether the latest answer of the conversation is in this prompt, after what changed. Then the history was
    edited; otherwise the agent went back to an earlier point."""
    answer = tip.completion_token_ids[:-1]
    return bool(answer) and _packed(answer) in _packed(call.prompt_token_ids[shared:])


def _packed(ids: Sequence[int]) -> bytes:
    return array("Q", ids).tobytes()
