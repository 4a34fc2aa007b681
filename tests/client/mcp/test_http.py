"""The MCP client over HTTP: streams, pages, odd answers, and the revision without initialize."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from paddock.client.mcp.client import (
    McpAnswerLost,
    McpClient,
    McpProtocolError,
    McpRpcError,
    McpUnreachable,
    McpUnsendable,
)
from paddock.client.mcp.http import McpHttpTransport

Handler = Callable[[web.Request, Any], Awaitable[web.StreamResponse]]


def answered(call: Any, result: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": call.get("id"), "result": result}


WELCOME = {"protocolVersion": "2025-03-26", "capabilities": {}, "serverInfo": {"name": "x"}}


def against(handler: Handler, work: Callable[[McpClient], Awaitable[Any]], get: Any = None) -> Any:
    """Run `work` on an endpoint whose requests `handler` answers; it need not know of initialize."""

    async def serve(request: web.Request) -> web.StreamResponse:
        call = await request.json()
        if call.get("method") == "initialize" and handler.__name__ != "stateless":
            return web.json_response(answered(call, WELCOME))
        if "id" not in call or "method" not in call:
            return web.Response(status=202)
        return await handler(request, call)

    async def main() -> Any:
        app = web.Application()
        app.router.add_post("/mcp", serve)
        if get is not None:
            app.router.add_get("/mcp", get)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            return await work(McpClient(McpHttpTransport(f"http://127.0.0.1:{port}/mcp", "key")))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


async def stream(request: web.Request, *events: tuple[str | None, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for name, document in events:
        reply = f"id: {name}\n" if name else ""
        data = json.dumps(document) if document is not None else ""
        await response.write(f"{reply}data: {data}\n\n".encode() if data else f"{reply}\n".encode())
    await response.write_eof()
    return response


def test_a_list_comes_in_pages() -> None:
    async def pages(request: web.Request, call: Any) -> web.StreamResponse:
        page = int(call["params"].get("cursor", "0"))
        result = {"tools": [{"name": f"t{page}"}], **({"nextCursor": str(page + 1)} if page < 2 else {})}
        return web.json_response(answered(call, result))

    assert [tool["name"] for tool in against(pages, McpClient.list_tools)] == ["t0", "t1", "t2"]


def test_a_server_of_the_revision_without_initialize_is_spoken_to_in_it() -> None:
    seen: list[Any] = []

    async def stateless(request: web.Request, call: Any) -> web.StreamResponse:
        if call["method"] == "initialize":
            error = {"code": -32022, "message": "unsupported version"}
            return web.json_response({"jsonrpc": "2.0", "id": call["id"], "error": error}, status=400)
        seen.append((request.headers["MCP-Protocol-Version"], request.headers["Mcp-Method"], call["params"]["_meta"]))
        return web.json_response(answered(call, {"content": [], "is_error": False}))

    against(stateless, lambda endpoint: endpoint.call_tool("t", {}))
    version, method, meta = seen[0]
    assert (version, method) == ("2026-07-28", "tools/call")
    assert meta["io.modelcontextprotocol/protocolVersion"] == "2026-07-28"


def test_a_stream_that_breaks_off_is_taken_up_where_it_was() -> None:
    calls: list[Any] = []

    async def broken(request: web.Request, call: Any) -> web.StreamResponse:
        calls.append(call)
        return await stream(request, ("e1", {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}))

    async def rest(request: web.Request) -> web.StreamResponse:
        assert request.headers["Last-Event-ID"] == "e1"
        return await stream(request, ("e2", answered(calls[0], {"content": []})))

    assert against(broken, lambda endpoint: endpoint.call_tool("t", {}), rest) == {"content": []}
    assert len(calls) == 1


def test_a_stream_that_cannot_be_taken_up_is_a_lost_answer() -> None:
    async def broken(request: web.Request, call: Any) -> web.StreamResponse:
        return await stream(request, ("e1", {"jsonrpc": "2.0", "method": "notifications/progress"}))

    async def work(endpoint: McpClient) -> None:
        with pytest.raises(McpAnswerLost):
            await endpoint.call_tool("t", {})

    against(broken, work)


def test_a_server_that_asks_in_the_middle_is_answered() -> None:
    async def asks(request: web.Request, call: Any) -> web.StreamResponse:
        ping = {"jsonrpc": "2.0", "id": "s1", "method": "ping"}
        return await stream(request, (None, ping), (None, answered(call, {"content": []})))

    assert against(asks, lambda endpoint: endpoint.call_tool("t", {})) == {"content": []}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"jsonrpc": "2.0", "id": 99, "result": {}}, McpProtocolError),
        ({"jsonrpc": "2.0", "id": 2}, McpProtocolError),
        ({"jsonrpc": "2.0", "id": 2, "error": {"code": -32602, "message": "no"}}, McpRpcError),
        ([], McpProtocolError),
    ],
)
def test_invalid_answers_are_errors(body: Any, error: type[Exception]) -> None:
    async def odd(request: web.Request, call: Any) -> web.StreamResponse:
        return web.json_response(body)

    async def work(endpoint: McpClient) -> None:
        with pytest.raises(error):
            await endpoint.call_tool("t", {})

    against(odd, work)


def test_arguments_of_any_size_are_sent_and_impossible_ones_are_not() -> None:
    async def same(request: web.Request, call: Any) -> web.StreamResponse:
        return web.json_response(answered(call, {"structuredContent": call["params"]["arguments"]}))

    async def work(endpoint: McpClient) -> Any:
        with pytest.raises(McpUnsendable):
            await endpoint.call_tool("t", {"what": object()})
        return await endpoint.call_tool("t", {"number": 2**100, "text": "\ud800"})

    assert against(same, work)["structuredContent"] == {"number": 2**100, "text": "\ud800"}


def test_a_refused_connection_means_that_the_call_did_not_run() -> None:
    async def main() -> None:
        with pytest.raises(McpUnreachable):
            await McpClient(McpHttpTransport("http://127.0.0.1:1/mcp", "key")).list_tools()

    asyncio.run(main())
