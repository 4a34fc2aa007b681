"""What a dialect is: how an agent's request becomes a chat completion, and how the answer goes back to it.

Engines are always asked for chat completions. A dialect reads a request into that form and writes the answer
in its own, whole or as a stream. It does no IO and knows neither engines nor records. A dialect object lives
as long as its rollout, so it may remember what it said.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson

from paddock.rollouts.capture.refusals import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paddock.rollouts.capture.refusals import Fault

EVENT_STREAM = "text/event-stream"
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Place:
    """What a path of a dialect is for."""

    action: Literal["complete", "count", "look"]
    method: str = "POST"
    stream: bool | None = None
    """Where the path tells whether to stream; None where the body does."""
    name: str = ""
    """The model, or whatever else the path names."""
    form: str = ""
    """Further wishes about the form of the answer."""


@dataclass(slots=True)
class Asked:
    """A request that was read."""

    body: dict[str, Any]
    """In the agent's own dialect, as it is recorded."""
    chat: dict[str, Any]
    """The same as a chat completion request."""
    model: str | None = None
    """The name that the agent has for the model."""
    notes: list[str] = field(default_factory=list)
    """What could not be translated, for the log."""
    place: Place = field(default_factory=lambda: Place("complete"))
    tools: dict[str, Any] = field(default_factory=dict)
    """Tools that are no functions in this dialect, by the name of the function that stands for each."""

    @property
    def stream(self) -> bool:
        return bool(self.chat.get("stream"))


class Writer(ABC):
    """Writes one answer of one attempt. Everything that it has written was sent, so it may rely on it."""

    content_type: str = EVENT_STREAM
    """Of a stream."""
    finish_completes: ClassVar[bool] = False
    """Whether an agent has the whole answer with the chunk that holds its finish reason, and may hang up then.
    Otherwise the answer is complete only with what `end` writes."""

    @abstractmethod
    def document(self, document: dict[str, Any]) -> bytes:
        """A whole answer of the engine."""

    @abstractmethod
    def chunk(self, raw: bytes, chunk: dict[str, Any], *, changed: bool) -> bytes:
        """One more chunk of a stream. `raw` is how it came; `changed` tells that it no longer is the chunk."""

    @abstractmethod
    def end(self) -> bytes:
        """What ends the stream of a whole answer."""

    @abstractmethod
    def fail(self, fault: Fault) -> bytes:
        """What ends a stream that cannot go on."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Something that means nothing."""

    def fails_in_stream(self, fault: Fault) -> bool:
        """Whether agents understand this only inside a stream, even if none has begun."""
        return False

    def replay(self, document: dict[str, Any]) -> bytes:
        """A whole answer as a whole stream."""
        events = [self.chunk(b"", chunk, changed=True) for chunk in chunks_of(document)]
        return b"".join((*events, self.end()))


class Dialect(ABC):
    """One way of speaking, for one rollout."""

    name: ClassVar[str]

    @abstractmethod
    def find(self, path: str, query: Mapping[str, str]) -> Place | None:
        """What is served at a path; None if it is not this dialect's."""

    def recognises(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        """Whether a request to a path of several dialects is by a program that speaks this one."""
        return False

    @abstractmethod
    def read(self, raw: bytes, place: Place) -> Asked:
        """Raises BadRequest."""

    @abstractmethod
    def chat_form(self, body: dict[str, Any]) -> dict[str, Any]:
        """Of a request as it was recorded. Raises BadRequest."""

    @abstractmethod
    def writer(self, asked: Asked, name: str, *, usage: bool) -> Writer:
        """For the answer to a request. `usage` tells whether to pass it on to an agent that did not ask."""

    @abstractmethod
    def error(self, fault: Fault) -> bytes:
        """The body of a refusal."""

    @abstractmethod
    def counted(self, tokens: int) -> bytes:
        """The answer to a question for the number of tokens."""

    @abstractmethod
    def look(self, place: Place, model: str) -> bytes | None:
        """What can be looked at, such as the list of models; None if there is nothing."""


def load(raw: bytes) -> dict[str, Any]:
    """The body as an object that can be written again. Raises BadRequest."""
    try:
        body = orjson.loads(raw or b"null")
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def check_depth(body: dict[str, Any]) -> None:
    """Whoever goes through a body that passes this needs no care. Raises BadRequest."""
    try:
        orjson.dumps(body)
    except TypeError:
        raise BadRequest("the body is nested too deeply") from None


def plain_answer(text: str, model: str) -> dict[str, Any]:
    """An answer of our own that ends an agent's loop."""
    return {
        "id": "paddock-stop",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def chunks_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole answer as the chunks of a stream."""
    head: dict[str, Any] = {name: document[name] for name in ("id", "created", "model") if name in document}
    head["object"] = "chat.completion.chunk"

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **more}
        return {**head, "choices": [choice]}

    choice = document["choices"][0]
    message = choice.get("message") or {}
    yield chunk({"role": "assistant", "content": ""})
    for name in ("reasoning_content", "reasoning", "content", "refusal"):
        if message.get(name):
            yield chunk({name: message[name]})
    for index, tool_call in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{**tool_call, "index": index}]})
    stop = {"stop_reason": choice["stop_reason"]} if choice.get("stop_reason") is not None else {}
    yield chunk({}, finish_reason=choice.get("finish_reason"), **stop)
    if document.get("usage"):
        yield {**head, "choices": [], "usage": document["usage"]}
