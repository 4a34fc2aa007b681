"""A conversation in the form in which requests are compared: volatile parts masked, ids of tool calls left out."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.recorded.tool_results import TOOL
from paddock.capture.recorded.volatile import mask_volatile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paddock.capture.recorded.tool_lines import ToolLines

DIFF_CHARACTERS = 2000
SAME_AS_BEFORE = "only messages that differed in an earlier call"


class Fidelity(StrEnum):
    """How alike a request and the recorded one are, best first."""

    EQUAL = "equal"
    TOOL_OUTPUT = "tool_output"
    """Only outputs of tools differ, also where other messages quote them."""
    SAME_SHAPE = "same_shape"
    """Roles, tool names and tool arguments are the same; other texts differ too."""


FIDELITIES = tuple(Fidelity)


@dataclass(frozen=True, eq=False)
class MessageView:
    """One message. It is masked when it is compared with one that differs, because masking takes long."""

    role: str
    message: dict[str, Any] = field(repr=False)
    raw: bytes = field(repr=False)
    """The message as it was sent."""

    @cached_property
    def text(self) -> str:
        return mask_volatile(read_text(self.message.get("content")))

    @cached_property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """The names and arguments of its tool calls."""
        calls = self.message.get("tool_calls") or ()
        return tuple(_read_tool_call(call) for call in calls if isinstance(call, dict))

    def is_equal_to(self, other: MessageView) -> bool:
        return self.raw == other.raw or (self.has_shape_of(other) and self.text == other.text)

    def has_shape_of(self, other: MessageView) -> bool:
        return self.role == other.role and self.calls == other.calls


class MessageReader:
    """Makes views of messages. A conversation repeats its messages with each call, so every view is made once."""

    def __init__(self) -> None:
        self._views: dict[bytes, MessageView] = {}

    def read(self, messages: Iterable[Any]) -> tuple[MessageView, ...]:
        return tuple(self._read_message(message) for message in messages if isinstance(message, dict))

    def _read_message(self, message: dict[str, Any]) -> MessageView:
        key = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = MessageView(str(message.get("role")), message, key)
        return view


def read_text(content: Any) -> str:
    """The text of a message. Other parts, such as images, as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    return "\n".join(part["text"] if _is_text(part) else orjson.dumps(part).decode() for part in parts)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _read_tool_call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return str(function.get("name")), mask_volatile(arguments)
    return str(function.get("name")), mask_volatile(orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode())


def compare(
    one: Sequence[MessageView], other: Sequence[MessageView], tool_lines: tuple[ToolLines, ToolLines] | None = None
) -> Fidelity | None:
    """How alike two conversations are; None if their shapes differ. `tool_lines` are those of the two rollouts."""
    if len(one) != len(other):
        return None
    fidelity = Fidelity.EQUAL
    for first, second in zip(one, other, strict=True):
        if first is second or first.is_equal_to(second):
            continue
        if not first.has_shape_of(second):
            return None
        if first.role != TOOL and (tool_lines is None or not differs_in_quotes(first.text, second.text, tool_lines)):
            fidelity = Fidelity.SAME_SHAPE
        elif fidelity is Fidelity.EQUAL:
            fidelity = Fidelity.TOOL_OUTPUT
    return fidelity


def differs_in_quotes(one: str, other: str, tool_lines: tuple[ToolLines, ToolLines]) -> bool:
    """Whether the lines that only one of two texts has are all quoted from outputs of tools."""
    lines, other_lines = set(one.splitlines()), set(other.splitlines())
    return tool_lines[0].contain(lines - other_lines) and tool_lines[1].contain(other_lines - lines)


def distance(one: Sequence[MessageView], other: Sequence[MessageView]) -> tuple[int, float]:
    """How far apart two conversations of one shape are: the messages that differ unmasked, then their texts."""
    pairs = [(first, second) for first, second in zip(one, other, strict=True) if first.raw != second.raw]
    alike = (
        difflib.SequenceMatcher(None, first.text[:DIFF_CHARACTERS], second.text[:DIFF_CHARACTERS]).ratio()
        for first, second in pairs
    )
    return len(pairs), -sum(alike)


def is_continued_by(one: Sequence[MessageView], other: Sequence[MessageView]) -> bool:
    """Whether `other` is a longer conversation that begins with `one`, by its shape."""
    return len(one) < len(other) and compare(one, other[: len(one)]) is not None


def describe_difference(recorded: Sequence[MessageView], now: Sequence[MessageView]) -> str:
    """A diff of the first message that differs, for people."""
    for number, (first, second) in enumerate(zip(recorded, now, strict=False)):
        if not first.is_equal_to(second):
            return _describe_message(number, first, second)
    return f"it has {len(now)} messages, and the recorded one {len(recorded)}"


def describe_new_differences(
    recorded: Sequence[MessageView], now: Sequence[MessageView], described: set[tuple[str, str]]
) -> str:
    """A diff of each message that differs. Later calls repeat a message: `described` has those that need no diff."""
    parts = []
    for number, (first, second) in enumerate(zip(recorded, now, strict=True)):
        texts = first.text, second.text
        if not first.is_equal_to(second) and texts not in described:
            described.add(texts)
            parts.append(_describe_message(number, first, second))
    return "\n".join(parts) or SAME_AS_BEFORE


def _describe_message(number: int, recorded: MessageView, now: MessageView) -> str:
    return f"message {number} ({now.role}):\n{diff(_lines(recorded), _lines(now))}"


def diff(recorded: list[str], now: list[str]) -> str:
    lines = difflib.unified_diff(recorded, now, "recorded", "now", lineterm="", n=1)
    return "\n".join(lines)[:DIFF_CHARACTERS]


def _lines(view: MessageView) -> list[str]:
    calls = [f"{name}({arguments})" for name, arguments in view.calls]
    return [f"role: {view.role}", *view.text.splitlines(), *calls]
