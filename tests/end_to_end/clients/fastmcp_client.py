"""The echo tools through the FastMCP client. Usage: fastmcp_client.py URL MODE

MODE is `legacy` (initialize first), `2026-07-28` (no handshake), or `auto` (the client finds out).
"""

from typing import Any

from fastmcp import Client
from fastmcp.client.client import CallToolResult
from mcp import MCPError
from report import report


def plain(result: CallToolResult) -> Any:
    return [result.content[0].text, result.structured_content, bool(result.is_error)]


async def tools(url: str, mode: str) -> Any:
    async with Client(url, mode=mode) as client:
        return {tool.name: tool.input_schema for tool in await client.list_tools()}


async def calls(url: str, mode: str) -> Any:
    async with Client(url, mode=mode) as client:
        reply = await client.call_tool("echo_message", {"message": "hi"})
        measured = await client.call_tool("echo_with_length", {"message": "hello"})
        return [plain(reply), plain(measured)]


async def unknown_tool(url: str, mode: str) -> Any:
    async with Client(url, mode=mode) as client:
        try:
            refusal = plain(await client.call_tool("nope", {}, raise_on_error=False))
        except MCPError as error:
            refusal = error.error.code
        return {"refusal": refusal, "after": plain(await client.call_tool("echo_message", {"message": "hi"}))}


async def two_at_once(url: str, mode: str) -> Any:
    async with Client(url, mode=mode) as one:
        async with Client(url, mode=mode) as two:
            turns = [("one", one), ("two", two), ("one again", one)]
            replies = [plain(await client.call_tool("echo_message", {"message": turn})) for turn, client in turns]
        return [*replies, plain(await one.call_tool("echo_message", {"message": "alone"}))]


report(tools, calls, unknown_tool, two_at_once)
