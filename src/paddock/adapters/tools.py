"""Tools that another program defines: listed with its schemas, and called through it."""

from __future__ import annotations

from typing import Any

from paddock.errors import InvalidToolArguments
from paddock.tools import RESERVED, ToolOptions, ToolSpec


class ForeignTool(ToolSpec):
    """A tool of MCP's form. Only the names of its arguments are checked here: who defines it checks the rest."""

    is_async = True

    def __init__(self, listed: dict[str, Any]) -> None:
        hints = listed.get("annotations") or {}
        self.name = str(listed["name"])
        self.description = str(listed.get("description") or "")
        self.options = ToolOptions(
            title=listed.get("title"),
            read_only=bool(hints.get("readOnlyHint")),
            idempotent=bool(hints.get("idempotentHint")),
            destructive=hints.get("destructiveHint"),
        )
        schema = listed.get("inputSchema") or listed.get("input_schema") or {"type": "object"}
        # Set on the instance, so that what a signature would say is never worked out.
        self.__dict__["input_schema"] = {"properties": {}, **schema}
        self.__dict__["output_schema"] = listed.get("outputSchema")

    def check(self, arguments: dict[str, Any]) -> dict[str, Any]:
        schema = self.input_schema
        if absent := [name for name in schema.get("required") or () if name not in arguments]:
            raise InvalidToolArguments(f"{absent[0]}: Field required", tool_name=self.name)
        if schema.get("additionalProperties") is False and (odd := arguments.keys() - schema["properties"].keys()):
            raise InvalidToolArguments(f"{min(odd)}: there is no such argument", tool_name=self.name)
        return arguments


def usable(listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools whose names are not in `RESERVED`."""
    return [tool for tool in listed if tool["name"] not in RESERVED]
