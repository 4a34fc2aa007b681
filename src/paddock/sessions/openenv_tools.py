"""An OpenEnv environment's own tools, called without the MCP protocol in between.

OpenEnv's tool environments call their FastMCP server through a client in the same process: every call becomes
JSON-RPC and passes through the tasks of two sessions. `DirectMcpClient` calls the server object itself, in a
quarter of the time. An environment with a tool that uses FastMCP's context (log messages, progress, session state)
keeps its client.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pydantic_core import from_json, to_json

from paddock.errors import InvalidToolArguments, ToolFailure, ToolNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

logger = logging.getLogger("paddock.sessions")

CONTEXT_NAMES = frozenset({"Context", "CurrentContext", "get_context"})
CONTEXT_MODULES = ("fastmcp.server.context", "fastmcp.server.dependencies")
"""Where FastMCP raises if a tool has no context."""

FAILURES: dict[str, type[ToolFailure]] = {"NotFoundError": ToolNotFound, "ValidationError": InvalidToolArguments}
"""FastMCP's exceptions for what a tool itself has no part in."""

_context_users: WeakSet[type] = WeakSet()
"""Environment classes whose tools turned out to use the context, although their code did not show it."""


def use_direct_client(environment: Any) -> Any:
    """Replace the client of an environment that has a FastMCP server. Any other environment stays as it is."""
    client, server = getattr(environment, "mcp_client", None), getattr(environment, "mcp_server", None)
    if client is None or server is None or type(environment) in _context_users:
        return environment
    try:
        import jsonschema  # noqa: F401
        from fastmcp import Client, FastMCP
        from fastmcp.utilities.json_schema_type import json_schema_to_type_adapter  # noqa: F401
    except ImportError:
        return environment
    own = type(client) is Client and getattr(client.transport, "server", None) is server
    if own and isinstance(server, FastMCP) and _is_simple(server):
        environment.mcp_client = DirectMcpClient(type(environment), server, client)
    return environment


def _is_simple(server: Any) -> bool:
    """Whether nothing starts with a connection (a lifespan), or stands between it and a tool (middleware)."""
    return (
        getattr(getattr(server, "_lifespan", None), "__name__", "") == "default_lifespan"
        and len(getattr(server, "providers", ())) == 1
        and all(type(each).__module__.startswith("fastmcp.") for each in server.middleware)
        and not getattr(server, "strict_input_validation", True)
    )


class DirectMcpClient:
    """What OpenEnv uses of `fastmcp.Client`, on a server in this process. It is bound to no event loop."""

    def __init__(self, owner: type, server: Any, client: Any) -> None:
        self._owner = owner
        self._server = server
        self._client = client
        self._is_direct: bool | None = None
        """None until the tools have been inspected."""
        self.failed_by: type[ToolFailure] | None = None
        """The kind of the last failure, if its exception shows it. OpenEnv guesses it from the message."""
        self._entered = 0
        self._readers: dict[str, ToolResultReader] = {}

    def __getattr__(self, name: str) -> Any:
        """Whatever else it is asked for goes through the client, connected for as long as that takes."""
        value = getattr(self._client, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def connected(*arguments: Any, **options: Any) -> Any:
            async with self._client:
                return await value(*arguments, **options)

        return connected

    async def __aenter__(self) -> DirectMcpClient:
        if self._is_direct is None:
            tools = await self._server.list_tools()
            is_plain = len({tool.name for tool in tools}) == len(tools)
            self._is_direct = is_plain and not any(_uses_context(tool) for tool in tools)
        if not self._is_direct:
            await self._client.__aenter__()
            self._entered += 1
        return self

    async def __aexit__(self, *exit_details: Any) -> None:
        if self._entered:
            self._entered -= 1
            await self._client.__aexit__(*exit_details)

    def is_connected(self) -> bool:
        return True

    async def list_without_client(self) -> list[Any] | None:
        """The tools, if that takes no client."""
        async with self:
            return await self.list_tools() if self._is_direct else None

    async def list_tools(self, **options: Any) -> list[Any]:
        if options or not self._is_direct:
            tools: list[Any] = await self.__getattr__("list_tools")(**options)
            return tools
        return [tool.to_mcp_tool() for tool in await self._server.list_tools()]

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        """Raises ToolError or RuntimeError, as the client does."""
        self.failed_by = None
        reader = self._readers.get(name) or await self._make_reader(name)
        if options or not self._is_direct:
            return await self.__getattr__("call_tool")(name, arguments, **options)
        from fastmcp.exceptions import ToolError

        try:
            result = await self._server.call_tool(name, arguments)
        except Exception as error:
            # An unknown tool, arguments that do not fit, or its own failure: the client raises ToolError for all.
            self.failed_by = FAILURES.get(type(error).__name__, ToolFailure)
            if _needed_context(error):
                logger.warning("a tool of %s uses the MCP context: it gets its client back", self._owner.__name__)
                _context_users.add(self._owner)
                self._is_direct = False
            raise ToolError(str(error)) from error
        return reader.read(result)

    async def _make_reader(self, name: str) -> ToolResultReader:
        tool = await self._server.get_tool(name)
        if tool is None:
            return ToolResultReader(name)
        if self._is_direct and _uses_context(tool):
            self._is_direct = False
        reader = self._readers[name] = ToolResultReader.of(name, tool.output_schema)
        return reader


@dataclass(frozen=True, slots=True)
class ToolResultReader:
    """What FastMCP's client makes of the results of one tool."""

    name: str
    validator: Any = None
    is_wrapped: bool = False
    adapter: Any = None
    """What makes typed data of a structured result."""

    @classmethod
    def of(cls, name: str, schema: Any) -> ToolResultReader:
        if not schema:
            return cls(name)
        from fastmcp.utilities.json_schema_type import json_schema_to_type_adapter
        from jsonschema.validators import validator_for

        validator = validator_for(schema)(schema)
        is_wrapped = bool(schema.get("x-fastmcp-wrap-result"))
        inner = schema.get("properties", {}).get("result", schema) if is_wrapped else schema
        return cls(name, validator, is_wrapped, json_schema_to_type_adapter(inner))

    def read(self, result: Any) -> Any:
        """Raises ToolError or RuntimeError."""
        from fastmcp.client.client import CallToolResult
        from fastmcp.exceptions import ToolError

        if result.is_error:
            raise ToolError(
                next((block.text for block in result.content if hasattr(block, "text")), "the tool failed")
            )
        structured = from_json(to_json(result.structured_content, inf_nan_mode="null"))
        self._check(structured)
        data = structured.get("result") if structured and self.is_wrapped else structured or None
        if structured and self.adapter is not None:
            try:
                data = self.adapter.validate_python(data)
            except ValueError:
                data = None
        return CallToolResult(content=result.content, structured_content=structured, meta=result.meta, data=data)

    def _check(self, structured: Any) -> None:
        from jsonschema.exceptions import best_match

        if self.validator is None:
            return
        if structured is None:
            raise RuntimeError(f"Tool {self.name} has an output schema but did not return structured content")
        problem = best_match(self.validator.iter_errors(structured))
        if problem is not None:
            raise RuntimeError(f"Invalid structured content returned by tool {self.name}: {problem}")


def _needed_context(error: BaseException) -> bool:
    """Whether it was raised where FastMCP looks for the context of a call."""
    current: BaseException | None = error
    while current is not None:
        trace = current.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None and trace.tb_frame.f_globals.get("__name__") in CONTEXT_MODULES:
            return True
        current = current.__cause__ or current.__context__
    return False


def _uses_context(tool: Any) -> bool:
    """Whether a tool, or anything in its module, may use the context. A tool that is no plain function may."""
    function = getattr(tool, "fn", None)
    if function is None:
        return True
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not hasattr(function, "__code__"):
        return True
    written = " ".join(str(annotation) for annotation in function.__annotations__.values())
    return (
        "Context" in written
        or not CONTEXT_NAMES.isdisjoint(function.__globals__)
        or not CONTEXT_NAMES.isdisjoint(_names(function.__code__))
    )


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names(constant)
