"""Answers of an engine, and what writers make of them, for tests without IO."""

import json
from typing import Any

from paddock.rollouts.capture.dialects import DIALECTS
from paddock.rollouts.capture.dialects.base import Asked, Dialect, Place, Writer
from paddock.testing.dialects import events_of


def asked(dialect: Dialect, body: dict[str, Any], place: Place | None = None) -> Asked:
    return dialect.read(json.dumps(body).encode(), place or Place("complete"))


def chat_of(name: str, body: dict[str, Any]) -> dict[str, Any]:
    return asked(DIALECTS[name](), body).chat


def writer(name: str, body: dict[str, Any] | None = None, place: Place | None = None) -> Writer:
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"messages": [{"role": "user", "content": "x"}]},
        "responses": {"input": "x"},
        "anthropic": {"messages": [{"role": "user", "content": "x"}]},
        "google": {"contents": [{"parts": [{"text": "x"}]}]},
    }
    dialect = DIALECTS[name]()
    return dialect.writer(asked(dialect, {**bodies[name], **(body or {})}, place), "m", usage=True)


def call(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def document(reason: str = "stop", **message: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": reason}
    return {"id": "x", "model": "real", "choices": [choice], "usage": usage}


def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def events(written: bytes) -> list[tuple[str, dict[str, Any]]]:
    return events_of(written.decode())
