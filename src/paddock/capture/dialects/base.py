"""What a dialect is: it turns an agent's request into a chat completion, and the response back into its own form.

Inference engines always get chat completions. A dialect reads a request into that form and writes the reply in its
own, as one document or as a stream. It does no IO and knows neither engines nor records. A dialect object lives as
long as its rollout, so it may keep replies that later requests refer to.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson

from paddock.capture.errors import BadRequest
from paddock.protocol.sse import MEDIA_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paddock.capture.errors import ErrorReply

JSON = "application/json"
ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Every escape of a JSON text; `half` is one half of a surrogate pair without the other."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a path of a dialect serves."""

    action: Literal["complete", "count_tokens", "lookup"]
    method: str = "POST"
    stream: bool | None = None
    """Whether to stream, if the path decides; None if the body does."""
    name: str = ""
    """The model, or another name in the path."""
    format: str = ""
    """A variant of the reply's format, if the dialect has several."""


@dataclass(slots=True)
class DialectRequest:
    """A parsed request."""

    body: dict[str, Any]
    """In the agent's own dialect, as it is recorded."""
    chat: dict[str, Any]
    """The same as a chat completion request."""
    model: str | None = None
    """The model name that the agent used."""
    notes: list[str] = field(default_factory=list)
    """What could not be translated, for the log."""
    route: Route = field(default_factory=lambda: Route("complete"))
    special_tools: dict[str, Any] = field(default_factory=dict)
    """Tools that are no functions in this dialect, by the name of the function that replaces each."""

    @property
    def is_stream(self) -> bool:
        """Whether the agent asked for a stream."""
        return bool(self.chat.get("stream"))


class ReplyWriter(ABC):
    """Writes the reply of one attempt. Everything that it has written was sent."""

    content_type: str = MEDIA_TYPE
    """The content type of a stream."""
    finish_completes: ClassVar[bool] = False
    """Whether an agent has the whole reply with the chunk that holds its finish reason, and may disconnect then.
    Otherwise the reply is complete only with what `write_end` returns."""

    @abstractmethod
    def write_document(self, document: dict[str, Any]) -> bytes:
        """A whole response of the engine."""

    @abstractmethod
    def write_chunk(self, raw: bytes, chunk: dict[str, Any], *, changed: bool) -> bytes:
        """One more chunk of a stream. `raw` is how it arrived; `changed`: `raw` no longer equals `chunk`."""

    @abstractmethod
    def write_end(self) -> bytes:
        """The end of a complete stream."""

    @abstractmethod
    def write_error(self, error: ErrorReply) -> bytes:
        """The end of a stream that failed."""

    @abstractmethod
    def write_keep_alive(self) -> bytes:
        """Bytes without a meaning, which keep the connection open."""

    def writes_error_in_stream(self, error: ErrorReply) -> bool:
        """Whether agents understand this error only inside a stream, even if none has started."""
        return False

    def write_as_stream(self, document: dict[str, Any]) -> bytes:
        """A whole response as a whole stream."""
        events = [self.write_chunk(b"", chunk, changed=True) for chunk in split_into_chunks(document)]
        return b"".join((*events, self.write_end()))


class Dialect(ABC):
    """One API, for one rollout."""

    name: ClassVar[str]
    """The name of the module."""
    path: ClassVar[str]
    """The path of a completion, for messages and documentation."""
    key_header: ClassVar[str | None] = None
    """The header with the API key, if it is not `Authorization: Bearer`."""

    @abstractmethod
    def find_route(self, path: str, query: Mapping[str, str]) -> Route | None:
        """What is served at a path; None if the path is not this dialect's."""

    def matches(self, headers: Mapping[str, str], query: Mapping[str, str]) -> bool:
        """Whether a request to a path that several dialects have is in this one."""
        return False

    @abstractmethod
    def parse(self, raw: bytes, route: Route) -> DialectRequest:
        """Raises BadRequest."""

    @abstractmethod
    def to_chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """A recorded request as a chat completion. Raises BadRequest."""

    @abstractmethod
    def make_writer(self, request: DialectRequest, model: str, *, include_usage: bool) -> ReplyWriter:
        """For the reply to a request. `include_usage`: also to an agent that did not request the usage."""

    @abstractmethod
    def error_body(self, error: ErrorReply) -> bytes:
        """The body of an error response."""

    @abstractmethod
    def token_count_body(self, tokens: int) -> bytes:
        """The body of the response to `count_tokens`."""

    @abstractmethod
    def lookup_body(self, route: Route, model: str) -> bytes | None:
        """The body of the response to `lookup`, such as the list of models; None if there is no such thing."""


def load_body(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises BadRequest."""
    try:
        body = orjson.loads(raw or b"null")
    except orjson.JSONDecodeError:
        try:
            body = orjson.loads(replace_half_surrogates(raw))
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def replace_half_surrogates(raw: bytes) -> bytes:
    """Agents in JavaScript write them when they cut a text within an emoji. No tokenizer has ids for them."""
    return ESCAPES.sub(lambda escape: rb"\ufffd" if escape["half"] else escape[0], raw)


def check_depth(body: dict[str, Any]) -> None:
    """Raises BadRequest for a body that recursive code could not walk."""
    try:
        orjson.dumps(body)
    except TypeError:
        raise BadRequest("the body is nested too deeply") from None


def text_completion(text: str, model: str) -> dict[str, Any]:
    """A chat completion that only holds a text, which ends an agent's loop."""
    return {
        "id": "paddock-stop",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def split_into_chunks(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole response as the chunks of a stream."""
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


# -- replies that later requests refer to by id -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredReply:
    """One request and its reply."""

    previous: str | None
    items: list[dict[str, Any]]
    """Input and output, without what the previous one holds."""
    document: dict[str, Any]
    context: dict[str, Any]
    """Other fields that the dialect needs to continue."""


class ReplyStore:
    """The replies of one rollout, for dialects in which a request may continue an earlier reply by its id."""

    def __init__(self) -> None:
        self._replies: dict[str, StoredReply] = {}

    def get(self, reply_id: Any) -> StoredReply | None:
        """The reply with this id; None if it is unknown or was dropped."""
        return self._replies.get(reply_id) if isinstance(reply_id, str) else None

    def history(self, reply_id: str | None) -> list[dict[str, Any]]:
        """All items up to a stored reply."""
        chain = []
        while reply_id is not None:
            reply = self._replies[reply_id]
            chain.append(reply.items)
            reply_id = reply.previous
        return [item for items in reversed(chain) for item in items]

    def add(
        self,
        document: dict[str, Any],
        previous: str | None,
        conversation: list[dict[str, Any]],
        output: list[dict[str, Any]],
        context: dict[str, Any] | None = None,
    ) -> None:
        """Store a reply to a whole conversation. Only what it adds to the previous one takes memory."""
        items = conversation[len(self.history(previous)) :] + output
        self._replies[document["id"]] = StoredReply(previous, items, document, context or {})
