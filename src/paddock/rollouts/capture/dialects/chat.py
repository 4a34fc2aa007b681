"""The OpenAI chat completions dialect: errors, a message of our own, and an answer told as a stream. No IO."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.capture.sse import DONE, event

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT_CODE = "context_length_exceeded"
CONTEXT_TYPES = (CONTEXT_CODE, "exceed_context_size_error")
CONTEXT_WORDS = re.compile(
    r"maximum context length|context (length|window|size)|longer than the (model|maximum)|prompt is too long",
    re.IGNORECASE,
)


class BadRequest(ValueError):
    """The body is not a chat completion request; the message says why."""


def read_request(raw: bytes) -> dict[str, Any]:
    """The body, if it is one that can be answered. Raises BadRequest."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("`messages` must be a list of objects")
    return body


def error_document(message: str, kind: str, code: str | int | None = None, param: str | None = None) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def read_error(raw: bytes) -> dict[str, Any]:
    """An endpoint's error as `message`, `type`, `param` and `code`, whatever shape it has."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        document = raw.decode("utf-8", "replace").strip()
    if isinstance(document, dict):
        document = document.get("error") or document.get("detail") or document
    if not isinstance(document, dict):
        told = document if isinstance(document, str) else orjson.dumps(document).decode()
        document = {"message": told}
    found = {name: document.get(name) for name in ("type", "param", "code")}
    message = document.get("message")
    text = message if isinstance(message, str) else orjson.dumps(message or document).decode()
    if is_context_overflow(text, found["type"], found["code"]):
        # Agents make room in their history when they see this code, and engines name it in many ways.
        found["code"] = CONTEXT_CODE
    return {"message": text[:4000] or "no message", **found}


def is_context_overflow(message: str, kind: Any, code: Any) -> bool:
    return kind in CONTEXT_TYPES or code in CONTEXT_TYPES or bool(CONTEXT_WORDS.search(message))


def models(name: str) -> bytes:
    return orjson.dumps({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "paddock"}]})


def wants_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def is_only_usage(chunk: dict[str, Any]) -> bool:
    return not chunk.get("choices") and bool(chunk.get("usage"))


def rewritten(raw: bytes, document: dict[str, Any], asked: str, *, changed: bool) -> bytes:
    """The chunk under the model name that the agent asked for; written anew only where it must be."""
    given = document.get("model")
    if given == asked and not changed:
        return raw
    if not changed and isinstance(given, str):
        # Inside a string the quotes would be escaped, so this finds the key itself.
        found = b'"model":' + orjson.dumps(given)
        if found in raw:
            return raw.replace(found, b'"model":' + orjson.dumps(asked), 1)
    document["model"] = asked
    return orjson.dumps(document)


def stop_message(text: str, name: str, *, stream: bool) -> bytes:
    """A plain answer of our own that ends the agent's loop, as a document or as a whole stream."""
    document = {
        "id": "paddock-stop",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": name,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
    return b"".join(replay(document, usage=True)) if stream else orjson.dumps(document)


def replay(document: dict[str, Any], *, usage: bool) -> Iterator[bytes]:
    """A whole answer as the events of a stream."""
    head: dict[str, Any] = {name: document[name] for name in ("id", "created", "model") if name in document}
    head["object"] = "chat.completion.chunk"

    def chunk(delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return event(orjson.dumps({**head, "choices": [choice]}))

    choice = document["choices"][0]
    message = choice.get("message") or {}
    yield chunk({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "reasoning", "content", "refusal"):
        if message.get(name):
            yield chunk({name: message[name]})
    for index, tool_call in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{**tool_call, "index": index}]})
    yield chunk({}, choice.get("finish_reason"))
    if usage and document.get("usage"):
        yield event(orjson.dumps({**head, "choices": [], "usage": document["usage"]}))
    yield event(DONE)
