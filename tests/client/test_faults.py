"""Connections that drop at every boundary: nothing is executed twice, and no answer is lost."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from environments import Adder, AsyncScripted, InlineAdder, Kit, Watched
from paddock import Client, VectorClient
from paddock.client.reconnect import Reconnect, Timeouts
from paddock.errors import ConnectFailed, DeadlineExceeded, EpisodeLost, OutcomeUnknown
from running import Serve

from .conftest import until
from .faults import FaultyProxy
from .proxy import Proxy

pytestmark = pytest.mark.anyio
QUICK = Reconnect(within=8, first_pause=0.005, longest_pause=0.02)
PATIENT = Timeouts(request=20)


@pytest.fixture
async def faulty() -> AsyncIterator[Any]:
    made: list[Proxy] = []

    async def build(port: int, seed: int, **options: Any) -> FaultyProxy:
        proxy = FaultyProxy(port, seed, **options)
        await proxy.open()
        made.append(proxy)
        return proxy

    yield build
    for proxy in made:
        await proxy.close()


def over_http(url: str, reconnect: Reconnect = QUICK, timeout: float = 20) -> Client[Any]:
    return Client(url, transport="http", reconnect=reconnect, timeouts=Timeouts(request=timeout))


async def count_up(env: Client[Any], proxy: FaultyProxy, rounds: int = 120) -> int:
    """Step, look and reset in turn, and compare every answer. Returns how many steps were made."""
    await env.reset(seed=0)
    proxy.is_calm = False
    total = made = 0
    for n in range(rounds):
        if n % 25 == 24:
            total = (await env.reset(seed=n)).observation["total"]
            assert total == n
        total, made = total + 1, made + 1
        assert (await env.step({"amount": 1})).observation["total"] == total
        if n % 10 == 9:
            assert (await env.state())["total"] == total
    return made


@pytest.mark.parametrize("make", [Adder, InlineAdder])
@pytest.mark.parametrize("transport", ["ws", "http"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_a_counter_is_exact(
    serve: Serve, faulty: Any, lives: list[Watched], transport: str, seed: int, make: Any
) -> None:
    proxy = await faulty(serve(make).port, seed)
    async with Client(proxy.url, transport=transport, reconnect=QUICK, timeouts=PATIENT) as env:
        made = await count_up(env, proxy)
        proxy.is_calm = True
    assert proxy.cuts > 20
    assert (len(lives), lives[0].steps) == (1, made)


async def test_a_counter_is_exact_with_many_requests_in_flight(
    serve: Serve, faulty: Any, lives: list[Watched]
) -> None:
    proxy = await faulty(serve(Adder).port, 3, every=6, most=60)
    async with Client(proxy.url, reconnect=QUICK, timeouts=PATIENT) as env:
        await env.reset()
        proxy.is_calm, total = False, 0
        for count in (5, 200, 1, 90, 130):
            answers = await asyncio.gather(*(env.step({"amount": 1}) for _ in range(count)))
            assert [answer.observation["total"] for answer in answers] == list(range(total + 1, total + count + 1))
            total += count
        proxy.is_calm = True
    assert proxy.cuts > 5
    assert lives[0].steps == total


async def test_every_counter_of_a_vector_is_exact(serve: Serve, faulty: Any, lives: list[Watched]) -> None:
    proxy = await faulty(serve(InlineAdder, max_sessions=8).port, 4)
    async with VectorClient(proxy.url, 8, reconnect=QUICK, timeouts=PATIENT) as envs:
        proxy.is_calm = False
        await envs.reset_all()
        for n in range(1, 41):
            results = await envs.step_all([{"amount": 1}] * 8)
            assert [result.observation["total"] for result in results] == [n] * 8  # type: ignore[union-attr]
        proxy.is_calm = True
    assert proxy.cuts > 10
    assert sum(life.steps for life in lives) == 320


async def test_tools_over_http_are_called_once(serve: Serve, faulty: Any, lives: list[Watched]) -> None:
    proxy = await faulty(serve(Kit).port, 5)
    async with over_http(proxy.url) as env:
        await env.reset()
        proxy.is_calm = False
        for n in range(1, 60):
            assert (await env.call_tool("add", amount=1)).value == n
        proxy.is_calm = True
    assert proxy.cuts > 10
    assert lives[0].steps == 59


class Losing(Proxy):
    """Delivers every request, and loses what comes back while `is_losing`."""

    is_losing = False

    async def _down(self, pair: Any, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            if self.is_losing:
                pair.cut()
                return
            pair.near.write(data)
        pair.near.close()


@pytest.fixture
async def losing(serve: Serve) -> AsyncIterator[Losing]:
    proxy = Losing(serve(AsyncScripted).port)
    await proxy.open()
    yield proxy
    await proxy.close()


async def test_an_answer_that_stays_lost_leaves_the_outcome_unknown(losing: Losing, lives: list[Watched]) -> None:
    async with over_http(losing.url, Reconnect(within=0.2, first_pause=0.02)) as env:
        await env.reset()
        losing.is_losing = True
        with pytest.raises(OutcomeUnknown, match="step may have been executed") as error:
            await env.step({"value": 1})
        assert not isinstance(error.value, ConnectFailed)
        assert error.value.code == "OUTCOME_UNKNOWN"
        losing.is_losing = False
        assert (await env.step({"value": 2})).observation["value"] == 2
    assert lives[0].steps == 2


async def test_without_a_session_nothing_is_repeated(losing: Losing, lives: list[Watched]) -> None:
    env = over_http(losing.url)
    losing.is_losing = True
    with pytest.raises(OutcomeUnknown, match="step may have been executed"):
        await env.step({"value": 1})
    assert [life.steps for life in lives] == [1]
    await env.close()


async def test_a_first_reset_is_repeated(losing: Losing, lives: list[Watched]) -> None:
    async with over_http(losing.url) as env:
        losing.is_losing = True
        reset = asyncio.create_task(env.reset())
        await until(lambda: lives)
        losing.is_losing = False
        await reset
        assert (await env.step({"value": 1})).observation["value"] == 1
    assert sum(life.steps for life in lives) == 1


async def test_a_client_that_is_closed_after_a_drop_frees_its_slot(serve: Serve, through: Any) -> None:
    server = serve(Adder)
    proxy = await through(server.port)
    env = Client[Any](proxy.url, reconnect=Reconnect(within=30, first_pause=20))
    await env.reset()
    proxy.refuse = True
    proxy.cut()
    await until(lambda: proxy.connections > 1 and not server.service.manager.sessions()[0].attached)
    proxy.refuse = False
    await env.close()
    assert server.service.manager.statistics().sessions == 0


async def test_a_request_that_was_never_sent_says_so() -> None:
    env = over_http("http://127.0.0.1:9")
    with pytest.raises(ConnectFailed, match="cannot reach"):
        await env.step({"value": 1})


async def test_a_step_goes_on_over_http_while_its_client_repeats_it(
    serve: Serve, through: Any, lives: list[Watched]
) -> None:
    proxy = await through(serve(AsyncScripted).port)
    async with over_http(proxy.url) as env:
        await env.reset()
        step = asyncio.create_task(env.step({"sleep": 0.3, "value": "x"}))
        await until(lambda: lives[0].steps)
        proxy.cut()
        assert (await step).observation["value"] == "x"
    assert (lives[0].steps, lives[0].cancelled) == (1, 0)


async def test_a_step_that_is_given_up_over_http_is_stopped(serve: Serve, lives: list[Watched]) -> None:
    async with over_http(serve(AsyncScripted).url) as env:
        await env.reset()
        step = asyncio.create_task(env.step({"hang": True}))
        await until(lambda: lives[0].steps)
        step.cancel()
        await until(lambda: lives[0].cancelled)
        assert (await env.step({"value": 1})).observation["value"] == 1


async def test_a_deadline_over_http_says_that_the_step_may_have_been_executed(serve: Serve) -> None:
    async with over_http(serve(AsyncScripted).url) as env:
        await env.reset()
        with pytest.raises(DeadlineExceeded) as error:
            await env.step({"hang": True}, timeout=0.2)
        assert "may have been executed" in (error.value.hint or "")


@pytest.mark.parametrize("number", [2, 3])
async def test_a_late_step_is_refused_after_the_next_reset(serve: Serve, lives: list[Watched], number: int) -> None:
    server = serve(Adder)
    http, body = server.http(), {"action": {"amount": 1}}
    token = http("POST", "/reset", {}, request_number="1").headers["session-id"]
    named = {"session_id": token}
    if number == 2:
        assert http("POST", "/step", body, request_number="2", **named).status == 200
    http("POST", "/reset", {}, request_number="4", **named)
    late = http("POST", "/step", body, request_number=str(number), **named)
    assert (late.status, late.json["kind"]) == (409, "reply_expired")
    assert http("GET", "/state", None, **named).json["total"] == 0
    assert lives[0].steps == (1 if number == 2 else 0)


async def test_a_server_that_restarted_has_lost_the_episode_over_http(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with over_http(proxy.url) as env:
        await env.reset()
        proxy.upstream = serve(Adder).port
        proxy.cut()
        with pytest.raises(EpisodeLost):
            await env.step({"amount": 1})
        await env.reset()
        assert (await env.step({"amount": 2})).observation["total"] == 2


async def test_requests_over_http_are_made_in_turn(serve: Serve, lives: list[Watched]) -> None:
    async with over_http(serve(Adder).url) as env:
        await env.reset()
        answers = await asyncio.gather(*(env.step({"amount": 1}) for _ in range(20)))
        assert [answer.observation["total"] for answer in answers] == list(range(1, 21))


async def test_a_number_that_is_none_is_refused(serve: Serve) -> None:
    http = serve(Adder).http()
    token = http("POST", "/reset", {}).headers["session-id"]
    refused = http("POST", "/step", {"action": {"amount": 1}}, session_id=token, request_number="x")
    assert (refused.status, refused.json["detail"][0]["loc"]) == (422, ["header", "request-number"])
