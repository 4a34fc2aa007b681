"""Tools of the Responses API that are no plain functions: the engine gets a function for each. No IO.

The input of Codex's `apply_patch` is free text. OpenAI's models know the shells and the patcher without a schema;
other models need one. Tools that run on OpenAI's servers are left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from paddock.capture.dialects.chat_builder import (
    arguments_text,
    function_tool,
    parse_json,
    require_object,
    require_objects,
    require_text,
    shorten,
)

STRING = {"type": "string"}
PATCHES = ("create_file", "update_file", "delete_file")
NATIVE: dict[str, dict[str, Any]] = {
    "local_shell": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": STRING},
            "working_directory": STRING,
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
    "shell": {
        "type": "object",
        "properties": {
            "commands": {"type": "array", "items": STRING},
            "timeout_ms": {"type": "integer"},
            "max_output_length": {"type": "integer"},
        },
        "required": ["commands"],
    },
    "apply_patch": {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": list(PATCHES)},
            "path": STRING,
            "diff": STRING,
        },
        "required": ["type", "path"],
    },
}
DESCRIPTIONS = {
    "local_shell": "Run a command and read what it prints.",
    "shell": "Run commands in a shell, one after the other, and read what they print.",
    "apply_patch": "Create, update or delete a file with a diff.",
}
INPUT = {"type": "object", "properties": {"input": STRING}, "required": ["input"]}
INVALID_NAME_CHARACTERS = re.compile(r"[^a-zA-Z0-9_-]")
MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class SpecialTool:
    """A tool that is not called as a plain function."""

    kind: str
    """`function` (in a namespace), `custom`, `tool_search`, or the name of a native tool."""
    name: str
    namespace: str | None = None

    def item(self, call_id: str, arguments: str) -> dict[str, Any] | None:
        """The item of a call; None if the arguments are incomplete."""
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        head = {"call_id": call_id, "name": self.name, **namespace}
        if self.kind == "function":
            return {"type": "function_call", **head, "arguments": arguments}
        if self.kind == "custom":
            return {"type": "custom_tool_call", **head, "input": free_input(arguments)}
        values = parse_json(arguments)
        return native_item(self.kind, call_id, values) if isinstance(values, dict) else None


def native_item(kind: str, call_id: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    if kind == "tool_search":
        return {"type": "tool_search_call", "call_id": call_id, "execution": "client", "arguments": arguments}
    if kind == "local_shell":
        if not is_text_list(arguments.get("command")):
            return None
        action = {"type": "exec", "env": {}, "timeout_ms": None, "user": None, "working_directory": None, **arguments}
        return {"type": "local_shell_call", "call_id": call_id, "action": action}
    if kind == "shell":
        if not is_text_list(arguments.get("commands")):
            return None
        action = {"timeout_ms": None, "max_output_length": None, **arguments}
        return {"type": "shell_call", "call_id": call_id, "action": action}
    if not isinstance(arguments.get("path"), str) or arguments.get("type") not in PATCHES:
        return None
    return {"type": "apply_patch_call", "call_id": call_id, "operation": arguments}


def free_input(arguments: str) -> str:
    """The text in the only argument of a free-text tool, whatever its name."""
    value = parse_json(arguments)
    if isinstance(value, dict):
        values = [value["input"]] if "input" in value else list(value.values())
        value = values[0] if len(values) == 1 else arguments
    return value if isinstance(value, str) else arguments


def function_call_of(item: dict[str, Any]) -> tuple[str, str] | None:
    """The name and the arguments of the function that replaces a call in the history; None if it is no call."""
    kind = item.get("type")
    if kind == "function_call":
        return full_name(item), require_text(item.get("arguments"), "`function_call.arguments`")
    if kind == "custom_tool_call":
        text = require_text(item.get("input"), "`custom_tool_call.input`")
        return full_name(item), json.dumps({"input": text}, ensure_ascii=False)
    if kind in ("local_shell_call", "shell_call"):
        action = require_object(item.get("action"), f"`{kind}.action`")
        arguments = {name: value for name, value in action.items() if value not in (None, {}) and name != "type"}
        return kind.removesuffix("_call"), json.dumps(arguments, ensure_ascii=False)
    if kind == "apply_patch_call":
        return "apply_patch", json.dumps(require_object(item.get("operation"), "`operation`"), ensure_ascii=False)
    if kind == "tool_search_call":
        return "tool_search", arguments_text(item.get("arguments"))
    return None


def full_name(item: dict[str, Any]) -> str:
    return join_name(item.get("namespace"), require_text(item.get("name"), "`name`"))


def join_name(namespace: Any, name: str) -> str:
    """One function name for a tool in a namespace."""
    if not isinstance(namespace, str) or not namespace:
        return name
    separator = "" if namespace.endswith("_") else "__"
    return INVALID_NAME_CHARACTERS.sub("_", f"{namespace}{separator}{name}")[-MAX_NAME_CHARACTERS:]


def read_tools(
    tools: Any, special: dict[str, Any], notes: list[str], namespace: str | None = None
) -> list[dict[str, Any]]:
    """The tools as functions. Tools with calls of another form are added to `special`."""
    functions: list[dict[str, Any]] = []
    for tool in require_objects([] if tools is None else tools, "`tools`"):
        kind = tool.get("type")
        if kind == "namespace":
            functions += read_tools(
                tool.get("tools"), special, notes, require_text(tool.get("name"), "`tools[].name`")
            )
        elif kind == "function":
            functions.append(read_function(tool, special, namespace))
        elif kind == "custom":
            name = require_text(tool.get("name"), "`tools[].name`")
            special[join_name(namespace, name)] = SpecialTool("custom", name, namespace)
            functions.append(function_tool(join_name(namespace, name), free_description(tool), INPUT))
        elif kind == "tool_search" and tool.get("execution") == "client":
            special["tool_search"] = SpecialTool("tool_search", "tool_search")
            functions.append(function_tool("tool_search", tool.get("description"), tool.get("parameters")))
        elif isinstance(kind, str) and kind in NATIVE:
            special[kind] = SpecialTool(kind, kind)
            functions.append(function_tool(kind, DESCRIPTIONS[kind], NATIVE[kind]))
        else:
            notes.append(f"the tool {shorten(kind)} runs on OpenAI's servers and was left out")
    return functions


def read_function(tool: dict[str, Any], special: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    # Some programs use the form of chat completions.
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    name = require_text(function.get("name"), "`tools[].name`")
    if namespace is not None:
        special[join_name(namespace, name)] = SpecialTool("function", name, namespace)
    return function_tool(join_name(namespace, name), function.get("description"), function.get("parameters"))


def free_description(tool: dict[str, Any]) -> str:
    description = tool.get("description")
    description = description if isinstance(description, str) else ""
    form = tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        description += f"\n\n`input` follows this {form.get('syntax', '')} grammar:\n{form['definition']}"
    return description


def is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
