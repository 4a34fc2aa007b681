"""How a stream is cut into reads makes no difference to what is kept, and nothing of a failed attempt is kept."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from paddock.rollouts.capture.dialects import Interpreter
from paddock.rollouts.capture.engines import by_name
from paddock.rollouts.capture.exchange import Exchange
from paddock.rollouts.capture.shaping import Lessons
from paddock.rollouts.masking import Mask
from paddock.rollouts.models.endpoint import Endpoint
from paddock.rollouts.trace import Call, Level
from rollouts.capture.rig import rig, run, settings
from rollouts.capture.scripted import IDS, Scripted, chunks, ok, stream_of

ASKED = {"return_token_ids": True, "logprobs": True, "stream_options": {"include_usage": True}}
ERRORS: dict[str, dict[str, Any] | None] = {
    "an error that is repeated": {"error": {"message": "overloaded", "code": 503}},
    "a field that is refused": {"error": {"message": "unsupported field: min_p", "code": 400}},
    "an error that is final": {"error": {"message": "no", "code": 404}},
    "no JSON": None,
}


class Pieces:
    """An upstream whose attempts are given as the pieces of their streams."""

    def __init__(self, *attempts: list[bytes]) -> None:
        self.attempts = list(attempts)
        self.streams = True
        self.status = 200
        self.headers: dict[str, str] = {}

    async def engine(self, endpoint: Endpoint) -> Any:
        return by_name("vllm")

    def lessons(self, endpoint: Endpoint) -> Lessons:
        return Lessons()

    def learn(self, endpoint: Endpoint, lessons: Lessons) -> None: ...

    @asynccontextmanager
    async def post(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        self.current = self.attempts.pop(0)
        yield self

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self.current:
            if piece:
                yield piece

    async def drain(self) -> None: ...


class Collected:
    def __init__(self) -> None:
        self.begun = False
        self.sent = b""

    async def send(self, events: bytes) -> None:
        self.begun = True
        self.sent += events

    async def answer(self, status: int, document: bytes) -> None:
        self.begun = True
        self.sent += str(status).encode() + document

    async def end(self) -> None: ...


def events(error: dict[str, Any] | None, position: int) -> bytes:
    """A whole stream with an error before the chunk at `position`; none if that is behind the end."""
    lines = [json.dumps(chunk).encode() for chunk in chunks(ASKED)] + [b"[DONE]"]
    if position < len(lines):
        lines.insert(position, b"{not json" if error is None else json.dumps(error).encode())
    return b"".join(b"data: " + line + b"\n\n" for line in lines)


async def exchanged(dialect: str, *attempts: list[bytes]) -> tuple[Call, dict[str, Any]]:
    """The call, and what must be the same of it however the stream is cut."""
    path = {"chat": "/v1/chat/completions", "anthropic": "/v1/messages", "responses": "/v1/responses"}[dialect]
    speaking, place = Interpreter().find(path, {}, {})
    assert place is not None
    message = {"role": "user", "content": "x"}
    turns = {"input": [message]} if dialect == "responses" else {"messages": [message]}
    asked = speaking.read(json.dumps({"model": "m", "stream": True, "max_tokens": 9, **turns}).encode(), place)
    call, reply = Call("c0", 0), Collected()
    exchange = Exchange(
        call=call,
        body=asked.chat,
        writer=speaking.writer(asked, "m", usage=False),
        refuse=speaking.error,
        endpoint=Endpoint("http://none/v1", "m", engine="vllm"),
        upstream=cast("Any", Pieces(*attempts)),
        settings=settings(first_pause=1e-6, longest_pause=1e-6),
        reply=reply,
        mask=Mask(()),
        headers={},
        room=9,
        limit=asyncio.get_running_loop().time() + 10,
    )
    await exchange.run()
    kept = {name: getattr(call, name) for name in ("completion_token_ids", "logprobs", "tokens", "message", "error")}
    kept |= {"retries": len(call.attempts), "trainable": call.trainable, "events": reply.sent.count(b"\n\n")}
    return call, kept


@pytest.mark.parametrize("dialect", ["chat", "anthropic", "responses"])
@pytest.mark.parametrize("error", ERRORS)
def test_every_cut_of_a_stream_gives_the_same_call(dialect: str, error: str) -> None:
    async def body() -> None:
        clean = [events(None, 99)]
        for position in range(len(chunks(ASKED)) + 2):
            stream = events(ERRORS[error], position)
            call, whole = await exchanged(dialect, [stream], clean)
            assert (call.completion_token_ids == IDS) if call.trainable else call.error
            for cut in range(1, len(stream), 1 if dialect == "chat" else 13):
                assert (await exchanged(dialect, [stream[:cut], stream[cut:]], clean))[1] == whole, (position, cut)
            single = [stream[at : at + 1] for at in range(len(stream))]
            assert (await exchanged(dialect, single, clean))[1] == whole, position

    run(body())


@pytest.mark.parametrize("error", ERRORS)
def test_two_tokens_and_an_error_in_one_read_are_no_part_of_another_answer(error: str) -> None:
    async def body() -> None:
        call, _ = await exchanged("chat", [events(ERRORS[error], 3)], [events(None, 99)])
        assert (call.completion_token_ids, call.message["content"]) == (IDS[:2], "Hello")
        assert (call.trainable, call.finish_reason, call.attempts) == (False, None, [])

    run(body())


@pytest.mark.parametrize("named", [3, 6])
@pytest.mark.parametrize("stream", [False, True])
def test_ids_that_the_usage_does_not_count_are_not_trained_on(named: int, stream: bool) -> None:
    ids = [11, 12, 11, 12, 13, 2][-named:]
    entry = {"token": "x", "logprob": -0.5}

    def streamed(asked: dict[str, Any]) -> list[dict[str, Any]]:
        made = chunks(asked)
        for number in (2, 3):
            del made[number]["choices"][0]["token_ids"], made[number]["choices"][0]["logprobs"]
        more = {"token_ids": ids[:-1], "logprobs": {"content": [entry] * (named - 1)}}
        made[1]["choices"][0] |= more
        return made

    whole = {"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop", "index": 0}
    whole |= {"token_ids": ids, "logprobs": {"content": [entry] * named}}

    async def body() -> None:
        async with rig(Scripted(stream_of(streamed) if stream else ok(choices=[whole]))) as r:
            await r.ask(stream=stream)
            call = await r.last()
            assert (call.level, call.trainable) == (Level.LOGPROBS, False)
            reason = f"the endpoint counted 4 sampled tokens in its usage, and returned {named} token ids"
            assert call.untrainable_because == reason

    run(body())
