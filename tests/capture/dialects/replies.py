"""Completions of an engine, and requests and reply writers of a dialect, for tests without IO."""

import json
from typing import Any

from paddock.capture.dialects import DIALECTS
from paddock.capture.dialects.base import Dialect, DialectRequest, ReplyWriter, Route
from paddock.capture.dialects.chat import Chat
from paddock.testing.dialect_clients import CLIENTS
from paddock.testing.dialects import events_of

BLOCK_DIALECTS = [name for name in CLIENTS if not issubclass(DIALECTS[name], Chat)]
"""Those that do not pass chat completions through."""


def parse(dialect: Dialect, body: dict[str, Any], route: Route | None = None) -> DialectRequest:
    return dialect.parse(json.dumps(body).encode(), route or Route("complete"))


def chat_of(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return parse(DIALECTS[name](), body).chat


def make_writer(name: str, body: dict[str, Any] | None = None, route: Route | None = None) -> ReplyWriter:
    dialect, client = DIALECTS[name](), CLIENTS[name]
    request = client.request(client.user_turn("x"), tools=False).body
    return dialect.make_writer(parse(dialect, {**request, **(body or {})}, route), "m", include_usage=True)


def tool_call(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def document(reason: str = "stop", **message: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": reason}
    return {"id": "x", "model": "real", "choices": [choice], "usage": usage}


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def events(stream: bytes) -> list[tuple[str, dict[str, Any]]]:
    return events_of(stream.decode())
