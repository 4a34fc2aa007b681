"""Tools with which an agent shortens its own conversation. They run locally.

System messages and the first user message are never dropped, and a tool call never loses its result. The full history
is kept, and every long output can be paged through.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from paddock.capture.roles import SYSTEM_ROLES

SNIPPET_CHARS = 200
MAX_MATCHING_MESSAGES = 10
MAX_MATCHING_LINES = 20
MAX_PAGE_LINES = 1000
NO_OUTPUT = "No truncated output available."


def _tool(
    name: str, description: str, required: tuple[str, ...] = (), **properties: dict[str, Any]
) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = list(required)
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _integer(description: str) -> dict[str, Any]:
    return {"type": "integer", "description": description}


_PATTERN = {"type": "string", "description": "Text to look for, upper and lower case alike"}
_OUTPUT = _integer("Which truncated output, as numbered in its notice (default: the latest)")

CONTEXT_TOOLS: list[dict[str, Any]] = [
    _tool("check_context", "Count the turns you can see and the turns there were in all"),
    _tool(
        "manage_context",
        "Drop old turns to free context; the task itself always stays",
        ("keep_recent_turns",),
        keep_recent_turns=_integer("How many of the latest turns to keep"),
    ),
    _tool("search_history", "Search all messages, dropped ones included", ("pattern",), pattern=_PATTERN),
    _tool(
        "search_tool_output", "Search a truncated tool output", ("pattern",), pattern=_PATTERN, output_id=_OUTPUT
    ),
    _tool(
        "view_tool_output",
        "Show a page of a truncated tool output",
        ("page",),
        page=_integer("Page number, from 1"),
        page_size=_integer("Lines per page (default 50)"),
        output_id=_OUTPUT,
    ),
]  # fmt: skip
"""The tools with which an agent manages its own context, in OpenAI format."""
CONTEXT_TOOL_NAMES = {tool["function"]["name"] for tool in CONTEXT_TOOLS}
"""Their names."""

Messages = list[dict[str, Any]]


class _InvalidArgument(ValueError):
    """An invalid argument; the message is for the agent."""


class ContextManager:
    """The conversation of one episode, including the messages that the agent dropped."""

    def __init__(self, max_output_chars: int = 10000) -> None:
        self.max_output_chars = max_output_chars
        self.full_history: Messages = []
        self.full_outputs: list[str] = []

    @property
    def last_full_output(self) -> str | None:
        """The last output before it was cut; None if there was none."""
        return self.full_outputs[-1] if self.full_outputs else None

    def reset(self) -> None:
        """Begin a new episode."""
        self.full_history = []
        self.full_outputs = []

    def get_tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI format, to be offered with the environment's own."""
        return copy.deepcopy(CONTEXT_TOOLS)

    def is_context_tool(self, tool_name: str) -> bool:
        """Whether a call of this tool manages the context, and is not for the instance."""
        return tool_name in CONTEXT_TOOL_NAMES

    def track_message(self, message: dict[str, Any]) -> None:
        """Add a message to the full history. Call it for every message of the conversation."""
        self.full_history.append(copy.deepcopy(message))

    def truncate_output(self, output: str) -> str:
        """`output`, or its beginning and a notice if it is too long; the full output is kept."""
        if not isinstance(output, str) or len(output) <= self.max_output_chars:
            return output
        self.full_outputs.append(output)
        return (
            f"{output[: self.max_output_chars]}\n\n[TRUNCATED - {len(output)} chars total, output "
            f"{len(self.full_outputs)}. Use search_tool_output or view_tool_output to access full content.]"
        )

    def execute_tool(self, tool_name: str, args: Any, chat_history: Messages) -> tuple[str, Messages]:
        """Run a context tool: the text for the agent, and the new conversation."""
        try:
            if not isinstance(args, dict):
                raise _InvalidArgument(f"arguments must be an object, not {_kind(args)}")
            if tool_name == "manage_context":
                return self._manage(args, chat_history)
            if tool_name not in CONTEXT_TOOL_NAMES:
                raise _InvalidArgument(f"Unknown context tool: {tool_name}")
            if tool_name == "check_context":
                return self._check(chat_history), chat_history
            run = {
                "search_history": self._search_history,
                "search_tool_output": self._search_output,
                "view_tool_output": self._view_output,
            }[tool_name]
            return run(args), chat_history
        except _InvalidArgument as error:
            return json.dumps({"error": str(error)}), chat_history

    # -- the five tools -------------------------------------------------------------------------------

    def _check(self, chat_history: Messages) -> str:
        visible = sum(message.get("role") == "assistant" for message in chat_history)
        tracked = sum(message.get("role") == "assistant" for message in self.full_history)
        total = max(visible, tracked)
        return json.dumps({"visible_turns": visible, "total_turns": total, "dropped_turns": total - visible})

    def _manage(self, args: dict[str, Any], chat_history: Messages) -> tuple[str, Messages]:
        requested = _integer_argument(args, "keep_recent_turns", 5)
        if requested < 0:
            raise _InvalidArgument(f"keep_recent_turns is {requested}: give 1 or more")
        # The turn in progress is always kept: its result is still to come.
        keep = max(requested, 1)
        roles = [message.get("role") for message in chat_history]
        turn_starts = [index for index, role in enumerate(roles) if role == "assistant"]
        cut = turn_starts[-keep] if len(turn_starts) > keep else 0
        kept_indexes = {index for index, role in enumerate(roles) if index >= cut or role in SYSTEM_ROLES}
        if "user" in roles:
            kept_indexes.add(roles.index("user"))
        remaining = [message for index, message in enumerate(chat_history) if index in kept_indexes]
        dropped = [message for index, message in enumerate(chat_history) if index not in kept_indexes]
        if not dropped:
            return f"Nothing to drop. {len(chat_history)} messages.", chat_history
        missing = [message for message in dropped if message not in self.full_history]
        self.full_history[:0] = copy.deepcopy(missing)
        return f"Dropped {len(dropped)} messages. {len(remaining)} remaining.", remaining

    def _search_history(self, args: dict[str, Any]) -> str:
        pattern = _pattern_argument(args)
        matches = []
        for index, message in enumerate(self.full_history):
            text = _text_of(message)
            position = text.lower().find(pattern)
            if position >= 0:
                matches.append({"index": index, "role": message.get("role"), "snippet": _snippet(text, position)})
        return json.dumps({"matches": matches[:MAX_MATCHING_MESSAGES]})

    def _search_output(self, args: dict[str, Any]) -> str:
        if not self.full_outputs:
            return NO_OUTPUT
        lines = self._output(args).split("\n")
        pattern = _pattern_argument(args)
        positions = ((number, line, line.lower().find(pattern)) for number, line in enumerate(lines, start=1))
        matches = [{"line": number, "content": _snippet(line, at)} for number, line, at in positions if at >= 0]
        return json.dumps({"matches": matches[:MAX_MATCHING_LINES]})

    def _view_output(self, args: dict[str, Any]) -> str:
        if not self.full_outputs:
            return NO_OUTPUT
        lines = self._output(args).split("\n")
        page, size = _integer_argument(args, "page", 1), _integer_argument(args, "page_size", 50)
        if not 1 <= size <= MAX_PAGE_LINES:
            raise _InvalidArgument(f"page_size is {size}: give 1 to {MAX_PAGE_LINES}")
        pages = -(-len(lines) // size)
        if not 1 <= page <= pages:
            raise _InvalidArgument(f"page {page} does not exist: there are pages 1 to {pages}")
        content = "\n".join(lines[(page - 1) * size : page * size])
        return json.dumps({"page": page, "total_pages": pages, "total_lines": len(lines), "content": content})

    def _output(self, args: dict[str, Any]) -> str:
        number = _integer_argument(args, "output_id", len(self.full_outputs))
        if not 1 <= number <= len(self.full_outputs):
            raise _InvalidArgument(f"output_id {number} does not exist: there are 1 to {len(self.full_outputs)}")
        return self.full_outputs[number - 1]


def _integer_argument(args: dict[str, Any], name: str, default: int) -> int:
    value = args.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise _InvalidArgument(f"{name} is {value!r}: give a whole number") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _InvalidArgument(f"{name} must be a whole number, not {_kind(value)}")
    return value


def _pattern_argument(args: dict[str, Any]) -> str:
    value = args.get("pattern")
    if value is not None and not isinstance(value, str):
        raise _InvalidArgument(f"pattern must be a string, not {_kind(value)}")
    if not value:
        raise _InvalidArgument("pattern is required")
    return value.lower()


def _text_of(message: dict[str, Any]) -> str:
    """All the text of a message: its content, in parts or not, and the tool calls it makes."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else part.get("text") for part in parts if isinstance(part, str | dict)]
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            texts.append(f"{function.get('name', '')} {function.get('arguments', '')}")
    return "\n".join(text for text in texts if isinstance(text, str))


def _snippet(text: str, at: int) -> str:
    """The part of the text around a position."""
    start = max(0, min(at - SNIPPET_CHARS // 4, len(text) - SNIPPET_CHARS))
    return text[start : start + SNIPPET_CHARS]


def _kind(value: Any) -> str:
    return {"NoneType": "nothing", "bool": "true or false", "list": "a list"}.get(type(value).__name__, "that")
