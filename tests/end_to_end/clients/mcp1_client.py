"""The echo tools through the official client, first generation. Usage: mcp1_client.py URL

An http address is spoken to by streamable HTTP, a ws address by WebSocket.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from mcp import ClientSession, McpError
from mcp.types import CallToolResult
from report import report


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[ClientSession]:
    if url.startswith("ws"):
        from mcp.client.websocket import websocket_client

        async with websocket_client(url) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            yield session
    else:
        from mcp.client.streamable_http import streamable_http_client

        async with (
            streamable_http_client(url) as (read, write, _),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            yield session


def plain(result: CallToolResult) -> Any:
    return [result.content[0].text, result.structuredContent, result.isError]


async def tools(url: str) -> Any:
    async with connected(url) as client:
        return {tool.name: tool.inputSchema for tool in (await client.list_tools()).tools}


async def calls(url: str) -> Any:
    async with connected(url) as client:
        await client.send_ping()
        reply = await client.call_tool("echo_message", {"message": "hi"})
        measured = await client.call_tool("echo_with_length", {"message": "hello"})
        return [plain(reply), plain(measured)]


async def unknown_tool(url: str) -> Any:
    async with connected(url) as client:
        try:
            refusal = plain(await client.call_tool("nope", {}))
        except McpError as error:
            refusal = error.error.code
        return {"refusal": refusal, "after": plain(await client.call_tool("echo_message", {"message": "hi"}))}


async def two_at_once(url: str) -> Any:
    async with connected(url) as one:
        async with connected(url) as two:
            turns = [("one", one), ("two", two), ("one again", one)]
            replies = [plain(await client.call_tool("echo_message", {"message": turn})) for turn, client in turns]
        return [*replies, plain(await one.call_tool("echo_message", {"message": "alone"}))]


report(tools, calls, unknown_tool, two_at_once)
