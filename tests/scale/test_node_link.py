"""The socket between a driver and a rollout: messages whole, strangers outside, silence noticed."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from paddock.scale.node_link import (
    LinkLost,
    LinkMessage,
    NodeLink,
    accept_caller,
    challenge_caller,
    connect_to_driver,
    listen,
)

ResultT = TypeVar("ResultT")
TOKEN = "a token"


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    return asyncio.run(asyncio.wait_for(work, 10))


@asynccontextmanager
async def linked(silence: float = 8.0) -> AsyncIterator[tuple[NodeLink, NodeLink]]:
    arrived: asyncio.Queue[NodeLink] = asyncio.Queue()

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await challenge_caller(reader, writer, TOKEN) == ["rollout", "r1"]
        accept_caller(writer)
        arrived.put_nowait(NodeLink(reader, writer, silence=silence))

    async with listen("127.0.0.1", admit) as port:
        near = NodeLink(*await connect_to_driver("127.0.0.1", port, TOKEN, "rollout", "r1"))
        far = await arrived.get()
        try:
            yield near, far
        finally:
            near.close()
            far.close()


def test_a_message_arrives_as_it_was_sent() -> None:
    value = {"words": "ü\ud800", "floats": [0.1, -math.inf], "none": None}

    async def exchange() -> None:
        async with linked() as (near, far):
            near.send("call", value, b"\0raw" * 100_000)
            await near.drain()
            far.send("kept")
            message = await far.receive()
            assert (message.kind, message.value, len(message.raw)) == ("call", value, 400_000)
            assert (await near.receive()).kind == "kept"

    run(exchange())


def test_a_closed_end_is_known_at_once() -> None:
    async def lose() -> None:
        async with linked() as (near, far):
            near.close()
            with pytest.raises(LinkLost, match="ended"):
                await far.receive()
            near.send("too late")

    run(lose())


def test_silence_is_a_loss_and_beats_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.scale.node_link.HEARTBEAT_SECONDS", 0.02)

    async def listen() -> None:
        async with linked(silence=0.3) as (near, far), near.keep_alive():
            waiting = asyncio.ensure_future(far.receive())
            await asyncio.sleep(0.5)
            near.send("word")
            assert (await waiting).kind == "word"
        async with linked(silence=0.05) as (_, far):
            with pytest.raises(LinkLost, match="nothing was heard"):
                await far.receive()

    run(listen())


def test_who_stood_still_itself_has_not_lost_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.scale.node_link.HEARTBEAT_SECONDS", 0.02)

    async def stand_still() -> None:
        async with linked(silence=0.2) as (near, far), near.keep_alive():
            waiting = asyncio.ensure_future(far.receive())
            await asyncio.sleep(0.05)
            time.sleep(0.6)  # noqa: ASYNC251
            await asyncio.sleep(0.1)
            near.send("word")
            assert (await waiting).kind == "word"

    run(stand_still())


def test_a_cancelled_receive_loses_nothing() -> None:
    frame = LinkMessage("call", {"id": "c0"}, b"raw").frame()

    async def cancel() -> None:
        async with linked() as (near, far):
            near.send_frames([frame[:11]])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(far.receive(), 0.05)
            near.send_frames([frame[11:]])
            assert await far.receive() == LinkMessage("call", {"id": "c0"}, b"raw")

    run(cancel())
