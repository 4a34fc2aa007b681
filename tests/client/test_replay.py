"""An episode that outlives its host goes on as it was, or is lost: never is it another one."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from environments import Add, Adder, Total, Watched
from paddock import Client
from paddock.client.reconnect import Reconnect, Timeouts
from paddock.errors import DeadlineExceeded, EpisodeLost
from running import Serve

from .conftest import until
from .proxy import Proxy

pytestmark = pytest.mark.anyio
REPLAY = Reconnect(within=5, first_pause=0.01, longest_pause=0.05, replay=True)
ONE: dict[str, Any] = {"amount": 1}


class Predictable(Adder):
    deterministic = True


class Slow(Predictable):
    def step(self, action: Add) -> Total:
        total = super().step(action)
        time.sleep(0.2)
        return total


class Fickle(Predictable):
    """Declares what it does not keep."""

    def step(self, action: Add) -> Total:
        return super().step(Add(amount=action.amount + 1))


class Failing(Predictable):
    def step(self, action: Add) -> Total:
        total = super().step(action)
        if self.steps == 2:
            raise RuntimeError("out of memory")
        return total


Relocation = Callable[[Any], Awaitable[tuple[Client[Any], Proxy]]]


@pytest.fixture
async def relocation(serve: Serve, through: Any) -> AsyncIterator[Relocation]:
    """Begins an episode, and loses its host after three steps: it can only go on in an environment of this class."""
    begun: list[Client[Any]] = []

    async def play(make: Any) -> tuple[Client[Any], Proxy]:
        proxy = await through(serve(Predictable).port)
        env: Client[Any] = await Client.connect(proxy.url, reconnect=REPLAY, timeouts=Timeouts(request=6))
        begun.append(env)
        await env.reset()
        for _ in range(3):
            await env.step(ONE)
        lose_host(proxy, serve(make).port)
        return env, proxy

    yield play
    for env in begun:
        await env.close()


def lose_host(proxy: Proxy, elsewhere: int) -> None:
    proxy.upstream = elsewhere
    proxy.cut()


async def test_an_episode_goes_on_elsewhere(relocation: Relocation) -> None:
    env, _ = await relocation(Predictable)
    assert (await env.step(ONE)).observation["total"] == 4
    assert env.transport.replays == 1  # type: ignore[attr-defined]


async def test_a_replay_that_is_given_up_leaves_no_episode(relocation: Relocation, lives: list[Watched]) -> None:
    env, _ = await relocation(Slow)
    step = asyncio.create_task(env.step(ONE))
    await until(lambda: len(lives) == 2 and lives[1].steps == 2)
    step.cancel()
    for request in (env.step(ONE), env.state()):
        with pytest.raises(EpisodeLost):
            await request
    await env.reset()
    assert (await env.step(ONE)).observation["total"] == 1


@pytest.mark.parametrize(("make", "why"), [(Fickle, "another way at request 1"), (Failing, "failed at request 2")])
async def test_a_replay_that_breaks_off_leaves_no_episode(relocation: Relocation, make: Any, why: str) -> None:
    env, _ = await relocation(make)
    for request in (env.step(ONE), env.step(ONE), env.state()):
        with pytest.raises(EpisodeLost, match=why):
            await request
    assert (await env.reset(seed=2)).observation["total"] == 2


async def test_a_deadline_holds_for_the_whole_replay(relocation: Relocation) -> None:
    env, _ = await relocation(Slow)
    with pytest.raises(DeadlineExceeded, match=r"step within 0\.3 s"):
        await asyncio.wait_for(env.step(ONE, timeout=0.3), 0.5)
    with pytest.raises(EpisodeLost):
        await env.step(ONE)


async def test_requests_made_during_a_replay_come_after_it(relocation: Relocation, lives: list[Watched]) -> None:
    env, _ = await relocation(Slow)
    first = asyncio.create_task(env.step(ONE))
    await until(lambda: len(lives) == 2 and lives[1].steps == 1)
    assert (await env.step(ONE)).observation["total"] == 5
    assert (await first).observation["total"] == 4


async def test_a_lost_episode_fails_all_pending_requests(relocation: Relocation, lives: list[Watched]) -> None:
    env, _ = await relocation(Fickle)
    ends = await asyncio.gather(env.step(ONE), env.step(ONE), return_exceptions=True)
    assert [type(end) for end in ends] == [EpisodeLost, EpisodeLost]
    assert lives[1].steps == 1


async def test_an_episode_that_was_reported_as_lost_stays_lost(
    relocation: Relocation, serve: Serve, lives: list[Watched]
) -> None:
    env, proxy = await relocation(Slow)
    step = asyncio.create_task(env.step(ONE))
    await until(lambda: len(lives) == 2 and lives[1].steps == 4)
    lose_host(proxy, serve(Predictable).port)
    for request in (step, env.state()):
        with pytest.raises(EpisodeLost):
            await request


async def test_a_client_that_is_opened_again_has_lost_nothing(relocation: Relocation) -> None:
    env, _ = await relocation(Fickle)
    with pytest.raises(EpisodeLost):
        await env.step(ONE)
    await env.close()
    await env.transport.open()
    assert (await env.step(ONE)).observation["total"] == 2
