"""OpenAI chat completions: what engines speak too, so requests and answers pass almost unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import orjson

from paddock.rollouts.capture.dialects.base import Asked, Dialect, Place, Writer, load
from paddock.rollouts.capture.refusals import BadRequest
from paddock.rollouts.capture.sse import DONE, KEEP_ALIVE, event

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.capture.refusals import Fault

COMPLETIONS = Place("complete")
MODELS = Place("look", "GET")
COUNT = Place("count")
PLACES = {
    "/chat/completions": COMPLETIONS,
    "/v1/chat/completions": COMPLETIONS,
    "/models": MODELS,
    "/v1/models": MODELS,
}
MODEL_PREFIXES = ("/v1/models/", "/models/")


class Chat(Dialect):
    name: ClassVar[str] = "chat"

    def find(self, path: str, query: Mapping[str, str]) -> Place | None:
        if (known := PLACES.get(path)) is not None:
            return known
        prefix = next((each for each in MODEL_PREFIXES if path.startswith(each)), None)
        return None if prefix is None or ":" in path else Place("look", "GET", name=path[len(prefix) :])

    def read(self, raw: bytes, place: Place) -> Asked:
        body = load(raw)
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRequest("`messages` must be a list of objects")
        name = body.get("model")
        return Asked(body, body, str(name) if name else None, place=place)

    def chat_form(self, body: dict[str, Any]) -> dict[str, Any]:
        return body

    def writer(self, asked: Asked, name: str, *, usage: bool) -> ChatWriter:
        return ChatWriter(asked.model or name, usage=usage or wants_usage(asked.body))

    def error(self, fault: Fault) -> bytes:
        return error_document(fault)

    def counted(self, tokens: int) -> bytes:
        return orjson.dumps({"input_tokens": tokens})

    def look(self, place: Place, model: str) -> bytes | None:
        described = {"id": model, "object": "model", "created": 0, "owned_by": "paddock"}
        if not place.name:
            return orjson.dumps({"object": "list", "data": [described]})
        return orjson.dumps(described) if place.name == model else None


class ChatWriter(Writer):
    """Changes the name of the model, and leaves out a usage that nobody asked for."""

    finish_completes: ClassVar[bool] = True

    def __init__(self, name: str, *, usage: bool) -> None:
        self._name = name
        self._usage = usage

    def document(self, document: dict[str, Any]) -> bytes:
        document["model"] = self._name
        return orjson.dumps(document)

    def chunk(self, raw: bytes, chunk: dict[str, Any], *, changed: bool) -> bytes:
        if not self._usage and not chunk.get("choices") and chunk.get("usage"):
            return b""
        return event(renamed(raw, chunk, self._name, changed=changed))

    def end(self) -> bytes:
        return event(DONE)

    def fail(self, fault: Fault) -> bytes:
        return event(error_document(fault))

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE


def error_document(fault: Fault) -> bytes:
    told = {"message": fault.message, "type": fault.kind, "param": fault.param, "code": fault.code}
    return orjson.dumps({"error": told})


def wants_usage(body: dict[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def renamed(raw: bytes, chunk: dict[str, Any], name: str, *, changed: bool) -> bytes:
    """The chunk under the model name that the agent asked for; written anew only where it must be."""
    given = chunk.get("model")
    if given == name and not changed:
        return raw
    if not changed and isinstance(given, str):
        # Inside a string the quotes would be escaped, so this finds the key itself.
        found = b'"model":' + orjson.dumps(given)
        if found in raw:
            return raw.replace(found, b'"model":' + orjson.dumps(name), 1)
    chunk["model"] = name
    return orjson.dumps(chunk)
