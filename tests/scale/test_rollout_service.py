"""A driver and its rollouts: each is let in once, strangers never, and the model is reached through the tunnel."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

from paddock.loopback import is_loopback_url
from paddock.scale.node_link import (
    LinkLost,
    connect_to_driver,
    listen,
)
from paddock.scale.rollout_service import RolloutService, RolloutTicket, address_of, tunnel

ResultT = TypeVar("ResultT")
TOKEN = "a token"


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    return asyncio.run(asyncio.wait_for(work, 10))


def test_a_rollout_is_admitted_once_and_an_unknown_one_never() -> None:
    async def knock() -> None:
        async with RolloutService("127.0.0.1") as service:
            expected, ticket = service.expect("r1"), service.ticket("r1")
            with pytest.raises(LinkLost, match="does not expect"):
                await connect_to_driver(ticket.host, ticket.port, "another token", "rollout", "r1")
            assert not expected.done()
            _, writer = await connect_to_driver(ticket.host, ticket.port, ticket.token, "rollout", "r1")
            (await expected).close()
            writer.close()
            for words in (("rollout", "r1"), ("rollout", "r2"), ("model",), ()):
                with pytest.raises(LinkLost, match="does not expect"):
                    await connect_to_driver(ticket.host, ticket.port, ticket.token, *words)

    run(knock())


def test_one_that_is_dismissed_comes_too_late() -> None:
    async def come_late() -> None:
        async with RolloutService("127.0.0.1") as service:
            expected, ticket = service.expect("r1"), service.ticket("r1")
            service.forget("r1")
            assert expected.cancelled()
            with pytest.raises(LinkLost):
                await connect_to_driver(ticket.host, ticket.port, ticket.token, "rollout", "r1")

    run(come_late())


def test_a_driver_that_is_gone_is_named() -> None:
    with pytest.raises(LinkLost, match=r"127\.0\.0\.1:1 cannot be reached"):
        run(connect_to_driver("127.0.0.1", 1, TOKEN, "rollout", "r1"))


def test_a_ticket_does_not_show_its_token() -> None:
    assert "secret" not in repr(RolloutTicket("10.0.0.1", 1, "r1", "secret"))


def test_a_model_of_the_driver_is_reached_through_the_tunnel() -> None:
    """What is sent arrives, both ways, and the end of one side is the end of the other."""

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line.upper())
        finally:
            writer.close()

    async def ask() -> None:
        async with listen("127.0.0.1", shout) as model:
            url = f"http://localhost:{model}/v1"
            async with RolloutService("127.0.0.1", url) as service, tunnel(service.ticket("r1"), url) as near:
                assert near.endswith("/v1")
                assert address_of(near)[1] not in (model, service.ticket("").port)
                reader, writer = await asyncio.open_connection(*address_of(near))
                writer.write(b"hello\n")
                assert await reader.readline() == b"HELLO\n"
                writer.write_eof()
                assert await reader.read() == b""
                writer.close()

    run(ask())


def test_only_addresses_of_this_machine_need_the_tunnel() -> None:
    assert is_loopback_url("http://localhost:8000/v1")
    assert is_loopback_url("http://[::1]:8000/v1")
    assert not is_loopback_url("https://models.example/v1")
    assert address_of("https://models.example/v1") == ("models.example", 443)
