"""What a model may call, and what it is told afterwards. Knows no model and no environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import orjson

Part = dict[str, Any]
"""A part of a chat message: `{"type": "text", "text": …}` or `{"type": "image_url", "image_url": {"url": …}}`."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool answered, as parts of a message."""

    parts: tuple[Part, ...]
    is_error: bool = False
    done: bool = False
    """The episode is over; the model is not asked again."""

    @classmethod
    def of_text(cls, text: str, *, is_error: bool = False, done: bool = False) -> ToolResult:
        return cls(({"type": "text", "text": text},), is_error, done)

    @classmethod
    def of_value(cls, value: Any, *, is_error: bool = False, done: bool = False) -> ToolResult:
        """A text as it is, a list of message parts as they are, anything else as JSON."""
        if isinstance(value, str):
            return cls.of_text(value, is_error=is_error, done=done)
        if isinstance(value, list) and value and all(is_part(item) for item in value):
            return cls(tuple(value), is_error, done)
        text = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        return cls.of_text(text, is_error=is_error, done=done)

    @property
    def text(self) -> str:
        return "\n".join(str(part.get("text", "")) for part in self.parts if part.get("type") == "text")

    @property
    def images(self) -> list[Part]:
        return [part for part in self.parts if part.get("type") == "image_url"]


def is_part(value: Any) -> bool:
    """Is it a text or an image as chat messages hold them?"""
    if not isinstance(value, dict):
        return False
    if value.get("type") == "text":
        return isinstance(value.get("text"), str)
    return value.get("type") == "image_url" and isinstance(value.get("image_url"), dict)


class Tools(Protocol):
    """A task and the tools to do it with."""

    @property
    def prompt(self) -> str | list[Part]:
        """What the model is asked to do: a text, or parts of a message."""

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI form: `{"type": "function", "function": {name, description, parameters}}`."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Carry out a call. What a model can mend (an unknown tool, wrong arguments, a failure of the tool) is a
        result with `is_error`. Raises PaddockError only when the place the tools act in is broken or gone."""
