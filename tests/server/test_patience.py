"""A call that takes long is answered in a stream that shows signs of life."""

import asyncio
import json

import pytest

from paddock import ToolEnvironment, tool
from paddock.server import patience
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
    monkeypatch.setattr(patience, "PATIENCE", 0.02)
    answer = ask(serve(Slow), 0.2, **EITHER)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.body.count(b": here\n\n") > 1
    last = answer.body.decode().strip().rpartition("\n\n")[2]
    assert last.startswith("event: message\ndata: ")
    assert json.loads(last.partition("data: ")[2])["result"]["structuredContent"] == {"result": "done"}


@pytest.mark.parametrize(("seconds", "headers"), [(0.2, {"accept": "application/json"}), (0.0, EITHER)])
def test_others_get_plain_json(
    serve: Serve, seconds: float, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 0.02 if seconds else 5)
    answer = ask(serve(Slow), seconds, **headers)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["result"]["structuredContent"] == {"result": "done"}
