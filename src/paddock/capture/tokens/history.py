"""Which earlier call a request continues: its messages are compared with those that produced the ids.

Messages are compared as a chain of digests, so that the longest known history is found without comparing texts. What
agents spell in another way when they send an answer back does not count: whitespace of the answer, ids of tool calls,
the JSON spelling of arguments, and reasoning that is left out. Knows no tokenizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.tokens.rendering import plain_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    Message = dict[str, Any]

DIGEST_BYTES = 16
SYSTEM = ("system", "developer")


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One answered call: the ids of its prompt and its answer, and the history that they stand for."""

    call_id: str
    prompt: list[int]
    sampled: list[int]
    answer: Message
    """As the agent got it."""
    reasoning: bytes
    size: int
    """The number of messages, the answer included."""
    parent: AnsweredCall | None = None


@dataclass(slots=True)
class Lookup:
    """What is known of a request's messages."""

    chain: list[bytes]
    """A digest of the tools, then one of each longer history."""
    answered: AnsweredCall | None = None
    """The longest answered history that the messages begin with."""
    shared: int = 0
    """How many leading messages some earlier call had too."""
    is_conversation: bool = False
    """Whether more than the system prompt is shared."""
    is_branch: bool = False
    """Another call has continued the turn, or the turn's history, already."""


@dataclass(slots=True)
class History:
    """The conversations of one rollout, each a chain of turns."""

    _turns: dict[bytes, list[AnsweredCall]] = field(default_factory=dict)
    """By the digest of the whole history."""
    _prefixes: set[bytes] = field(default_factory=set)
    """The digests of all histories that were part of a prompt."""
    _extended: set[bytes] = field(default_factory=set)
    """The digests of the turns that a call has continued."""

    def find(self, messages: Sequence[Message], tools: Any) -> Lookup:
        """Find what the messages continue, and remember them."""
        chain = [_digest(b"", orjson.dumps(tools))]
        for message in messages:
            chain.append(_digest(chain[-1], message_key(message)))
        lookup = Lookup(chain)
        last = len(messages)
        for size in range(last, 0, -1):
            if not lookup.shared and chain[size] in self._prefixes:
                lookup.shared = size
            if size < last and (answered := self._matching(chain[size], messages)) is not None:
                lookup.answered = answered
                lookup.is_branch = chain[size] in self._extended and chain[last] not in self._prefixes
                self._extended.add(chain[size])
                break
        lookup.is_conversation = any(message.get("role") not in SYSTEM for message in messages[: lookup.shared])
        self._prefixes.update(chain[1:])
        return lookup

    def add(self, lookup: Lookup, call_id: str, prompt: list[int], sampled: list[int], answer: Message) -> None:
        """Remember what a call sampled."""
        digest = _digest(lookup.chain[-1], message_key(answer))
        reasoning = _squeeze(answer.get("reasoning_content")).encode()
        turn = AnsweredCall(call_id, prompt, sampled, answer, reasoning, len(lookup.chain), lookup.answered)
        self._turns.setdefault(digest, []).append(turn)
        self._prefixes.add(digest)

    def _matching(self, digest: bytes, messages: Sequence[Message]) -> AnsweredCall | None:
        """The latest turn with this history. Of several with the same text, the one whose tool calls the agent
        names."""
        turns = [turn for turn in self._turns.get(digest, ()) if _has_reasoning_of(turn, messages)]
        if len(turns) < 2:
            return turns[0] if turns else None
        named = _tool_call_ids(messages[turns[0].size - 1])
        return next((turn for turn in reversed(turns) if _tool_call_ids(turn.answer) == named), turns[-1])


def message_key(message: Message) -> bytes:
    """Equal for messages that stand for the same ids."""
    role = str(message.get("role"))
    text = plain_text(message.get("content"))
    if role != "assistant":
        return orjson.dumps(["system" if role in SYSTEM else role, text])
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append([function.get("name"), _canonical_arguments(function.get("arguments"))])
    return orjson.dumps([role, _squeeze(text), calls])


def _canonical_arguments(arguments: Any) -> str:
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            return str(arguments)
    value = _canonical_numbers({} if arguments is None else arguments)
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:
        return repr(value)


def _canonical_numbers(value: Any) -> Any:
    """JavaScript has one kind of number: 1.0 comes back as 1."""
    if isinstance(value, dict):
        return {name: _canonical_numbers(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_canonical_numbers(each) for each in value]
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


def _has_reasoning_of(turn: AnsweredCall, messages: Sequence[Message]) -> bool:
    """Whether all reasoning that the agent sent back is what was sampled. It may leave reasoning out."""
    each: AnsweredCall | None = turn
    while each is not None:
        message = messages[each.size - 1]
        sent = _squeeze(message.get("reasoning_content") or message.get("reasoning")).encode()
        if sent and sent != each.reasoning:
            return False
        each = each.parent
    return True


def _tool_call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _squeeze(text: Any) -> str:
    return "".join(text.split()) if isinstance(text, str) else ""


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=DIGEST_BYTES).digest()
