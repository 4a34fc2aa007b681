"""The toy tokenizer and chat template of the replay model: deterministic, reversible, without a vocabulary file.

Ids 0 to 255 are bytes, the ids of `Marker` are the special tokens of the chat template, and every run of two to four
characters of `[ a-z]` has an id of its own that is computed, both ways, in base 27.

An assistant message is rendered with the same ids that it was sampled with, so the prompt of a turn starts with
exactly the prompt and the completion of the turn before. Agents reformat the arguments of tool calls when they send
them back, so arguments are rendered in one canonical form. Reasoning that an agent drops is not rendered.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from paddock.models.message_text import content_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Marker:
    """Special tokens. Plain text never encodes to them: `<|end|>` in a message becomes bytes."""

    BEGIN: Final = 256
    TOOLS: Final = 257
    SYSTEM: Final = 258
    USER: Final = 259
    ASSISTANT: Final = 260
    RESULT: Final = 261
    END: Final = 262
    THINK: Final = 263
    THOUGHT: Final = 264
    CALL: Final = 265
    ARGUMENTS: Final = 266
    CALLED: Final = 267


MARKER_TEXT: dict[int, str] = {value: f"<|{name.lower()}|>" for name, value in vars(Marker).items() if name.isupper()}

LETTERS = " abcdefghijklmnopqrstuvwxyz"
BASE = len(LETTERS)
FIRST_RUN = {2: 300, 3: 300 + BASE**2, 4: 300 + BASE**2 + BASE**3}
"""The id of the first run of each length."""
VOCABULARY = FIRST_RUN[4] + BASE**4

_PIECES = re.compile(rb"(?s)[ a-z]{2,4}|.")
_MARKERS = re.compile("(" + "|".join(map(re.escape, MARKER_TEXT.values())) + ")")
_MARKER_IDS = {text: token for token, text in MARKER_TEXT.items()}


class _Ids(dict[bytes, int]):
    """The id of each piece, computed once."""

    def __missing__(self, piece: bytes) -> int:
        value = piece[0]
        if len(piece) > 1:
            value = 0
            for letter in piece:
                value = value * BASE + LETTERS.index(chr(letter))
            value += FIRST_RUN[len(piece)]
        self[piece] = value
        return value


_IDS = _Ids()


@lru_cache(maxsize=1024)
def encode(text: str) -> tuple[int, ...]:
    """The ids of plain text; markers written out in it are only bytes."""
    # Cached: a conversation repeats its history with every request.
    return tuple(map(_IDS.__getitem__, _PIECES.findall(text.encode("utf-8", "surrogatepass"))))


def encode_with_markers(text: str) -> list[int]:
    """The ids of text in which written-out markers are markers, as an engine's `/tokenize` takes it."""
    ids: list[int] = []
    for part in _MARKERS.split(text):
        marker = _MARKER_IDS.get(part)
        if marker is None:
            ids.extend(encode(part))
        else:
            ids.append(marker)
    return ids


def token_bytes(token: int) -> bytes:
    """The bytes of one id; empty for a marker."""
    if token < 256:
        return bytes((token,))
    if token < FIRST_RUN[2]:
        return b""
    length = 2 if token < FIRST_RUN[3] else 3 if token < FIRST_RUN[4] else 4
    value = token - FIRST_RUN[length]
    letters = []
    for _ in range(length):
        value, letter = divmod(value, BASE)
        letters.append(LETTERS[letter])
    return "".join(reversed(letters)).encode()


def decode(ids: Iterable[int]) -> str:
    """The text of ids, markers written out."""
    parts = (MARKER_TEXT[token].encode() if token in MARKER_TEXT else token_bytes(token) for token in ids)
    return b"".join(parts).decode("utf-8", "surrogatepass")


def logprob(position: int, token: int, seed: int) -> float:
    """The logprob of a token at a position of the whole sequence: below 0, and full of digits."""
    mixed = (position * 0x9E3779B97F4A7C15 + token * 0xBF58476D1CE4E5B9 + seed * 0x94D049BB133111EB) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    # An odd number of 52 bits over a power of two: exact in a float, and 16 or 17 digits long when printed.
    return -(((mixed >> 12) | 1) / 2.0**50)


_MASK = 0xFFFFFFFFFFFFFFFF


# -- chat template -----------------------------------------------------------------------------------

_ROLES = {
    "system": Marker.SYSTEM,
    "developer": Marker.SYSTEM,
    "user": Marker.USER,
    "tool": Marker.RESULT,
    "function": Marker.RESULT,
}


@dataclass(frozen=True, slots=True)
class ScriptedToolCall:
    name: str
    arguments: str
    """JSON in canonical form, or whatever an agent sent instead."""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """One message of the assistant."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ScriptedToolCall, ...] = ()


def compact(value: Any) -> str:
    """JSON without spaces, keys sorted."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def canonical_arguments(arguments: Any) -> str:
    """The arguments of a tool call as a script or an agent writes them, in one form where they are JSON."""
    text = arguments if isinstance(arguments, str) else compact(arguments)
    try:
        # JavaScript writes 1.0 as 1, and so do we.
        return compact(json.loads(text, parse_float=_number))
    except ValueError:
        return text


def completion_ids(turn: AssistantTurn) -> list[int]:
    """What the model samples after the assistant marker, the end marker included."""
    ids: list[int] = []
    if turn.thinking:
        ids += (Marker.THINK, *encode(turn.thinking), Marker.THOUGHT)
    ids += encode(turn.text)
    for call in turn.calls:
        ids += (Marker.CALL, *encode(call.name), Marker.ARGUMENTS, *encode(call.arguments), Marker.CALLED)
    ids.append(Marker.END)
    return ids


def prompt_ids(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> list[int]:
    """The ids of a whole request, up to the start of the answer."""
    ids: list[int] = [Marker.BEGIN]
    if tools:
        ids += (Marker.TOOLS, *encode(compact(tools)), Marker.END)
    for message in messages:
        role = message.get("role")
        if role == "assistant":
            ids.append(Marker.ASSISTANT)
            ids += completion_ids(assistant_turn_of(message))
        else:
            ids.append(_ROLES.get(str(role), Marker.USER))
            ids += encode(content_text(message.get("content")))
            ids.append(Marker.END)
    ids.append(Marker.ASSISTANT)
    return ids


def prompt_text(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> str:
    """The prompt with its markers written out."""
    return decode(prompt_ids(messages, tools))


def assistant_turn_of(message: dict[str, Any]) -> AssistantTurn:
    """The assistant's message in a request, as a turn."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(
            ScriptedToolCall(str(function.get("name", "")), canonical_arguments(function.get("arguments", "")))
        )
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    return AssistantTurn(content_text(message.get("content")).strip(), str(thinking).strip(), tuple(calls))


def opening_texts(messages: Sequence[dict[str, Any]]) -> list[str]:
    """What the user says before the first answer. Some agents send a message about their surroundings first."""
    opening = itertools.takewhile(lambda message: message.get("role") != "assistant", messages)
    return [content_text(message.get("content")) for message in opening if message.get("role") == "user"]


def count_turns(messages: Sequence[dict[str, Any]]) -> int:
    """How many messages of the assistant follow the first message of the user."""
    first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), 0)
    return sum(message.get("role") == "assistant" for message in messages[first:])


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
