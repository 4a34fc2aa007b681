"""The calls of a rollout as a graph: what goes on from what, what each call is in it, and what drifted.

Calls are linked by exact token ids and by nothing else. A call goes on *wholly* from another if its prompt
begins with the other's whole prompt and completion; only such calls may stand in one training sequence. Most
agents send the conversation as text, and the chat template renders it anew, so often the prompt alone comes back as
it was and the answer in other tokens: `Drift` tells how far.
"""

from __future__ import annotations

from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from paddock.rollouts.prefixes import Continued, Prefixes
from paddock.rollouts.trace import Call, Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Label(StrEnum):
    """What a call is in the graph."""

    MAIN = "main"
    """The agent's conversation, from its beginning or going on."""
    BRANCH = "branch"
    """Goes on from a point that another call went on from already."""
    SUBAGENT = "subagent"
    COMPACTION = "compaction"
    """Writes the summary that later takes the place of the conversation."""
    TITLE = "title"
    RETRIED = "retried"
    """Asked again; the answer was dropped."""
    EDITED = "edited"
    """The conversation with another history: summed up, cut, or changed in the middle."""


@dataclass(frozen=True, slots=True)
class Drift:
    """What came back of a completion in the prompt that goes on from it."""

    sampled: int
    """Tokens that the model sampled."""
    returned: int
    """Tokens that stand for them in the next prompt, up to the one that ended the answer; where that one does
    not come back, those that are the same."""
    first_difference: int | None
    """Where in the completion the two differ first; None if all of it came back."""


@dataclass(slots=True)
class Node:
    """A call and its place."""

    call: Call
    parent: str | None = None
    """The call that this one continues: this prompt begins with its whole prompt and goes on behind it, whatever
    became of its completion. The same as `Call.parent`."""
    shared_tokens: int = 0
    """How many leading tokens of this prompt are the parent's prompt and completion."""
    continues: str | None = None
    """The call that this one goes on from wholly."""
    children: list[str] = field(default_factory=list)
    """Calls whose `parent` this is."""
    label: Label = Label.MAIN
    drift: Drift | None = None
    """None if no call goes on from this one."""


class Graph:
    """Made with `Graph.of`; not changed afterwards."""

    def __init__(self, nodes: dict[str, Node]) -> None:
        self.nodes = nodes
        """By call id, in the order the calls began."""

    @classmethod
    def of(cls, calls: Iterable[Call]) -> Graph:
        """Link and label the calls of one rollout. Calls without prompt ids stand alone."""
        building = _Building()
        for call in sorted(calls, key=lambda call: call.index):
            building.add(call)
        return cls(building.nodes)

    def branches(self) -> list[list[Call]]:
        """Every path from a call that goes on wholly from none to a call that none goes on wholly from.

        In the order in which the paths end. Calls without prompt ids are on no path."""
        inner = {node.continues for node in self.nodes.values()}
        leaves = [node for name, node in self.nodes.items() if name not in inner and node.call.prompt_token_ids]
        return [self.path(leaf.call.id) for leaf in leaves]

    def path(self, call_id: str) -> list[Call]:
        """The calls that one goes on from wholly, from the first of them down to itself."""
        found = []
        current: str | None = call_id
        while current is not None:
            node = self.nodes[current]
            found.append(node.call)
            current = node.continues
        return found[::-1]


class _Building:
    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._prefixes = Prefixes()
        self._answered: set[str] = set()
        """Calls that another went on from."""
        self._tip: Node | None = None
        """The latest call of the agent's own conversation."""

    def add(self, call: Call) -> None:
        node = self.nodes[call.id] = Node(call)
        if not call.prompt_token_ids:
            node.label = label_of(call.role)
            return
        found = self._prefixes.add(call)
        self._link(node, found)
        node.label = self._label(node, found.shared_tokens)
        if call.role is not Role.RETRIED and node.parent is not None:
            answered = self.nodes[node.parent]
            answered.drift = answered.drift or drift(answered.call, call.prompt_token_ids)
            self._answered.add(node.parent)
        if call.role is Role.AGENT:
            self._tip = node

    def _link(self, node: Node, found: Continued) -> None:
        node.shared_tokens = found.answered_tokens
        node.continues = None if found.whole is None else found.whole.id
        if found.answered is not None:
            node.parent = found.answered.id
            self.nodes[found.answered.id].children.append(node.call.id)

    def _label(self, node: Node, prefix: int) -> Label:
        """`prefix` is how much of the prompt any earlier call began with, whether or not this one continues it."""
        call = node.call
        if call.role is not Role.AGENT:
            return label_of(call.role)
        if self._tip is None:
            return Label.MAIN
        before = self.nodes.get(node.parent or "")
        if before is None:
            # The same prompt once more, or a beginning that only a part of an earlier prompt has.
            again = prefix == len(call.prompt_token_ids)
            return Label.BRANCH if again else Label.EDITED
        if before.call.id not in self._answered:
            return before.label if before.label in _INHERITED else Label.MAIN
        return Label.EDITED if _comes_back(self._tip.call, call, prefix) else Label.BRANCH


_ROLES = {
    Role.SUBAGENT: Label.SUBAGENT,
    Role.COMPACTION: Label.COMPACTION,
    Role.TITLE: Label.TITLE,
    Role.RETRIED: Label.RETRIED,
}
_INHERITED = (Label.MAIN, Label.BRANCH)


def label_of(role: Role) -> Label:
    """What a call is if nothing but its role is known."""
    return _ROLES.get(role, Label.MAIN)


def drift(call: Call, following: Sequence[int]) -> Drift:
    """What came back of `call` in a prompt that begins with its whole prompt."""
    sampled = call.completion_token_ids
    start = len(call.prompt_token_ids)
    came = following[start : start + len(sampled)]
    if came == sampled:
        return Drift(len(sampled), len(sampled), None)
    same = next((at for at, (one, other) in enumerate(zip(sampled, came, strict=False)) if one != other), len(came))
    returned = same
    if sampled:
        with suppress(ValueError):
            returned = following.index(sampled[-1], start + same) + 1 - start
    return Drift(len(sampled), returned, same)


def _comes_back(tip: Call, call: Call, shared: int) -> bool:
    """Is the latest answer of the conversation in this prompt, behind what changed? Then the history was edited,
    and else the agent went back to an earlier point."""
    answer = tip.completion_token_ids[:-1]
    return bool(answer) and _packed(answer) in _packed(call.prompt_token_ids[shared:])


def _packed(ids: Sequence[int]) -> bytes:
    return array("Q", ids).tobytes()
