"""`mcp:COMMAND`, `mcp+http://…` and `mcp+https://…`: the tools of an MCP server as a ToolEnvironment.

Each session has a server process, or a session with a server, of its own. It is opened with the first reset or call,
and opened anew by a reset after calls: an episode begins with a fresh one. Results are passed on as they are.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from paddock.adapters.tools import ForeignTool, usable
from paddock.client.mcp.client import McpClient, McpRpcError
from paddock.client.mcp.stdio import McpStdioTransport
from paddock.client.replies import text_of
from paddock.config import PADDOCK_MCP_TOKEN
from paddock.env import ToolEnvironment
from paddock.errors import EnvironmentFailure, InvalidToolArguments, TargetError, ToolFailure, ToolNotFound
from paddock.loop_thread import LoopThread
from paddock.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND
from paddock.types import CallToolAction, CallToolObservation, EnvironmentMetadata, ListToolsAction, Observation

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.client.mcp.client import McpTransport

OPEN_SECONDS = 60.0
HTTP_SCHEMES = ("mcp+http:", "mcp+https:")
TOOL_ERRORS: dict[int, type[ToolFailure]] = {INVALID_PARAMS: InvalidToolArguments, METHOD_NOT_FOUND: ToolNotFound}
ASSIGNMENT = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", re.DOTALL)


def load(rest: str) -> tuple[type[McpEnvironment], str]:
    """The class for a server, which is opened once to list its tools. Raises TargetError."""
    connect: Callable[[], McpTransport]
    name: str | None = None
    secrets: tuple[str, ...]
    if rest.startswith(HTTP_SCHEMES):
        from paddock.client.mcp.http import McpHttpTransport

        url, token = rest.removeprefix("mcp+"), PADDOCK_MCP_TOKEN.read() or ""
        connect, secrets, name = partial(McpHttpTransport, url, token), (token,), urlsplit(url).netloc
    else:
        command, variables = parse_command(rest)
        connect, secrets = partial(McpStdioTransport, command, variables), tuple(variables.values())
    thread = LoopThread("paddock-mcp")
    try:
        cls = thread.call(environment_class, connect, name)
    except EnvironmentFailure as error:
        raise TargetError(error.message, hint=error.hint or "is it an MCP server?") from error
    finally:
        thread.close()
    if not cls.tools:
        raise TargetError(f"the MCP server {cls.server_name} offers no tools", hint="an environment needs some")
    cls.secrets = secrets
    return cls, cls.server_name


def parse_command(text: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command and the variables in front of it; `NAME=$OTHER` takes the value from our own.

    Raises TargetError.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise TargetError(f"{text!r} is not a command: {error}", hint="check its quotes") from None
    variables: dict[str, str] = {}
    while words and (match := ASSIGNMENT.match(words[0])):
        name, value = match.groups()
        if value.startswith("$") and value[1:] not in os.environ:
            raise TargetError(f"{value[1:]} is not set, and {name} is to have its value", hint=f"export {value[1:]}")
        variables[name] = os.environ[value[1:]] if value.startswith("$") else value
        words = words[1:]
    if not words:
        raise TargetError(f"{text!r} names no program", hint="write mcp:PROGRAM ARGUMENTS")
    return words, variables


async def environment_class(connect: Callable[[], McpTransport], name: str | None) -> type[McpEnvironment]:
    """A class whose sessions open a client each. Opens one to list the tools. Raises EnvironmentFailure."""
    async with McpClient(connect(), open_seconds=OPEN_SECONDS) as client:
        tools = usable(await client.list_tools())
        name = name or client.server_name
    members = {"connect": staticmethod(connect), "server_name": name}
    cls: type[McpEnvironment] = type("McpEnvironment", (McpEnvironment,), members)
    cls.tools = {tool["name"]: ForeignTool(tool) for tool in tools}
    return cls


class McpEnvironment(ToolEnvironment):
    """Subclasses are made by `environment_class`; they have a server and its tools."""

    concurrent_sessions = True
    connect: ClassVar[Callable[[], McpTransport]]
    server_name: ClassVar[str] = "mcp"
    secrets: ClassVar[tuple[str, ...]] = ()
    """Secrets that the server was started with. They are masked in the records of rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self._client: McpClient | None = None
        self._is_used = False
        self._opening: asyncio.Lock | None = None

    async def reset_async(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        if self._is_used:
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
        client = await self._opened()
        self._is_used = True
        try:
            result = await client.call_tool(action.tool_name, action.arguments)
        except McpRpcError as error:
            kind = TOOL_ERRORS.get(error.number, ToolFailure)
            raise kind(error.message, tool_name=action.tool_name) from error
        if result.get("isError"):
            raise ToolFailure(text_of(result) or "the tool failed", tool_name=action.tool_name)
        return CallToolObservation(tool_name=action.tool_name, result=in_both_forms(result))

    async def _opened(self) -> McpClient:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._client is None:
                self._client = await McpClient(type(self).connect(), open_seconds=OPEN_SECONDS).__aenter__()
            return self._client

    async def close(self) -> None:  # type: ignore[override]
        client, self._client = self._client, None
        self._is_used = False
        if client is not None:
            await client.close()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name=self.server_name, description=f"The tools of the MCP server {self.server_name}"
        )


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
