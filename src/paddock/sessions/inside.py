"""An OpenEnv environment's own tools, called without a protocol in between.

OpenEnv's tool environments ask their FastMCP server through a client in the same process: every call becomes
JSON-RPC, passes through the tasks of two sessions, and comes back the same way. The server itself can be asked,
which takes a quarter of the time. Tools that speak to their caller (a log line, progress) keep the client.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

logger = logging.getLogger("paddock.sessions")

SPEAKING = frozenset({"Context", "CurrentContext", "get_context"})
NO_CALLER = ("session is not available", "no session exists", "request context")
"""How FastMCP says that a tool needs the caller that it does not have."""


def connect(environment: Any) -> Any:
    """Give an environment that has a FastMCP server the short way to it. Any other stays as it is."""
    client, server = getattr(environment, "mcp_client", None), getattr(environment, "mcp_server", None)
    if client is None or server is None:
        return environment
    try:
        from fastmcp import Client, FastMCP
        from fastmcp.utilities.json_schema_type import json_schema_to_type_adapter  # noqa: F401
    except ImportError:
        return environment
    if type(client) is Client and isinstance(server, FastMCP) and _is_simple(server):
        environment.mcp_client = Inside(server, client)
    return environment


def _is_simple(server: Any) -> bool:
    """Whether a call finds all there is: nothing that begins with a connection, or stands between it and a tool."""
    return (
        getattr(getattr(server, "_lifespan", None), "__name__", "") == "default_lifespan"
        and len(getattr(server, "providers", ())) == 1
        and all(type(each).__module__.startswith("fastmcp.") for each in server.middleware)
        and not getattr(server, "strict_input_validation", True)
    )


@dataclass(frozen=True, slots=True)
class Plan:
    """How one tool is called."""

    needs_caller: bool = False
    is_wrapped: bool = False
    adapter: Any = None
    """What makes typed data of a structured result."""


class Inside:
    """What OpenEnv uses of `fastmcp.Client`, on a server in this process. It is bound to no event loop."""

    def __init__(self, server: Any, client: Any) -> None:
        self._server = server
        self._client = client
        self._plans: dict[str, Plan] = {}
        self._through_client = self.__getattr__("call_tool")

    def __getattr__(self, name: str) -> Any:
        """Whatever else it is asked for goes through the client, connected for as long as that takes."""
        value = getattr(self._client, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def connected(*arguments: Any, **options: Any) -> Any:
            async with self._client:
                return await value(*arguments, **options)

        return connected

    async def __aenter__(self) -> Inside:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def is_connected(self) -> bool:
        return True

    async def list_tools(self) -> list[Any]:
        return [tool.to_mcp_tool() for tool in await self._server.list_tools()]

    async def call_tool(self, name: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        """Raises ToolError, as the client does."""
        from fastmcp.exceptions import ToolError

        plan = self._plans.get(name) or await self._plan(name)
        if plan.needs_caller or options:
            return await self._through_client(name, arguments, **options)
        try:
            return _result(plan, await self._server.call_tool(name, arguments))
        except Exception as error:
            # An unknown tool, arguments that do not fit, or its own failure: the client says the same of all.
            if not any(sign in str(error) for sign in NO_CALLER):
                raise ToolError(str(error)) from error
        logger.info("the tool %r speaks to its caller: it is called through a client from now on", name)
        self._plans[name] = Plan(needs_caller=True)
        return await self._through_client(name, arguments)

    async def _plan(self, name: str) -> Plan:
        from fastmcp.utilities.json_schema_type import json_schema_to_type_adapter

        tool = await self._server.get_tool(name)
        if tool is None:
            return Plan()
        if _speaks(getattr(tool, "fn", None)):
            plan = Plan(needs_caller=True)
        else:
            schema = tool.output_schema
            is_wrapped = bool(schema and schema.get("x-fastmcp-wrap-result"))
            if is_wrapped:
                schema = schema.get("properties", {}).get("result", schema)
            plan = Plan(is_wrapped=is_wrapped, adapter=json_schema_to_type_adapter(schema) if schema else None)
        self._plans[name] = plan
        return plan


def _result(plan: Plan, done: Any) -> Any:
    """What FastMCP's client makes of a tool's result."""
    from fastmcp.client.client import CallToolResult
    from fastmcp.exceptions import ToolError

    if done.is_error:
        raise ToolError(next((block.text for block in done.content if hasattr(block, "text")), "the tool failed"))
    structured = done.structured_content
    data = None
    if structured:
        data = structured.get("result") if plan.is_wrapped else structured
        if plan.adapter is not None:
            try:
                data = plan.adapter.validate_python(data)
            except ValueError:
                data = None
    return CallToolResult(content=done.content, structured_content=structured, meta=done.meta, data=data)


def _speaks(function: Any) -> bool:
    """Whether a tool, or anything in its module, may speak to its caller. What is no plain function may."""
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__code__"):
        return True
    return not SPEAKING.isdisjoint(function.__globals__) or not SPEAKING.isdisjoint(_names(function.__code__))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names(constant)
