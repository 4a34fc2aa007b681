"""Tools with which an agent keeps its own conversation small, run locally.

The task stays: system messages and the first user message are never dropped, and a tool call never loses its
result. Nothing is ever lost from the full history, and every long output stays viewable.
"""

from __future__ import annotations

import copy
import json
from typing import Any

SNIPPET = 200
MOST_MESSAGES = 10
MOST_LINES = 20
LARGEST_PAGE = 1000
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
CONTEXT_TOOL_NAMES = {tool["function"]["name"] for tool in CONTEXT_TOOLS}

Messages = list[dict[str, Any]]


class _Wrong(ValueError):
    """An argument that cannot be used; the text is for the agent."""


class ContextManager:
    """The conversation of one episode: what there was, and what the agent has dropped of it."""

    def __init__(self, max_output_chars: int = 10000) -> None:
        self.max_output_chars = max_output_chars
        self.full_history: Messages = []
        self.full_outputs: list[str] = []

    @property
    def last_full_output(self) -> str | None:
        return self.full_outputs[-1] if self.full_outputs else None

    def reset(self) -> None:
        """Begin a new episode."""
        self.full_history = []
        self.full_outputs = []

    def get_tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI form, to be offered beside the environment's own."""
        return copy.deepcopy(CONTEXT_TOOLS)

    def is_context_tool(self, tool_name: str) -> bool:
        return tool_name in CONTEXT_TOOL_NAMES

    def track_message(self, message: dict[str, Any]) -> None:
        """Remember a message for good. Call it for every message that is added to the conversation."""
        self.full_history.append(copy.deepcopy(message))

    def truncate_output(self, output: str) -> str:
        """`output`, or its beginning and a notice if it is too long; the whole of it stays viewable."""
        if not isinstance(output, str) or len(output) <= self.max_output_chars:
            return output
        self.full_outputs.append(output)
        return (
            f"{output[: self.max_output_chars]}\n\n[TRUNCATED - {len(output)} chars total, output "
            f"{len(self.full_outputs)}. Use search_tool_output or view_tool_output to access full content.]"
        )

    def execute_tool(self, tool_name: str, args: Any, chat_history: Messages) -> tuple[str, Messages]:
        """Run a context tool: the text for the agent, and the conversation to go on with."""
        try:
            if not isinstance(args, dict):
                raise _Wrong(f"arguments must be an object, not {_kind(args)}")
            if tool_name == "manage_context":
                return self._manage(args, chat_history)
            if tool_name not in CONTEXT_TOOL_NAMES:
                raise _Wrong(f"Unknown context tool: {tool_name}")
            if tool_name == "check_context":
                return self._check(chat_history), chat_history
            run = {
                "search_history": self._search_history,
                "search_tool_output": self._search_output,
                "view_tool_output": self._view_output,
            }[tool_name]
            return run(args), chat_history
        except _Wrong as error:
            return json.dumps({"error": str(error)}), chat_history

    # -- the five tools -------------------------------------------------------------------------------

    def _check(self, chat_history: Messages) -> str:
        visible = sum(message.get("role") == "assistant" for message in chat_history)
        known = sum(message.get("role") == "assistant" for message in self.full_history)
        total = max(visible, known)
        return json.dumps({"visible_turns": visible, "total_turns": total, "dropped_turns": total - visible})

    def _manage(self, args: dict[str, Any], chat_history: Messages) -> tuple[str, Messages]:
        wished = _whole(args, "keep_recent_turns", 5)
        if wished < 0:
            raise _Wrong(f"keep_recent_turns is {wished}: give 1 or more")
        # The turn in progress stays in any case: its result is still to come.
        keep = max(wished, 1)
        roles = [message.get("role") for message in chat_history]
        begins = [index for index, role in enumerate(roles) if role == "assistant"]
        cut = begins[-keep] if len(begins) > keep else 0
        stays = {index for index, role in enumerate(roles) if index >= cut or role in ("system", "developer")}
        if "user" in roles:
            stays.add(roles.index("user"))
        kept = [message for index, message in enumerate(chat_history) if index in stays]
        dropped = [message for index, message in enumerate(chat_history) if index not in stays]
        if not dropped:
            return f"Nothing to drop. {len(chat_history)} messages.", chat_history
        missing = [message for message in dropped if message not in self.full_history]
        self.full_history[:0] = copy.deepcopy(missing)
        return f"Dropped {len(dropped)} messages. {len(kept)} remaining.", kept

    def _search_history(self, args: dict[str, Any]) -> str:
        pattern = _pattern(args)
        matches = []
        for index, message in enumerate(self.full_history):
            text = _text_of(message)
            found = text.lower().find(pattern)
            if found >= 0:
                matches.append({"index": index, "role": message.get("role"), "snippet": _around(text, found)})
        return json.dumps({"matches": matches[:MOST_MESSAGES]})

    def _search_output(self, args: dict[str, Any]) -> str:
        if not self.full_outputs:
            return NO_OUTPUT
        lines = self._output(args).split("\n")
        pattern = _pattern(args)
        found = ((number, line, line.lower().find(pattern)) for number, line in enumerate(lines, start=1))
        matches = [{"line": number, "content": _around(line, at)} for number, line, at in found if at >= 0]
        return json.dumps({"matches": matches[:MOST_LINES]})

    def _view_output(self, args: dict[str, Any]) -> str:
        if not self.full_outputs:
            return NO_OUTPUT
        lines = self._output(args).split("\n")
        page, size = _whole(args, "page", 1), _whole(args, "page_size", 50)
        if not 1 <= size <= LARGEST_PAGE:
            raise _Wrong(f"page_size is {size}: give 1 to {LARGEST_PAGE}")
        pages = -(-len(lines) // size)
        if not 1 <= page <= pages:
            raise _Wrong(f"page {page} does not exist: there are pages 1 to {pages}")
        content = "\n".join(lines[(page - 1) * size : page * size])
        return json.dumps({"page": page, "total_pages": pages, "total_lines": len(lines), "content": content})

    def _output(self, args: dict[str, Any]) -> str:
        number = _whole(args, "output_id", len(self.full_outputs))
        if not 1 <= number <= len(self.full_outputs):
            raise _Wrong(f"output_id {number} does not exist: there are 1 to {len(self.full_outputs)}")
        return self.full_outputs[number - 1]


def _whole(args: dict[str, Any], name: str, default: int) -> int:
    value = args.get(name)
    if value is None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            raise _Wrong(f"{name} is {value!r}: give a whole number") from None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong(f"{name} must be a whole number, not {_kind(value)}")
    return value


def _pattern(args: dict[str, Any]) -> str:
    value = args.get("pattern")
    if value is not None and not isinstance(value, str):
        raise _Wrong(f"pattern must be a string, not {_kind(value)}")
    if not value:
        raise _Wrong("pattern is required")
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


def _around(text: str, at: int) -> str:
    """A piece of the text that shows what was found."""
    start = max(0, min(at - SNIPPET // 4, len(text) - SNIPPET))
    return text[start : start + SNIPPET]


def _kind(value: Any) -> str:
    return {"NoneType": "nothing", "bool": "true or false", "list": "a list"}.get(type(value).__name__, "that")
