"""A client belongs to one process and one loop, and lets go of its session when it is collected."""

import asyncio
import gc
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from environments import Adder, InlineAdder, Watched
from paddock import Client, Reconnect, SyncClient, VectorClient
from paddock.errors import ClientError
from running import Serve, wait_until

FORK = multiprocessing.get_context("fork")


async def first_calls(env: Any) -> None:
    await (env.reset_all() if isinstance(env, VectorClient) else env.reset())


def of_url(url: str, kind: str) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "ws": lambda: Client(url),
        "replay": lambda: Client(url, reconnect=Reconnect(replay=True)),
        "http": lambda: Client(url, transport="http"),
        "memory": lambda: Client(Adder),
        "vector": lambda: VectorClient(url, 2),
    }
    return made[kind]()


async def begin(env: Any) -> None:
    if isinstance(env, VectorClient):
        await env.open()
    await first_calls(env)


KINDS = ["ws", "replay", "http", "memory", "vector"]
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_loop_is_refused_at_once(serve: Serve, kind: str) -> None:
    env = of_url(serve(InlineAdder).url, kind)
    asyncio.run(begin(env))
    with pytest.raises(ClientError, match="another event loop, which has ended"):
        asyncio.run(asyncio.wait_for(first_calls(env), 3))
    asyncio.run(asyncio.wait_for(env.close(), 3))


@pytest.mark.parametrize("kind", ["ws", "http", "memory"])
def test_a_closed_client_may_be_opened_in_another_loop(serve: Serve, kind: str) -> None:
    env = of_url(serve(InlineAdder).url, kind)

    async def whole() -> None:
        async with env:
            await env.reset()

    asyncio.run(whole())
    asyncio.run(whole())


def in_child(work: Callable[[], Any]) -> str:
    """What `work` raises in a forked child, within a few seconds."""
    reply, child_says = FORK.Pipe(duplex=False)

    def child() -> None:
        try:
            work()
            child_says.send("no error")
        except BaseException as error:
            child_says.send(f"{type(error).__name__}: {error}")
        os._exit(0)

    process = FORK.Process(target=child)
    process.start()
    try:
        return str(reply.recv()) if reply.poll(8) else "it hangs"
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_is_refused_at_once(serve: Serve, lives: list[Watched], kind: str) -> None:
    env = of_url(serve(InlineAdder).url, kind)

    async def main() -> None:
        await begin(env)
        loop = asyncio.get_running_loop()
        completed = await loop.run_in_executor(None, in_child, lambda: asyncio.run(first_calls(env)))
        assert "ClientError: the client was opened in another process" in completed
        assert await loop.run_in_executor(None, in_child, lambda: asyncio.run(env.close())) == "no error"
        await first_calls(env)
        await env.close()

    asyncio.run(main())


@pytest.mark.parametrize("target", ["server", "memory"])
def test_a_sync_client_in_a_forked_child_is_refused_at_once(serve: Serve, target: str) -> None:
    with SyncClient(serve(InlineAdder).url if target == "server" else Adder) as env:
        env.reset()
        assert "ClientError: the client was opened in another process" in in_child(lambda: env.step({"amount": 1}))
        assert in_child(env.close) == "no error"
        assert env.step({"amount": 1}).observation is not None


@pytest.fixture
def warned() -> Iterator[list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        collected: list[str] = []
        yield collected
        collected += [str(each.message) for each in caught]
        assert any("was never closed" in message for message in collected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collected_client_frees_its_slot(serve: Serve, lives: list[Watched], kind: str, warned: list[str]) -> None:
    server = serve(Adder, max_sessions=2)

    async def main() -> None:
        env = of_url(server.url, kind)
        await begin(env)
        del env
        gc.collect()
        async with asyncio.timeout(4):
            while not all(life.closes for life in lives):
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert lives
    wait_until(lambda: server.service.manager.statistics().sessions == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_ends_with_its_loop_frees_its_slot(
    serve: Serve, lives: list[Watched], kind: str, warned: list[str]
) -> None:
    server = serve(Adder, max_sessions=2)
    asyncio.run(begin(of_url(server.url, kind)))
    gc.collect()
    wait_until(lambda: all(life.closes for life in lives), 4)
    assert lives


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_outlived_its_loop_frees_its_slot(
    serve: Serve, lives: list[Watched], kind: str, warned: list[str]
) -> None:
    env = of_url(serve(Adder, max_sessions=2).url, kind)
    asyncio.run(begin(env))
    del env
    gc.collect()
    wait_until(lambda: all(life.closes for life in lives), 4)
    assert lives


def test_a_vector_that_is_not_open_says_so(serve: Serve) -> None:
    async def main() -> None:
        envs = VectorClient(serve(Adder).url, 2)
        for call in (envs.reset_all(), envs.step_all([{"amount": 1}] * 2)):
            with pytest.raises(ClientError, match="is not open"):
                await call

    asyncio.run(main())


def test_a_client_may_be_collected_on_another_thread(serve: Serve, lives: list[Watched], warned: list[str]) -> None:
    server = serve(Adder)

    async def main() -> None:
        held = [Client[Any](server.url)]
        await held[0].reset()
        await asyncio.get_running_loop().run_in_executor(None, held.clear)
        async with asyncio.timeout(4):
            while not lives[0].closes:
                await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_client_that_holds_nothing_is_collected_in_silence() -> None:
    async def main() -> None:
        env = Client[Any]("http://127.0.0.1:9", reconnect=Reconnect(within=0))
        with pytest.raises(ConnectionError):
            await env.reset()

    asyncio.run(main())
    gc.collect()
