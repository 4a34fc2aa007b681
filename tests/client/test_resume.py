"""An episode outlives its connection, and no step is carried out twice."""

import asyncio
import random
import time
from typing import Any

import pytest

from environments import Adder, AsyncScripted, InlineAdder, Kit, Scripted, Watched
from paddock import Client
from paddock.client.reconnect import Reconnect, Timeouts
from paddock.errors import ClientError, ConnectFailed, DeadlineExceeded, EpisodeLost, InvalidMessage
from paddock.protocol.resume import WINDOW
from running import Serve

from .conftest import until

pytestmark = pytest.mark.anyio
QUICK = Reconnect(within=5, first_pause=0.01, longest_pause=0.05)
BRIEF = Reconnect(within=0.3, first_pause=0.01, longest_pause=0.05)


def client(url: str, reconnect: Reconnect = QUICK, **options: Any) -> Client[Any]:
    return Client(url, reconnect=reconnect, timeouts=Timeouts(request=6), **options)


async def test_a_cut_between_steps_is_not_noticed(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        for n in range(1, 6):
            assert (await env.step({"amount": 1})).observation["total"] == n
            proxy.cut()
        assert (await env.state())["total"] == 5
    assert (len(lives), lives[0].steps) == (1, 5)
    assert env.transport.reconnects >= 4


@pytest.mark.parametrize("make", [Adder, InlineAdder])
async def test_a_request_that_was_lost_is_sent_again(
    serve: Serve, through: Any, lives: list[Watched], make: Any
) -> None:
    proxy = await through(serve(make).port)
    async with client(proxy.url) as env:
        await env.reset()
        for n in range(1, 6):
            proxy.cut_requests = 1
            assert (await env.step({"amount": 1})).observation["total"] == n
    assert (len(lives), lives[0].steps) == (1, 5)


@pytest.mark.parametrize("make", [Adder, InlineAdder])
async def test_a_step_whose_answer_was_lost_is_not_carried_out_twice(
    serve: Serve, through: Any, lives: list[Watched], make: Any
) -> None:
    proxy = await through(serve(make).port)
    async with client(proxy.url) as env:
        await env.reset()
        for n in range(1, 6):
            proxy.cut_answers = 1
            assert (await env.step({"amount": 1})).observation["total"] == n
    assert (len(lives), lives[0].steps) == (1, 5)


async def test_one_step_survives_many_cuts(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.cut_requests, proxy.cut_answers = 3, 4
        assert (await env.step({"amount": 7})).observation["total"] == 7
    assert lives[0].steps == 1
    assert env.transport.reconnects == 7


async def test_a_long_episode_on_a_bad_network(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy, dice = await through(serve(Adder).port), random.Random(7)
    async with client(proxy.url) as env:
        await env.reset()
        for n in range(1, 61):
            proxy.cut_requests, proxy.cut_answers = dice.choice([(0, 0), (1, 0), (0, 1), (1, 1)])
            assert (await env.step({"amount": 1})).observation["total"] == n
        proxy.cut_requests = proxy.cut_answers = 0
        assert (await env.state())["step_count"] == 60
    assert (len(lives), lives[0].steps) == (1, 60)


async def test_concurrent_requests_all_get_their_answers(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Scripted).port)
    async with client(proxy.url) as env:
        await env.reset()
        steps = [asyncio.create_task(env.step({"sleep": 0.02, "value": n})) for n in range(10)]
        for _ in range(5):
            await asyncio.sleep(0.03)
            proxy.cut()
        assert [(await step).observation["value"] for step in steps] == list(range(10))
    assert lives[0].steps == 10


@pytest.mark.parametrize("size", [1, 300_000])
async def test_more_requests_than_the_server_keeps_answers_are_all_answered(
    serve: Serve, through: Any, lives: list[Watched], size: int
) -> None:
    count = 200 if size == 1 else 40
    proxy = await through(serve(Scripted).port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.swallow_answers = True
        steps = [asyncio.create_task(env.step({"value": f"{n}" * size})) for n in range(count)]
        await until(lambda: lives[0].steps >= min(count, WINDOW))
        proxy.swallow_answers = False
        proxy.cut()
        answers = await asyncio.gather(*steps)
        assert [answer.observation["value"][: len(str(n))] for n, answer in enumerate(answers)] == [
            str(n) for n in range(count)
        ]
    assert lives[0].steps == count


async def test_a_request_behind_the_window_can_be_given_up(serve: Serve, lives: list[Watched]) -> None:
    server = serve(AsyncScripted)
    async with client(server.url) as env:
        await env.reset()
        steps = [asyncio.create_task(env.step({"sleep": 0.5 if n == 0 else 0})) for n in range(WINDOW + 2)]
        await until(lambda: lives[0].steps)
        steps[-2].cancel()
        await asyncio.wait(steps)
        assert [step.cancelled() for step in steps] == [False] * WINDOW + [True, False]
    assert lives[0].steps == WINDOW + 1


async def test_a_step_goes_on_while_its_client_is_away(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(AsyncScripted).port)
    async with client(proxy.url) as env:
        await env.reset()
        step = asyncio.create_task(env.step({"sleep": 0.3, "value": "x"}))
        await until(lambda: lives[0].steps)
        proxy.cut()
        assert (await step).observation["value"] == "x"
    assert (lives[0].steps, lives[0].cancelled) == (1, 0)


async def test_tool_calls_are_carried_out_once_too(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Kit).port)
    async with client(proxy.url) as env:
        for n in range(1, 6):
            proxy.cut_answers, proxy.cut_requests = n % 2, (n + 1) % 2
            assert (await env.call_tool("add", amount=1)).value == n
    assert lives[0].steps == 5


async def test_an_error_whose_answer_was_lost_is_raised_once(
    serve: Serve, through: Any, lives: list[Watched]
) -> None:
    proxy = await through(serve(Scripted).port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.cut_answers = 1
        with pytest.raises(Exception, match="no"):
            await env.step({"fail": "no"})
        assert (await env.step({"value": 1})).observation["value"] == 1
    assert lives[0].steps == 2


async def test_a_wrong_action_on_a_bad_network_is_refused_once(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.cut_answers = 1
        with pytest.raises(InvalidMessage):
            await env.step({"amount": -1})
        assert (await env.step({"amount": 1})).observation["total"] == 1


async def test_a_server_that_restarted_has_lost_the_episode(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        await env.step({"amount": 1})
        token = env.transport._token  # type: ignore[attr-defined]
        proxy.upstream = serve(Adder).port
        proxy.cut()
        with pytest.raises(EpisodeLost) as lost:
            await env.step({"amount": 1})
        assert "reset" in (lost.value.hint or "")
        assert token not in str(lost.value)
        with pytest.raises(EpisodeLost):
            await env.state()
        await env.reset()
        assert (await env.step({"amount": 2})).observation["total"] == 2


async def test_a_step_under_way_when_the_server_restarts_is_lost(
    serve: Serve, through: Any, lives: list[Watched]
) -> None:
    proxy = await through(serve(AsyncScripted).port)
    async with client(proxy.url) as env:
        await env.reset()
        step = asyncio.create_task(env.step({"hang": True}))
        await until(lambda: lives[0].steps)
        proxy.upstream = serve(AsyncScripted).port
        proxy.cut()
        with pytest.raises(EpisodeLost):
            await step


async def test_a_server_that_drains_loses_the_episode(serve: Serve) -> None:
    server = serve(Adder)
    async with client(server.url, BRIEF) as env:
        await env.reset()
        server.begin_to_stop()
        await until(lambda: not server.thread.is_alive())
        with pytest.raises(EpisodeLost):
            await env.step({"amount": 1})


async def test_a_server_that_stays_away_has_lost_the_episode(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url, BRIEF) as env:
        await env.reset()
        proxy.refuse = True
        proxy.cut()
        with pytest.raises(EpisodeLost):
            await asyncio.wait_for(env.step({"amount": 1}), 3)
        proxy.refuse = False
        assert (await env.reset()).observation["total"] == 0


async def test_a_server_that_never_answers_is_given_up(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url, BRIEF) as env:
        await env.reset()
        before, proxy.cut_requests = proxy.connections, 1_000_000
        with pytest.raises(EpisodeLost):
            await asyncio.wait_for(env.step({"amount": 1}), 3)
        assert proxy.connections - before < 20
        proxy.cut_requests = 0
        assert (await env.reset()).observation["total"] == 0


async def test_every_answer_begins_the_tries_anew(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url, Reconnect(within=0.3, first_pause=0.1, longest_pause=0.1)) as env:
        await env.reset()
        for n in range(1, 6):
            proxy.cut_requests = 2
            assert (await env.step({"amount": 1})).observation["total"] == n


async def test_time_with_a_connection_does_not_count(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url, BRIEF) as env:
        await env.reset()
        for pause in (0.1, 0.1, 0.1, 0.1, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1):
            proxy.cut()
            await asyncio.sleep(pause)
        assert (await env.step({"amount": 1})).observation["total"] == 1
    assert len(lives) == 1


async def test_a_server_that_comes_back_in_time_is_found(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        await env.step({"amount": 3})
        proxy.refuse = True
        proxy.cut()
        step = asyncio.create_task(env.step({"amount": 4}))
        await asyncio.sleep(0.3)
        proxy.refuse = False
        assert (await step).observation["total"] == 7


async def test_a_client_may_refuse_to_come_back(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url, Reconnect(within=0)) as env:
        await env.reset()
        proxy.cut()
        with pytest.raises(EpisodeLost):
            await env.step({"amount": 1})
        await until(lambda: lives[0].closes == 1)
        assert (await env.reset()).observation["total"] == 0


async def test_a_session_that_gave_way_is_a_lost_episode(serve: Serve, through: Any) -> None:
    server = serve(Adder, max_sessions=1, give_way_after=0.0)
    proxy = await through(server.port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.refuse = True
        proxy.cut()
        await asyncio.sleep(0.1)
        async with client(server.url) as other:
            await other.reset()
        proxy.refuse = False
        with pytest.raises(EpisodeLost):
            await env.step({"amount": 1})


async def test_a_network_that_swallows_answers_ends_in_a_deadline(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.swallow_answers = True
        with pytest.raises(DeadlineExceeded):
            await env.step({"amount": 1}, timeout=0.2)
        proxy.swallow_answers = False
        proxy.cut()
        assert (await env.step({"amount": 1})).observation["total"] == 2


async def test_closing_on_a_dead_network_returns(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder, resume_window=0.2).port)
    env = await client(proxy.url).__aenter__()
    await env.reset()
    proxy.swallow_answers = True
    await asyncio.wait_for(env.close(), 5)
    proxy.cut()
    await until(lambda: lives[0].closes == 1)


async def test_closing_while_coming_back_leaves_nothing(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder, resume_window=0.2).port)
    env = await client(proxy.url).__aenter__()
    await env.reset()
    proxy.refuse = True
    proxy.cut()
    step = asyncio.create_task(env.step({"amount": 1}))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(env.close(), 2)
    with pytest.raises(ClientError):
        await asyncio.wait_for(step, 2)


@pytest.mark.parametrize("hold", [0.05, 0.2])
async def test_a_refusal_that_comes_with_the_handshake_is_raised(serve: Serve, through: Any, hold: float) -> None:
    server = serve(Adder, max_sessions=1)
    proxy = await through(server.port)
    async with client(server.url) as first:
        await first.reset()
        proxy.hold_answers = hold
        async with client(proxy.url) as second:
            with pytest.raises(Exception, match="capacity"):
                await second.reset()


async def test_a_refusal_that_comes_after_the_deadline_is_ignored(serve: Serve, through: Any) -> None:
    server = serve(Adder, max_sessions=1)
    proxy = await through(server.port)
    env = client(proxy.url)
    async with client(server.url) as first:
        await first.reset()
        proxy.hold_answers = 0.2
        with pytest.raises(DeadlineExceeded):
            await env.reset(timeout=0.1)
        await asyncio.sleep(0.3)
    proxy.hold_answers = 0.0
    assert (await env.step({"amount": 1})).observation["total"] == 1
    await env.close()


async def test_a_missing_session_is_a_lost_episode(serve: Serve, through: Any) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.upstream = serve(Adder).port
        proxy.hold_answers = 0.1
        proxy.cut()
        with pytest.raises(EpisodeLost):
            await env.step({"amount": 1})


async def test_a_cut_right_after_the_handshake_is_survived(serve: Serve, through: Any, lives: list[Watched]) -> None:
    proxy = await through(serve(Adder).port)
    async with client(proxy.url) as env:
        await env.reset()
        proxy.cut()
        step = asyncio.create_task(env.step({"amount": 1}))
        before = proxy.connections
        await until(lambda: proxy.connections > before)
        proxy.cut()
        assert (await step).observation["total"] == 1
    assert lives[0].steps == 1


async def test_a_drop_before_the_session_is_open_is_survived(
    serve: Serve, through: Any, lives: list[Watched]
) -> None:
    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.2)
            super().__init__()

    proxy = await through(serve(Slow, resume_window=0.2).port)
    async with client(proxy.url) as env:
        begun = asyncio.create_task(env.reset(seed=3))
        await asyncio.sleep(0.1)
        proxy.cut()
        assert (await begun).observation["total"] == 3
        assert (await env.step({"amount": 1})).observation["total"] == 4


async def test_a_refused_connection_is_a_clear_error() -> None:
    with pytest.raises(ConnectFailed) as failed:
        await Client.connect("http://127.0.0.1:9")
    assert failed.value.hint
    assert isinstance(failed.value, ConnectionError)
