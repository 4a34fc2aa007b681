"""A tree of token sequences that finds what a prompt goes on from, by exact ids.

Adding a call walks its prompt once, edge by edge; what many prompts have in common is kept once. Knows
calls by their ids and order, and nothing of what they were for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.rollouts.trace import Call, Role, shared_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence


RECENT = 4
"""About as many conversations as an agent has going at a time."""


@dataclass(frozen=True, slots=True)
class Continued:
    """What a prompt goes on from. Of several calls that fit, the latest."""

    furthest: Call | None = None
    """The call whose prompt and completion this prompt shares the longest beginning with."""
    shared_tokens: int = 0
    """How long that beginning is."""
    whole: Call | None = None
    """The call whose whole prompt and completion this prompt begins with; the longest such. Of several with the same
    tokens, one that can be trained on."""
    answered: Call | None = None
    """The call whose whole prompt this longer prompt begins with, whatever became of its completion: the one with the
    longest prompt, and of several with that prompt the one whose completion comes back furthest."""
    answered_tokens: int = 0
    """How many leading tokens of this prompt are that call's prompt and completion."""


@dataclass(slots=True, eq=False)
class _Edge:
    """Tokens that lead from one point of the tree to the next, and the calls that end there."""

    tokens: Sequence[int]
    below: dict[int, _Edge] = field(default_factory=dict)
    latest: Call | None = None
    """The latest call that passes here."""
    prompts: list[Call] = field(default_factory=list)
    """Calls whose prompt ends here."""
    ends: list[Call] = field(default_factory=list)
    """Calls whose completion ends here."""

    def split(self, size: int) -> _Edge:
        """Make a point after `size` tokens. This edge becomes the upper part; the lower one is returned."""
        lower = _Edge(self.tokens[size:], self.below, self.latest, self.prompts, self.ends)
        self.tokens, self.below = self.tokens[:size], {lower.tokens[0]: lower}
        self.prompts, self.ends = [], []
        return lower


class Prefixes:
    """The calls of one rollout. A call that became RETRIED is no longer gone on from."""

    def __init__(self) -> None:
        self._root = _Edge(())
        self._recent: list[tuple[Sequence[int], list[_Edge]]] = []
        """Prompts and where they lead. A conversation goes on from one of them: nothing before has to be walked."""

    def add(self, call: Call) -> Continued:
        """Add a call that has a prompt, and tell what it goes on from among those added before."""
        prompt = call.prompt_token_ids
        path = self._follow(prompt)
        found = _continued(path, call)
        path[-1].prompts.append(call)
        self._recent = [*self._recent[1 - RECENT :], (prompt, path)]
        end = self._extend(path, call.completion_token_ids)
        end[-1].ends.append(call)
        for edge in end:
            if edge.latest is None or edge.latest.index <= call.index:
                edge.latest = call
        return found

    def _follow(self, prompt: Sequence[int]) -> list[_Edge]:
        """The edges of a prompt from the root on, made where they were missing."""
        for known, path in reversed(self._recent):
            size = len(known)
            if size <= len(prompt) and prompt[size - 1] == known[-1] and prompt[:size] == known:
                return self._extend(path, prompt[size:])
        return self._extend([self._root], prompt)

    def _extend(self, path: list[_Edge], tokens: Sequence[int]) -> list[_Edge]:
        """Follow `tokens` from the end of `path`, adding the edges that are missing."""
        path, edge, position = list(path), path[-1], 0
        while position < len(tokens):
            following = edge.below.get(tokens[position])
            if following is None:
                following = edge.below[tokens[position]] = _Edge(tokens[position:])
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


def _continued(path: list[_Edge], call: Call) -> Continued:
    """What the calls that were added before have in common with the prompt that `path` spells."""
    size = depth = len(call.prompt_token_ids)
    furthest = whole = answered = None
    shared = answered_tokens = 0
    for edge in reversed(path):
        if depth and furthest is None and edge.latest is not None:
            furthest = _latest_below(edge, call)
            shared = depth if furthest is not None else 0
        if whole is None and edge.ends:
            whole = _latest([each for each in edge.ends if each.trainable], call) or _latest(edge.ends, call)
        if answered is None and edge.prompts and depth < size:
            answered, answered_tokens = _answered(edge.prompts, call)
        if furthest is not None and whole is not None and answered is not None:
            break
        depth -= len(edge.tokens)
    return Continued(furthest, shared, whole, answered, answered_tokens)


def _answered(candidates: Sequence[Call], call: Call) -> tuple[Call | None, int]:
    """Of calls with the same prompt, the one whose completion comes back furthest, and the latest of those."""
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


def _latest_below(edge: _Edge, call: Call) -> Call | None:
    """The latest call that passes here and can be gone on from."""
    if edge.latest is None or _usable(edge.latest, call):
        return edge.latest
    found = None
    waiting = [edge]
    while waiting:
        current = waiting.pop()
        best = _latest(current.ends, call)
        if best is not None and (found is None or best.index > found.index):
            found = best
        waiting += current.below.values()
    return found


def _order(call: Call) -> int:
    return call.index
