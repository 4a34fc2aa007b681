"""The chat template of the toy model: a request becomes prompt ids, an answer becomes sampled ids.

A message of the assistant is rendered with the same ids that its answer was sampled with, so the
prompt of a turn starts with exactly the prompt and the completion of the turn before. Agents write
the arguments of tool calls anew when they send them back; therefore arguments are rendered in one
canonical form. Thoughts that an agent does not send back are not rendered.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.testing.replay.tokens import Marker, decode, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROLES = {
    "system": Marker.SYSTEM,
    "developer": Marker.SYSTEM,
    "user": Marker.USER,
    "tool": Marker.RESULT,
    "function": Marker.RESULT,
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON in canonical form, or whatever an agent sent instead."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an assistant said in one turn."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()


def compact(value: Any) -> str:
    """JSON without spaces, keys sorted."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def canonical_arguments(arguments: Any) -> str:
    """The arguments of a tool call as a script or an agent writes them, in one form where they are JSON."""
    written = arguments if isinstance(arguments, str) else compact(arguments)
    try:
        # JavaScript writes 1.0 as 1, and so do we.
        return compact(json.loads(written, parse_float=_number))
    except ValueError:
        return written


def completion_ids(said: Said) -> list[int]:
    """What the model samples after the mark of the assistant, its end included."""
    ids: list[int] = []
    if said.thinking:
        ids += (Marker.THINK, *encode(said.thinking), Marker.THOUGHT)
    ids += encode(said.text)
    for call in said.calls:
        ids += (Marker.CALL, *encode(call.name), Marker.ARGUMENTS, *encode(call.arguments), Marker.CALLED)
    ids.append(Marker.END)
    return ids


def prompt_ids(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> list[int]:
    """The ids of a whole request, up to the place where the assistant speaks."""
    ids: list[int] = [Marker.BEGIN]
    if tools:
        ids += (Marker.TOOLS, *encode(compact(tools)), Marker.END)
    for message in messages:
        role = message.get("role")
        if role == "assistant":
            ids.append(Marker.ASSISTANT)
            ids += completion_ids(said_in(message))
        else:
            ids.append(_ROLES.get(str(role), Marker.USER))
            ids += encode(text_of(message.get("content")))
            ids.append(Marker.END)
    ids.append(Marker.ASSISTANT)
    return ids


def prompt_text(messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> str:
    """The prompt with its markers written out."""
    return decode(prompt_ids(messages, tools))


def said_in(message: dict[str, Any]) -> Said:
    """What the assistant said, from its message in a request."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(ToolCall(str(function.get("name", "")), canonical_arguments(function.get("arguments", ""))))
    thinking = message.get("reasoning_content") or message.get("reasoning") or ""
    return Said(text_of(message.get("content")).strip(), str(thinking).strip(), tuple(calls))


def text_of(content: Any) -> str:
    """The text of a message's content, in any of its forms."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def first_user_text(messages: Sequence[dict[str, Any]]) -> str:
    return next((text_of(message.get("content")) for message in messages if message.get("role") == "user"), "")


def turns_taken(messages: Sequence[dict[str, Any]]) -> int:
    """How many messages of the assistant follow the first message of the user."""
    first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), 0)
    return sum(message.get("role") == "assistant" for message in messages[first:])


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value
