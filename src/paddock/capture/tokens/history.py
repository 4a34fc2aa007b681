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
    tools: bytes
    parent: AnsweredCall | None = None


@dataclass(slots=True)
class Lookup:
    """What is known of a request's messages."""

    chain: list[bytes]
    """A digest of no message, then one of each longer history."""
    tools: bytes
    """A digest of the tools."""
    answered: AnsweredCall | None = None
    """The longest answered history that the messages begin with."""
    shared: int = 0
    """How many leading messages some earlier call had too."""
    is_conversation: bool = False
    """Whether more than the system prompt is shared."""
    is_branch: bool = False
    """Another call has continued the answered history already, with other messages."""
    has_other_tools: bool = False
    """A longer history was answered, with other tools."""
    has_answer: bool = False
    """Some message is an answer that was sampled, wherever it stands."""


@dataclass(slots=True)
class History:
    """The conversations of one rollout, each a chain of answered calls."""

    _answers: dict[bytes, list[AnsweredCall]] = field(default_factory=dict)
    """By the digest of the whole history."""
    _prefixes: set[bytes] = field(default_factory=set)
    """The digests of all histories that were part of a prompt."""
    _extended: set[bytes] = field(default_factory=set)
    """The digests of the answered histories that a call has continued."""
    _sampled: set[bytes] = field(default_factory=set)
    """The digests of the answers alone."""

    def find(self, messages: Sequence[Message], tools: Any) -> Lookup:
        """Find what the messages continue, and remember them."""
        chain, keys = [_digest(b"", b"")], [message_key(message) for message in messages]
        for key in keys:
            chain.append(_digest(chain[-1], key))
        lookup = Lookup(chain, _digest(b"", orjson.dumps(tools)))
        last = len(messages)
        for size in range(last, 0, -1):
            if not lookup.shared and chain[size] in self._prefixes:
                lookup.shared = size
            answers = self._answers.get(chain[size], ()) if size < last else ()
            if (answered := _choose([each for each in answers if each.tools == lookup.tools], messages)) is not None:
                lookup.answered = answered
                lookup.is_branch = chain[size] in self._extended and chain[last] not in self._prefixes
                self._extended.add(chain[size])
                break
            lookup.has_other_tools |= any(each.tools != lookup.tools for each in answers)
        lookup.is_conversation = any(message.get("role") not in SYSTEM for message in messages[: lookup.shared])
        if not lookup.shared:
            lookup.has_answer = any(_digest(b"", key) in self._sampled for key in keys)
        self._prefixes.update(chain[1:])
        return lookup

    def add(self, lookup: Lookup, call_id: str, prompt: list[int], sampled: list[int], answer: Message) -> None:
        """Remember what a call sampled."""
        key = message_key(answer)
        digest = _digest(lookup.chain[-1], key)
        reasoning = _without_whitespace(answer.get("reasoning_content")).encode()
        size, before = len(lookup.chain), lookup.answered
        answered = AnsweredCall(call_id, prompt, sampled, answer, reasoning, size, lookup.tools, before)
        self._answers.setdefault(digest, []).append(answered)
        self._prefixes.add(digest)
        self._sampled.add(_digest(b"", key))


def _choose(answers: list[AnsweredCall], messages: Sequence[Message]) -> AnsweredCall | None:
    """The latest of the calls with this history. Of several with the same text, the one whose tool calls the agent
    names."""
    matching = [each for each in answers if _has_reasoning_of(each, messages)]
    if len(matching) < 2:
        return matching[0] if matching else None
    named = _tool_call_ids(messages[matching[0].size - 1])
    return next((each for each in reversed(matching) if _tool_call_ids(each.answer) == named), matching[-1])


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
    return orjson.dumps([role, _without_whitespace(text), calls])


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


def _has_reasoning_of(answered: AnsweredCall, messages: Sequence[Message]) -> bool:
    """Whether all reasoning that the agent sent back is what was sampled. It may leave reasoning out."""
    each: AnsweredCall | None = answered
    while each is not None:
        message = messages[each.size - 1]
        sent = _without_whitespace(message.get("reasoning_content") or message.get("reasoning")).encode()
        if sent and sent != each.reasoning:
            return False
        each = each.parent
    return True


def _tool_call_ids(message: Message) -> list[Any]:
    return [call.get("id") for call in message.get("tool_calls") or ()]


def _without_whitespace(text: Any) -> str:
    return "".join(text.split()) if isinstance(text, str) else ""


def _digest(before: bytes, data: bytes) -> bytes:
    return blake2b(before + data, digest_size=DIGEST_BYTES).digest()
