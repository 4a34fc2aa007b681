"""OpenAI chat completions: the dialect of the inference engines, so requests and responses pass almost unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.capture.dialects.base import Dialect, DialectRequest, ReplyWriter, Route, load_body
from paddock.capture.errors import BadRequest
from paddock.protocol.sse import DONE, KEEP_ALIVE, write_event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.capture.errors import ErrorReply

ROUTES = {
    "/chat/completions": Route("complete"),
    "/v1/chat/completions": Route("complete"),
    "/models": Route("lookup", "GET"),
    "/v1/models": Route("lookup", "GET"),
}
MODEL_PREFIXES = ("/v1/models/", "/models/")


class Chat(Dialect):
    name: ClassVar[str] = "chat"
    path: ClassVar[str] = "/v1/chat/completions"

    def find_route(self, path: str, query: Mapping[str, str]) -> Route | None:
        if (route := ROUTES.get(path)) is not None:
            return route
        prefix = next((each for each in MODEL_PREFIXES if path.startswith(each)), None)
        return None if prefix is None or ":" in path else Route("lookup", "GET", name=path[len(prefix) :])

    def parse(self, raw: bytes, route: Route) -> DialectRequest:
        body = load_body(raw)
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRequest("`messages` must be a list of objects")
        name = body.get("model")
        return DialectRequest(body, body, str(name) if name else None, route=route)

    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def make_writer(self, request: DialectRequest, model: str, *, include_usage: bool) -> ChatWriter:
        return ChatWriter(request.model or model, include_usage=include_usage or requests_usage(request.body))

    def error_body(self, error: ErrorReply) -> bytes:
        return write_openai_error(error)

    def token_count_body(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def lookup_body(self, route: Route, model: str) -> bytes | None:
        entry = {"id": model, "object": "model", "created": 0, "owned_by": "paddock"}
        if not route.name:
            return orjson.dumps({"object": "list", "data": [entry]})
        return orjson.dumps(entry) if route.name == model else None


class ChatWriter(ReplyWriter):
    """Changes the name of the model, and leaves out a usage that was not requested."""

    finish_completes: ClassVar[bool] = True

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._model = model
        self._include_usage = include_usage

    def write_document(self, document: dict[str, Any]) -> bytes:
        document["model"] = self._model
        return orjson.dumps(document)

    def write_chunk(self, raw: bytes, chunk: dict[str, Any], *, changed: bool) -> bytes:
        if not self._include_usage and not chunk.get("choices") and chunk.get("usage"):
            return b""
        return write_event(rename_model(raw, chunk, self._model, changed=changed))

    def write_end(self) -> bytes:
        return write_event(DONE)

    def write_error(self, error: ErrorReply) -> bytes:
        return write_event(write_openai_error(error))

    def write_keep_alive(self) -> bytes:
        return KEEP_ALIVE


def write_openai_error(error: ErrorReply) -> bytes:
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return orjson.dumps({"error": body})


def requests_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def rename_model(raw: bytes, chunk: dict[str, Any], model: str, *, changed: bool) -> bytes:
    """The chunk with the model name that the agent used; serialized again only if it must be."""
    current = chunk.get("model")
    if current == model and not changed:
        return raw
    if not changed and isinstance(current, str):
        # Inside a string the quotes would be escaped, so this matches the key itself.
        field = b'"model":' + orjson.dumps(current)
        if field in raw:
            return raw.replace(field, b'"model":' + orjson.dumps(model), 1)
    chunk["model"] = model
    return orjson.dumps(chunk)
