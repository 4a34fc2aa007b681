"""The record does not depend on how a stream is split into reads, and holds nothing of a failed attempt."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from capture.harness import run, settings, start_proxy
from capture.scripted_model import IDS, ScriptedModel, chunks, ok, stream_of
from paddock.capture.dialects import DialectRouter
from paddock.capture.engines import find_engine
from paddock.capture.exchange import Exchange
from paddock.capture.masking import Mask
from paddock.capture.trace import Call, Level
from paddock.capture.upstream_request import Compatibility
from paddock.models.endpoint import Endpoint

REQUEST = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
ERRORS: dict[str, dict[str, Any] | None] = {
    "an error that is repeated": {"error": {"message": "overloaded", "code": 503}},
    "a field that is refused": {"error": {"message": "unsupported field: min_p", "code": 400}},
    "an error that is final": {"error": {"message": "no", "code": 404}},
    "no JSON": None,
}


class PiecewiseUpstream:
    """An upstream whose attempts are lists of the pieces of a stream."""

    def __init__(self, *attempts: list[bytes]) -> None:
        self.attempts = list(attempts)
        self.is_stream = True
        self.status = 200
        self.headers: dict[str, str] = {}

    async def detect_engine(self, endpoint: Endpoint) -> Any:
        return find_engine("vllm")

    def compatibility(self, endpoint: Endpoint) -> Compatibility:
        return Compatibility()

    def set_compatibility(self, endpoint: Endpoint, compatibility: Compatibility) -> None: ...

    @asynccontextmanager
    async def post(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.current = self.attempts.pop(0)
        yield self

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self.current:
            if piece:
                yield piece

    async def drain(self) -> None: ...


class CollectedReply:
    def __init__(self) -> None:
        self.has_started = False
        self.sent = b""

    async def send_events(self, events: bytes) -> None:
        self.has_started = True
        self.sent += events

    async def send_document(self, status: int, document: bytes) -> None:
        self.has_started = True
        self.sent += str(status).encode() + document

    async def finish(self) -> None: ...


def events(error: dict[str, Any] | None, position: int) -> bytes:
    """A whole stream with an error before the chunk at `position`; none if that is behind the end."""
    lines = [json.dumps(chunk).encode() for chunk in chunks(REQUEST)] + [b"[DONE]"]
    if position < len(lines):
        lines.insert(position, b"{not json" if error is None else json.dumps(error).encode())
    return b"".join(b"data: " + line + b"\n\n" for line in lines)


async def run_exchange(name: str, *attempts: list[bytes]) -> tuple[Call, dict[str, Any]]:
    """The call, and the parts of its record that must not depend on how the stream is split."""
    path = {"chat": "/v1/chat/completions", "anthropic": "/v1/messages", "responses": "/v1/responses"}[name]
    dialect, route = DialectRouter().find(path, {}, {})
    assert route is not None
    message = {"role": "user", "content": "x"}
    turns = {"input": [message]} if name == "responses" else {"messages": [message]}
    request = dialect.parse(json.dumps({"model": "m", "stream": True, "max_tokens": 9, **turns}).encode(), route)
    call, reply = Call("c0", 0), CollectedReply()
    exchange = Exchange(
        call=call,
        chat=request.chat,
        writer=dialect.make_writer(request, "m", include_usage=False),
        error_body=dialect.error_body,
        endpoint=Endpoint("http://none/v1", "m", engine="vllm"),
        upstream=cast("Any", PiecewiseUpstream(*attempts)),
        settings=settings(first_pause=1e-6, longest_pause=1e-6),
        reply=reply,
        mask=Mask(()),
        headers={},
        max_tokens=9,
        ends_at=asyncio.get_running_loop().time() + 10,
    )
    await exchange.run()
    recorded = {
        name: getattr(call, name) for name in ("completion_token_ids", "logprobs", "tokens", "message", "error")
    }
    recorded |= {"retries": len(call.attempts), "trainable": call.trainable, "events": reply.sent.count(b"\n\n")}
    return call, recorded


@pytest.mark.parametrize("dialect", ["chat", "anthropic", "responses"])
@pytest.mark.parametrize("error", ERRORS)
def test_every_split_of_a_stream_gives_the_same_call(dialect: str, error: str) -> None:
    async def body() -> None:
        clean = [events(None, 99)]
        for position in range(len(chunks(REQUEST)) + 2):
            stream = events(ERRORS[error], position)
            call, whole = await run_exchange(dialect, [stream], clean)
            assert (call.completion_token_ids == IDS) if call.trainable else call.error
            for cut in range(1, len(stream), 1 if dialect == "chat" else 13):
                assert (await run_exchange(dialect, [stream[:cut], stream[cut:]], clean))[1] == whole, (position, cut)
            single = [stream[at : at + 1] for at in range(len(stream))]
            assert (await run_exchange(dialect, single, clean))[1] == whole, position

    run(body())


@pytest.mark.parametrize("error", ERRORS)
def test_tokens_before_an_error_in_one_read_are_not_in_another_response(error: str) -> None:
    async def body() -> None:
        call, _ = await run_exchange("chat", [events(ERRORS[error], 3)], [events(None, 99)])
        assert (call.completion_token_ids, call.message["content"]) == (IDS[:2], "Hello")
        assert (call.trainable, call.finish_reason, call.attempts) == (False, None, [])

    run(body())


@pytest.mark.parametrize("named", [3, 6])
@pytest.mark.parametrize("stream", [False, True])
def test_ids_that_the_usage_does_not_count_are_not_trained_on(named: int, stream: bool) -> None:
    ids = [11, 12, 11, 12, 13, 2][-named:]
    entry = {"token": "x", "logprob": -0.5}

    def streamed(request: dict[str, Any]) -> list[dict[str, Any]]:
        made = chunks(request)
        for number in (2, 3):
            del made[number]["choices"][0]["token_ids"], made[number]["choices"][0]["logprobs"]
        more = {"token_ids": ids[:-1], "logprobs": {"content": [entry] * (named - 1)}}
        made[1]["choices"][0] |= more
        return made

    whole = {"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop", "index": 0}
    whole |= {"token_ids": ids, "logprobs": {"content": [entry] * named}}

    async def body() -> None:
        async with start_proxy(ScriptedModel(stream_of(streamed) if stream else ok(choices=[whole]))) as proxy:
            await proxy.chat(stream=stream)
            call = await proxy.last_call()
            assert (call.level, call.trainable) == (Level.LOGPROBS, False)
            reason = f"the endpoint counted 4 sampled tokens in its usage, and returned {named} token ids"
            assert call.untrainable_because == reason

    run(body())
