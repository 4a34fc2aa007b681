"""A ToolEnvironment whose tools are those of an MCP server.

The server is opened with the first reset or call, and opened anew by a reset after calls: an episode begins with a
fresh one. What a tool returns is passed on as it is.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from paddock.adapters.mcp.stdio import McpFailure
from paddock.adapters.tools import ForeignTool, usable
from paddock.env import ToolEnvironment
from paddock.errors import InvalidToolArguments, ToolFailure, ToolNotFound
from paddock.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from paddock.types import CallToolAction, CallToolObservation, EnvironmentMetadata, ListToolsAction, Observation

if TYPE_CHECKING:
    from collections.abc import Callable


class Server(Protocol):
    """An MCP server that can be talked to. All but `close` may raise EnvironmentFailure."""

    name: str

    async def open(self) -> None: ...
    async def list_tools(self) -> list[dict[str, Any]]: ...
    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]: ...
    async def close(self) -> None: ...


class McpEnvironment(ToolEnvironment):
    """Subclasses are made by `environment_class`; they know their server and its tools."""

    concurrent_sessions = True
    connect: ClassVar[Callable[[], Server]]
    server_name: ClassVar[str] = "mcp"
    secrets: ClassVar[tuple[str, ...]] = ()
    """Values that the server was given and nobody should read: they are masked in what is kept of rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self._server: Server | None = None
        self._called = False
        self._opening: asyncio.Lock | None = None

    async def reset_async(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        if self._called:
            await self.close()
        await self._opened()
        return Observation()

    async def step_async(self, action: Any) -> Observation:
        if isinstance(action, ListToolsAction):
            return self._tool_list()
        try:
            return await self._call(action)
        except ToolFailure as error:
            return self._observe_failure(action, error)

    async def _call(self, action: CallToolAction) -> CallToolObservation:
        self._bind(action.tool_name, action.arguments)
        server = await self._opened()
        self._called = True
        try:
            result = await server.call_tool(action.tool_name, action.arguments)
        except McpFailure as error:
            kind = REFUSALS.get(error.number, ToolFailure)
            raise kind(error.message, tool_name=action.tool_name) from error
        if result.get("isError"):
            raise ToolFailure(text_of(result) or "the tool failed", tool_name=action.tool_name)
        return CallToolObservation(tool_name=action.tool_name, result=in_both_forms(result))

    async def _opened(self) -> Server:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._server is None:
                server = type(self).connect()
                try:
                    await server.open()
                except BaseException:
                    await server.close()
                    raise
                self._server = server
            return self._server

    async def close(self) -> None:  # type: ignore[override]
        server, self._server = self._server, None
        self._called = False
        if server is not None:
            await server.close()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name=self.server_name, description=f"The tools of the MCP server {self.server_name}"
        )


REFUSALS: dict[int, type[ToolFailure]] = {INVALID_PARAMS: InvalidToolArguments, METHOD_NOT_FOUND: ToolNotFound}


async def environment_class(connect: Callable[[], Server]) -> type[McpEnvironment]:
    """The class for a server, which is opened once to see its tools. Raises EnvironmentFailure."""
    server = connect()
    try:
        await server.open()
        listed = usable(await server.list_tools())
        name = server.name
    finally:
        await server.close()
    members = {"connect": staticmethod(connect), "server_name": name}
    cls: type[McpEnvironment] = type("McpEnvironment", (McpEnvironment,), members)
    cls.tools = {tool["name"]: ForeignTool(tool) for tool in listed}
    return cls


def in_both_forms(result: dict[str, Any]) -> dict[str, Any]:
    """A `tools/call` result with the keys that OpenEnv's clients read beside those of MCP."""
    structured = result.get("structuredContent")
    alone = isinstance(structured, dict) and set(structured) == {"result"}
    data = structured["result"] if alone and structured is not None else structured
    return {
        "content": result.get("content") or [],
        "structured_content": structured,
        "structuredContent": structured,
        "meta": result.get("_meta"),
        "data": text_of(result) if structured is None else data,
        "is_error": False,
        "isError": False,
        "resultType": "complete",
    }


def text_of(result: dict[str, Any]) -> str:
    blocks = result.get("content") or []
    return "\n".join(str(block.get("text", "")) for block in blocks if block.get("type") == "text")
