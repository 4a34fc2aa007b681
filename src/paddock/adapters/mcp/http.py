"""An MCP server at an address: the streamable HTTP client that fleets use, as a server of one session."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from paddock.adapters.mcp.stdio import McpFailure
from paddock.errors import EnvironmentFailure
from paddock.fleet.errors import FleetError, RpcFailure
from paddock.fleet.mcp import McpEndpoint


class HttpServer:
    """A conversation with the server at `url`."""

    def __init__(self, url: str, token: str = "") -> None:
        self.name = urlsplit(url).netloc
        self._endpoint = McpEndpoint(url, token)

    async def open(self) -> None:
        await _translated(self._endpoint.ready())

    async def list_tools(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await _translated(self._endpoint.list_tools())
        return found

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = await _translated(self._endpoint.call_tool(name, arguments))
        return result

    async def close(self) -> None:
        await self._endpoint.close()


async def _translated(work: Any) -> Any:
    try:
        return await work
    except RpcFailure as error:
        raise McpFailure(error.message, error.number) from error
    except FleetError as error:
        raise EnvironmentFailure(error.message, hint=error.hint) from error
