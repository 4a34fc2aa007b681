"""The conversation of a call as chat messages, and what it adds to the one before. Knows no form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture.dialects import chat_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.rollouts.trace import Call


def asked(call: Call) -> dict[str, Any]:
    """`messages` and `tools` in chat form; empty if what was recorded cannot be read."""
    try:
        return chat_request(call)
    except ValueError:
        return {}


def messages(call: Call) -> list[dict[str, Any]]:
    return [each for each in asked(call).get("messages") or () if isinstance(each, dict)]


def added(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """What came after `before` and the answer to it; None if the history is another one."""
    if len(now) <= len(before) or list(now[: len(before)]) != list(before):
        return None
    rest = list(now[len(before) :])
    return rest[1:] if rest[0].get("role") == "assistant" else rest


def text(message: dict[str, Any]) -> str:
    """What a message says, its parts joined."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")
