"""Two gateways before two hosts on a real Ray cluster: one queue, and many sessions of one client on all hosts."""

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench.ray_cluster import LocalCluster, children_of

from paddock import Client, VectorClient
from paddock.client.reconnect import Reconnect
from paddock.errors import EpisodeLost
from paddock.types import StepResult

from .test_ray_hosts import Served, serving, until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(180, func_only=True), pytest.mark.cluster]
WAITING = 12


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster(2, cpus=2) as cluster:
        yield cluster


def command(nodes: LocalCluster, *options: str) -> list[str]:
    serve = [sys.executable, "-m", "paddock", "serve", "counter", "--engine", "ray", "--hosts", "2", "--workers", "2"]
    return [*serve, "--ray-address", nodes.address, "--port", "0", "--json", "--host-cpus", "0.5", *options]


@pytest.fixture(scope="module")
def small(nodes: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two slots."""
    log = tmp_path_factory.mktemp("ray") / "small.log"
    with serving(command(nodes, "--max-sessions", "2"), log) as served:
        yield served


@pytest.fixture(scope="module")
def large(nodes: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("ray") / "large.log"
    with serving(command(nodes, "--max-sessions", "200"), log) as served:
        yield served


def gateways(served: Served) -> list[int]:
    return [
        pid
        for pid in children_of(served.process.pid)
        if b"paddock.scale.gateway_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


class Line:
    """Clients that wait one behind the other, at whichever gateway the kernel led each to."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.places: list[list[int]] = []
        self.order: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Until the newcomer has been told that it is the last of all."""
        number, reply = len(self.tasks), list[int]()
        self.places.append(reply)
        self.tasks.append(asyncio.create_task(self._wait(number, reply)))
        while not reply or reply[-1] != number + 1:
            await asyncio.sleep(0.01)

    async def _wait(self, number: int, positions: list[int]) -> None:
        policy = Reconnect(within=30)
        async with Client(self.served.url, queue_timeout=90, on_queue=positions.append, reconnect=policy) as client:
            await client.reset()
            self.order.append(number)
            assert (await client.step({"amount": 2})).observation["total"] == 2


async def holders(served: Served) -> list[Client[Any]]:
    used = [await Client.connect(served.url) for _ in range(2)]
    for client in used:
        await client.reset()
    return used


def test_the_line_is_one_over_both_gateways(small: Served) -> None:
    async def play() -> None:
        first, second = await holders(small)
        line = Line(small)
        for _ in range(WAITING):
            await line.join()
        for _ in range(8):  # whichever gateway answers
            assert small.get("/health")["waiting"] == WAITING
        line.tasks[0].cancel()
        await asyncio.wait(line.tasks[:1])
        while [each[-1] for each in line.places[1:]] != list(range(1, WAITING)):
            await asyncio.sleep(0.01)
        await first.close()
        await asyncio.gather(*line.tasks[1:])
        await second.close()
        assert line.order == list(range(1, WAITING))

    assert len(gateways(small)) == 2
    asyncio.run(play())


def test_waiting_clients_survive_a_killed_gateway(small: Served) -> None:
    async def play() -> None:
        used = await holders(small)
        line = Line(small)
        for _ in range(WAITING):
            await line.join()
        os.kill(gateways(small)[0], signal.SIGKILL)
        await asyncio.to_thread(until, lambda: small.get("/health")["waiting"] == WAITING, 30)
        for client in used:
            await client.close()
        await asyncio.gather(*line.tasks)
        assert sorted(line.order) == list(range(WAITING))

    asyncio.run(play())


def totals(results: list[Any]) -> list[Any]:
    return [result.observation["total"] if isinstance(result, StepResult) else type(result) for result in results]


def test_many_sessions_of_one_client_are_on_all_hosts(large: Served) -> None:
    async def play() -> None:
        async with VectorClient(large.url, 150) as envs:
            await envs.reset_all()
            assert totals(await envs.step_all([{"amount": 1}] * 150)) == [1] * 150
            assert Counter(session["host"] for session in large.get("/sessions")).most_common()[-1][1] == 75
            victim = large.hosts()[0]
            os.kill(victim["pid"], signal.SIGKILL)
            results = totals(await envs.step_all([{"amount": 1}] * 150))
            assert Counter(results) == {2: 75, EpisodeLost: 75}
            await asyncio.to_thread(until, lambda: large.get("/health")["capacity"] == 200, 40)
            assert totals(await envs.reset_all()) == [0] * 150
            assert totals(await envs.step_all([{"amount": 1}] * 150)) == [1] * 150

    asyncio.run(play())
