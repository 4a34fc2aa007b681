"""Tools of OpenAI's Responses that are no plain functions, told to the engine as functions and back. No IO.

Codex's `apply_patch` is a tool whose input is free text, and the shells and the patcher that OpenAI's models
know by themselves need a schema for all others. What only OpenAI's servers can run is left out.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from paddock.rollouts.capture.dialects.conversation import (
    arguments_of,
    function_tool,
    mapping,
    objects,
    parsed,
    shown,
    text,
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
NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_-]")
LONGEST_NAME = 64


@dataclass(frozen=True, slots=True)
class Special:
    """A tool that is not called as a plain function."""

    kind: str
    """`function` (in a namespace), `custom`, `tool_search`, or the name of a native tool."""
    name: str
    namespace: str | None = None

    def item(self, call_id: str, arguments: str) -> dict[str, Any] | None:
        """The item that calls it; None if the arguments do not say enough for one."""
        home = {} if self.namespace is None else {"namespace": self.namespace}
        head = {"call_id": call_id, "name": self.name, **home}
        if self.kind == "function":
            return {"type": "function_call", **head, "arguments": arguments}
        if self.kind == "custom":
            return {"type": "custom_tool_call", **head, "input": free_input(arguments)}
        found = parsed(arguments)
        return native_item(self.kind, call_id, found) if isinstance(found, dict) else None


def native_item(kind: str, call_id: str, found: dict[str, Any]) -> dict[str, Any] | None:
    if kind == "tool_search":
        return {"type": "tool_search_call", "call_id": call_id, "execution": "client", "arguments": found}
    if kind == "local_shell":
        if not is_texts(found.get("command")):
            return None
        action = {"type": "exec", "env": {}, "timeout_ms": None, "user": None, "working_directory": None, **found}
        return {"type": "local_shell_call", "call_id": call_id, "action": action}
    if kind == "shell":
        if not is_texts(found.get("commands")):
            return None
        action = {"timeout_ms": None, "max_output_length": None, **found}
        return {"type": "shell_call", "call_id": call_id, "action": action}
    if not isinstance(found.get("path"), str) or found.get("type") not in PATCHES:
        return None
    return {"type": "apply_patch_call", "call_id": call_id, "operation": found}


def free_input(arguments: str) -> str:
    """The text in the one argument of a free tool, whatever the model called it."""
    found = parsed(arguments)
    if isinstance(found, dict):
        values = [found["input"]] if "input" in found else list(found.values())
        found = values[0] if len(values) == 1 else arguments
    return found if isinstance(found, str) else arguments


def call_of(item: dict[str, Any]) -> tuple[str, str] | None:
    """The name and the arguments of the function that stands for a call in the history; None if it is no call."""
    kind = item.get("type")
    if kind == "function_call":
        return full_name(item), text(item.get("arguments"), "`function_call.arguments`")
    if kind == "custom_tool_call":
        given = text(item.get("input"), "`custom_tool_call.input`")
        return full_name(item), json.dumps({"input": given}, ensure_ascii=False)
    if kind in ("local_shell_call", "shell_call"):
        action = mapping(item.get("action"), f"`{kind}.action`")
        told = {name: value for name, value in action.items() if value not in (None, {}) and name != "type"}
        return kind.removesuffix("_call"), json.dumps(told, ensure_ascii=False)
    if kind == "apply_patch_call":
        return "apply_patch", json.dumps(mapping(item.get("operation"), "`operation`"), ensure_ascii=False)
    if kind == "tool_search_call":
        return "tool_search", arguments_of(item.get("arguments"))
    return None


def full_name(item: dict[str, Any]) -> str:
    return joined(item.get("namespace"), text(item.get("name"), "`name`"))


def joined(namespace: Any, name: str) -> str:
    """One name for a tool in a namespace, as functions may be named."""
    if not isinstance(namespace, str) or not namespace:
        return name
    between = "" if namespace.endswith("_") else "__"
    return NOT_IN_A_NAME.sub("_", f"{namespace}{between}{name}")[-LONGEST_NAME:]


def read_tools(
    tools: Any, special: dict[str, Any], notes: list[str], namespace: str | None = None
) -> list[dict[str, Any]]:
    """The tools as functions. Those that are called in another way are told in `special`."""
    made: list[dict[str, Any]] = []
    for tool in objects([] if tools is None else tools, "`tools`"):
        kind = tool.get("type")
        if kind == "namespace":
            made += read_tools(tool.get("tools"), special, notes, text(tool.get("name"), "`tools[].name`"))
        elif kind == "function":
            made.append(read_function(tool, special, namespace))
        elif kind == "custom":
            name = text(tool.get("name"), "`tools[].name`")
            special[joined(namespace, name)] = Special("custom", name, namespace)
            made.append(function_tool(joined(namespace, name), free_description(tool), INPUT))
        elif kind == "tool_search" and tool.get("execution") == "client":
            special["tool_search"] = Special("tool_search", "tool_search")
            made.append(function_tool("tool_search", tool.get("description"), tool.get("parameters")))
        elif isinstance(kind, str) and kind in NATIVE:
            special[kind] = Special(kind, kind)
            made.append(function_tool(kind, DESCRIPTIONS[kind], NATIVE[kind]))
        else:
            notes.append(f"the tool {shown(kind)} runs on OpenAI's servers and was left out")
    return made


def read_function(tool: dict[str, Any], special: dict[str, Any], namespace: str | None) -> dict[str, Any]:
    # Some programs put a function the way chat completions have it.
    told = tool["function"] if isinstance(tool.get("function"), dict) else tool
    name = text(told.get("name"), "`tools[].name`")
    if namespace is not None:
        special[joined(namespace, name)] = Special("function", name, namespace)
    return function_tool(joined(namespace, name), told.get("description"), told.get("parameters"))


def free_description(tool: dict[str, Any]) -> str:
    told = tool.get("description")
    description = told if isinstance(told, str) else ""
    form = tool.get("format")
    if isinstance(form, dict) and isinstance(form.get("definition"), str):
        description += f"\n\n`input` follows this {form.get('syntax', '')} grammar:\n{form['definition']}"
    return description


def is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
