"""The conversation of a call as chat messages, and the messages that it adds to the one before. Knows no form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.capture.dialects import chat_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.capture.trace import Call


def chat_form(call: Call) -> dict[str, Any]:
    """`messages` and `tools` in chat form; empty if what was recorded cannot be read."""
    try:
        return chat_request(call)
    except ValueError:
        return {}


def messages(call: Call) -> list[dict[str, Any]]:
    return [each for each in chat_form(call).get("messages") or () if isinstance(each, dict)]


def new_messages(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages after `before` and the answer to it; None if `now` does not continue `before`."""
    if len(now) <= len(before) or list(now[: len(before)]) != list(before):
        return None
    rest = list(now[len(before) :])
    return rest[1:] if rest[0].get("role") == "assistant" else rest
