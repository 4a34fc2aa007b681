"""The socket between a driver and a rollout: messages whole, strangers outside, silence noticed."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from paddock.scale.desk import Desk, Ticket, is_loopback, place_of, tunnel
from paddock.scale.link import Link, LinkLost, Message, call, greet, listening, welcome

ResultT = TypeVar("ResultT")
TOKEN = "a token"


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    return asyncio.run(asyncio.wait_for(work, 10))


@asynccontextmanager
async def linked(silence: float = 8.0) -> AsyncIterator[tuple[Link, Link]]:
    arrived: asyncio.Queue[Link] = asyncio.Queue()

    async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await greet(reader, writer, TOKEN) == ["rollout", "r1"]
        welcome(writer)
        arrived.put_nowait(Link(reader, writer, silence=silence))

    async with listening("127.0.0.1", admit) as port:
        near = Link(*await call("127.0.0.1", port, TOKEN, "rollout", "r1"))
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
            near.post("call", value, b"\0raw" * 100_000)
            await near.drain()
            far.post("kept")
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
            near.post("too late")

    run(lose())


def test_silence_is_a_loss_and_beats_are_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.scale.link.BEAT_SECONDS", 0.02)

    async def listen() -> None:
        async with linked(silence=0.3) as (near, far), near.beating():
            waiting = asyncio.ensure_future(far.receive())
            await asyncio.sleep(0.5)
            near.post("word")
            assert (await waiting).kind == "word"
        async with linked(silence=0.05) as (_, far):
            with pytest.raises(LinkLost, match="nothing was heard"):
                await far.receive()

    run(listen())


def test_who_stood_still_itself_has_not_lost_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.scale.link.BEAT_SECONDS", 0.02)

    async def stand_still() -> None:
        async with linked(silence=0.2) as (near, far), near.beating():
            waiting = asyncio.ensure_future(far.receive())
            await asyncio.sleep(0.05)
            time.sleep(0.6)  # noqa: ASYNC251
            await asyncio.sleep(0.1)
            near.post("word")
            assert (await waiting).kind == "word"

    run(stand_still())


def test_a_cancelled_receive_loses_nothing() -> None:
    frame = Message("call", {"id": "c0"}, b"raw").frame()

    async def cancel() -> None:
        async with linked() as (near, far):
            near.post_frames([frame[:11]])
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(far.receive(), 0.05)
            near.post_frames([frame[11:]])
            assert await far.receive() == Message("call", {"id": "c0"}, b"raw")

    run(cancel())


# -- the desk ---------------------------------------------------------------------------------------


def test_a_rollout_is_let_in_once_and_a_stranger_never() -> None:
    async def knock() -> None:
        async with Desk("127.0.0.1") as desk:
            expected, ticket = desk.expect("r1"), desk.ticket("r1")
            with pytest.raises(LinkLost, match="does not expect"):
                await call(ticket.host, ticket.port, "another token", "rollout", "r1")
            assert not expected.done()
            _, writer = await call(ticket.host, ticket.port, ticket.token, "rollout", "r1")
            (await expected).close()
            writer.close()
            for words in (("rollout", "r1"), ("rollout", "r2"), ("model",), ()):
                with pytest.raises(LinkLost, match="does not expect"):
                    await call(ticket.host, ticket.port, ticket.token, *words)

    run(knock())


def test_one_that_is_dismissed_comes_too_late() -> None:
    async def come_late() -> None:
        async with Desk("127.0.0.1") as desk:
            expected, ticket = desk.expect("r1"), desk.ticket("r1")
            desk.dismiss("r1")
            assert expected.cancelled()
            with pytest.raises(LinkLost):
                await call(ticket.host, ticket.port, ticket.token, "rollout", "r1")

    run(come_late())


def test_nobody_at_the_desk_is_a_loss_that_names_the_place() -> None:
    with pytest.raises(LinkLost, match=r"127\.0\.0\.1:1 cannot be reached"):
        run(call("127.0.0.1", 1, TOKEN, "rollout", "r1"))


def test_a_ticket_does_not_show_its_token() -> None:
    assert "secret" not in repr(Ticket("10.0.0.1", 1, "r1", "secret"))


def test_a_model_of_the_driver_is_reached_through_the_tunnel() -> None:
    """What is sent arrives, both ways, and the end of one side is the end of the other."""

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line.upper())
        finally:
            writer.close()

    async def ask() -> None:
        async with listening("127.0.0.1", shout) as model:
            url = f"http://localhost:{model}/v1"
            async with Desk("127.0.0.1", url) as desk, tunnel(desk.ticket("r1"), url) as near:
                assert near.endswith("/v1")
                assert place_of(near)[1] not in (model, desk.ticket("").port)
                reader, writer = await asyncio.open_connection(*place_of(near))
                writer.write(b"hello\n")
                assert await reader.readline() == b"HELLO\n"
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()

    run(ask())


def test_only_addresses_of_this_machine_need_the_tunnel() -> None:
    assert is_loopback("http://localhost:8000/v1")
    assert is_loopback("http://[::1]:8000/v1")
    assert not is_loopback("https://models.example/v1")
    assert place_of("https://models.example/v1") == ("models.example", 443)
