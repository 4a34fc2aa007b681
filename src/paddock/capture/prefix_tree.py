"""A radix tree of token sequences: finds the call that a prompt continues, by exact ids.

Adding a call walks its prompt once, edge by edge; a common prefix of many prompts is stored once. Knows the ids and
the order of calls, and nothing of their purpose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.capture.trace import Call, Role, shared_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence


RECENT_PROMPTS = 4
"""About the number of conversations that an agent has at a time."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a prompt continues. Of several calls that match, the latest."""

    furthest: Call | None = None
    """The call whose prompt and completion share the longest prefix with this prompt."""
    shared_tokens: int = 0
    """The length of that prefix."""
    whole: Call | None = None
    """The longest call whose whole prompt and completion this prompt starts with. Of several with the same tokens,
    one that can be trained on."""
    parent: Call | None = None
    """The call with the longest prompt that this longer prompt starts with. Of several with that prompt, the one
    whose completion matches furthest."""
    parent_tokens: int = 0
    """How many leading tokens of this prompt are the parent's prompt and completion."""


@dataclass(slots=True, eq=False)
class _Edge:
    """Tokens between two nodes of the tree, and the calls that end at the lower one."""

    tokens: Sequence[int]
    children: dict[int, _Edge] = field(default_factory=dict)
    latest: Call | None = None
    """The latest call that passes here."""
    prompts: list[Call] = field(default_factory=list)
    """Calls whose prompt ends here."""
    ends: list[Call] = field(default_factory=list)
    """Calls whose completion ends here."""

    def split(self, size: int) -> _Edge:
        """Insert a node after `size` tokens. This edge becomes the upper part; the lower one is returned."""
        lower = _Edge(self.tokens[size:], self.children, self.latest, self.prompts, self.ends)
        self.tokens, self.children = self.tokens[:size], {lower.tokens[0]: lower}
        self.prompts, self.ends = [], []
        return lower


class PrefixTree:
    """The calls of one rollout. A call that became RETRIED is no longer continued."""

    def __init__(self) -> None:
        self._root = _Edge(())
        self._recent: list[tuple[Sequence[int], list[_Edge]]] = []
        """The last prompts and their paths. A conversation continues one of them, so the path is not walked again."""

    def add(self, call: Call) -> Continuation:
        """Add a call that has a prompt. Returns which of the calls before it continues."""
        prompt = call.prompt_token_ids
        path = self._follow(prompt)
        continuation = _find_continuation(path, call)
        path[-1].prompts.append(call)
        self._recent = [*self._recent[1 - RECENT_PROMPTS :], (prompt, path)]
        end = self._extend(path, call.completion_token_ids)
        end[-1].ends.append(call)
        for edge in end:
            if edge.latest is None or edge.latest.index <= call.index:
                edge.latest = call
        return continuation

    def _follow(self, prompt: Sequence[int]) -> list[_Edge]:
        """The edges of a prompt from the root, created where they are missing."""
        for recent, path in reversed(self._recent):
            size = len(recent)
            if size <= len(prompt) and prompt[size - 1] == recent[-1] and prompt[:size] == recent:
                return self._extend(path, prompt[size:])
        return self._extend([self._root], prompt)

    def _extend(self, path: list[_Edge], tokens: Sequence[int]) -> list[_Edge]:
        """Follow `tokens` from the end of `path`, adding the edges that are missing."""
        path, edge, position = list(path), path[-1], 0
        while position < len(tokens):
            following = edge.children.get(tokens[position])
            if following is None:
                following = edge.children[tokens[position]] = _Edge(tokens[position:])
            else:
                piece = tokens[position : position + len(following.tokens)]
                if piece != following.tokens:
                    self._split(following, shared_prefix(following.tokens, piece))
            edge = following
            path.append(edge)
            position += len(edge.tokens)
        return path

    def _split(self, edge: _Edge, size: int) -> None:
        lower = edge.split(size)
        for _, path in self._recent:
            if edge in path:
                path.insert(path.index(edge) + 1, lower)


def _find_continuation(path: list[_Edge], call: Call) -> Continuation:
    """What earlier calls have in common with the prompt of `path`."""
    size = depth = len(call.prompt_token_ids)
    furthest = whole = parent = None
    shared = parent_tokens = 0
    for edge in reversed(path):
        if depth and furthest is None and edge.latest is not None:
            furthest = _latest_at(edge, call)
            shared = depth if furthest is not None else 0
        if whole is None and edge.ends:
            whole = _latest([each for each in edge.ends if each.trainable], call) or _latest(edge.ends, call)
        if parent is None and edge.prompts and depth < size:
            parent, parent_tokens = _find_parent(edge.prompts, call)
        if furthest is not None and whole is not None and parent is not None:
            break
        depth -= len(edge.tokens)
    return Continuation(furthest, shared, whole, parent, parent_tokens)


def _find_parent(candidates: Sequence[Call], call: Call) -> tuple[Call | None, int]:
    """Of calls with the same prompt, the one whose completion matches furthest, and the latest of those."""
    best, longest = None, 0
    for each in sorted((each for each in candidates if _usable(each, call)), key=_order):
        size, sampled = len(each.prompt_token_ids), each.completion_token_ids
        shared = size + shared_prefix(sampled, call.prompt_token_ids[size : size + len(sampled)])
        if shared >= longest:
            best, longest = each, shared
    return best, longest


def _usable(earlier: Call, call: Call) -> bool:
    return earlier.index < call.index and earlier.role is not Role.RETRIED


def _latest(candidates: Sequence[Call], call: Call) -> Call | None:
    usable = [each for each in candidates if _usable(each, call)]
    return max(usable, key=_order) if usable else None


def _latest_at(edge: _Edge, call: Call) -> Call | None:
    """The latest call at or below this edge that can be continued."""
    if edge.latest is None or _usable(edge.latest, call):
        return edge.latest
    latest = None
    pending = [edge]
    while pending:
        current = pending.pop()
        candidate = _latest(current.ends, call)
        if candidate is not None and (latest is None or candidate.index > latest.index):
            latest = candidate
        pending += current.children.values()
    return latest


def _order(call: Call) -> int:
    return call.index
