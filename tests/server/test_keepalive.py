"""A call that takes long is answered in a stream that shows signs of life."""

import asyncio
import json
import time
from typing import Any

import pytest

from paddock import ToolEnvironment, tool
from paddock.protocol.sse import KEEP_ALIVE
from paddock.server import keepalive
from running import Running, Serve
from wire import Answer

EITHER = {"accept": "application/json, text/event-stream"}


class Slow(ToolEnvironment):
    concurrent_sessions = True

    @tool
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"


def ask(server: Running, seconds: float, **headers: str) -> Answer:
    params = {"name": "wait", "arguments": {"seconds": seconds}}
    document = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    return server.http()("POST", "/mcp", document, **headers)


def test_a_slow_answer_comes_in_a_stream(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "SILENT_SECONDS", 0.02)
    answer = ask(serve(Slow), 0.2, **EITHER)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body.count(KEEP_ALIVE) > 1
    last = answer.body.decode().strip().rpartition("\n\n")[2]
    assert last.startswith("event: message\ndata: ")
    assert json.loads(last.partition("data: ")[2])["result"]["structuredContent"] == {"result": "done"}


@pytest.mark.parametrize(("seconds", "headers"), [(0.2, {"accept": "application/json"}), (0.0, EITHER)])
def test_others_get_plain_json(
    serve: Serve, seconds: float, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepalive, "SILENT_SECONDS", 0.02 if seconds else 5)
    answer = ask(serve(Slow), seconds, **headers)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["result"]["structuredContent"] == {"result": "done"}


def test_an_app_that_is_served_again_sends_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "SILENT_SECONDS", 0.02)
    collected: list[Any] = []

    async def send(event: Any) -> None:
        collected.append(event)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(scope["seconds"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(seconds: float) -> None:
        scope = {"method": "POST", "headers": [(b"accept", b"text/event-stream")], "seconds": seconds}
        await app(scope, None, send)

    app = keepalive.SseKeepAlive(answer)
    asyncio.run(ask(0))
    assert collected.pop()["headers"] == []
    asyncio.run(ask(0.2))
    assert collected[0]["headers"][0] == (b"content-type", b"text/event-stream")


class SlowToOpen(Slow):
    def __init__(self) -> None:
        super().__init__()
        time.sleep(0.3)


def test_the_session_of_a_slow_initialize_is_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "SILENT_SECONDS", 0.05)
    document = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    answer = serve(SlowToOpen).http()("POST", "/mcp", document, Accept="application/json, text/event-stream")
    assert answer.json["result"]["serverInfo"]
    assert answer.headers["mcp-session-id"]


def test_an_answer_in_the_very_moment_of_the_stream_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "SILENT_SECONDS", 0.02)
    collected: list[Any] = []

    async def send(event: Any) -> None:
        collected.append(event["type"])

    async def main() -> None:
        ready = asyncio.get_running_loop().create_future()

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            await ready
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

        app = keepalive.SseKeepAlive(answer)
        look = app._check

        def both() -> None:
            ready.set_result(None)
            look()

        monkeypatch.setattr(app, "_check", both)
        await app({"method": "POST", "headers": [(b"accept", b"text/event-stream")]}, None, send)

    asyncio.run(main())
    assert collected == ["http.response.start", "http.response.body"]
