"""Environment hosts on a real Ray cluster of three nodes, which lose hosts, gateways and a node in the middle."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from bench.ray_cluster import LocalCluster, children_of

from paddock import Client
from paddock.client.reconnect import Reconnect
from paddock.errors import CapacityReached, EpisodeLost

from .processes import HERE, quiet_environment, run_client

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(180, func_only=True), pytest.mark.cluster]


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                body = answer.read()
        except urllib.error.HTTPError as refusal:
            body = refusal.read()
        return json.loads(body) if path != "/metrics" else body.decode()

    def hosts(self) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("/health")["hosts"]
        return result


@contextmanager
def serving(command: list[str], log: Path, *, ends_with: int = 0) -> Iterator[Served]:
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=quiet_environment())
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, log.read_text()[-3000:]
        yield Served(json.loads(line)["url"], process)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30) == ends_with, log.read_text()[-3000:]
        finally:
            process.kill()
            assert process.stdout is not None
            process.stdout.close()


def until(condition: Callable[[], Any], seconds: float) -> float:
    """How long it took until something was true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    with LocalCluster(3, cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def forward(nodes: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command = [sys.executable, "-m", "paddock", "serve", "counter", "--engine", "ray", "--hosts", "3"]
    options = ["--ray-address", nodes.address, "--port", "0", "--max-sessions", "4", "--json", "--host-cpus", "0.5"]
    with serving([*command, *options], tmp_path_factory.mktemp("ray") / "forward.log") as served:
        yield served


@pytest.fixture(scope="module")
def elastic(nodes: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command = [sys.executable, str(HERE / "servers" / "ray_elastic.py"), nodes.address]
    with serving(command, tmp_path_factory.mktemp("ray") / "elastic.log") as served:
        yield served


def test_stock_clients_use_a_cluster_like_one_server(forward: Served) -> None:
    seen = run_client("openenv", "openenv_counter.py", forward.url)
    assert seen["generic_async"]["state"] == {"episode_id": "mine", "step_count": 3, "total": 12}
    assert seen["generic_sync"] == seen["generic_async"]
    assert [state["episode_id"] for state in seen["two_at_once"]] == ["one", "two"]
    assert "VALIDATION_ERROR" in seen["refused_action"]["refusal"]


def test_the_cluster_speaks_as_one(forward: Served) -> None:
    async def play() -> None:
        clients = [await Client.connect(forward.url) for _ in range(4)]
        for client in clients:
            await client.reset()
        health = forward.get("/health")
        assert (health["status"], health["capacity"], health["sessions"]) == ("healthy", 4, 4)
        assert sorted(host["sessions"] for host in health["hosts"]) == [1, 1, 2]
        assert len({host["node"] for host in health["hosts"]}) == 3
        assert health["autoscaler"]["hosts"] == 3
        assert len({session["host"] for session in forward.get("/sessions")}) == 3
        assert forward.get("/metrics").count("paddock_sessions_capacity{worker=") == 3
        for client in clients:
            await client.close()

    asyncio.run(play())


def test_capacity_and_queue_are_one_over_all_nodes(forward: Served) -> None:
    async def play() -> None:
        clients = [await Client.connect(forward.url) for _ in range(4)]
        for client in clients:
            await client.reset()
        async with Client(forward.url) as fifth:
            with pytest.raises(CapacityReached, match="4/4"):
                await fifth.reset()
        places: list[int] = []
        async with Client(forward.url, queue_timeout=20, on_queue=places.append) as sixth:
            waiting = asyncio.create_task(sixth.reset())
            while not places:
                await asyncio.sleep(0.02)
            await clients.pop().close()
            await asyncio.wait_for(waiting, 5)
            assert (await sixth.step({"amount": 2})).observation["total"] == 2
        for client in clients:
            await client.close()

    asyncio.run(play())


def test_it_grows_with_the_queue_and_shrinks_after_a_drain(elastic: Served) -> None:
    async def play() -> None:
        async with Client(elastic.url) as first:
            await first.reset()
            async with Client(elastic.url, queue_timeout=40) as second:
                await second.reset()
                assert (await second.step({"amount": 3})).observation["total"] == 3
                health = elastic.get("/health")
                assert (health["autoscaler"]["hosts"], health["capacity"]) == (2, 2)
            await asyncio.to_thread(until, lambda: len(elastic.hosts()) == 1, 20)
            assert elastic.get("/health")["autoscaler"]["hosts"] == 1
            assert (await first.step({"amount": 4})).observation["total"] == 4

    asyncio.run(play())


def test_stock_clients_follow_a_redirect(elastic: Served) -> None:
    seen = run_client("openenv", "openenv_once.py", elastic.url)
    assert seen["state"] == {"episode_id": "mine", "step_count": 3, "total": 12}
    assert seen["host"] != elastic.url.removeprefix("http://")


def test_a_killed_host_loses_its_episodes_loudly_and_replays_go_on(forward: Served) -> None:
    async def play() -> None:
        plain = [await Client.connect(forward.url) for _ in range(2)]
        remaining = [await Client.connect(forward.url, reconnect=Reconnect(replay=True)) for _ in range(2)]
        for client in (*plain, *remaining):
            await client.reset(seed=1)
            await client.step({"amount": 1})
        before = {host["key"]: host for host in forward.hosts()}
        victims = {key_of(client) for client in remaining[:1]}
        for key in victims:
            os.kill(before[key]["pid"], signal.SIGKILL)
        began = time.monotonic()
        for client in plain:
            if key_of(client) in victims:
                with pytest.raises(EpisodeLost, match="gone"):
                    await client.step({"amount": 1})
                assert time.monotonic() - began < 3
                continue
            assert (await client.step({"amount": 1})).observation["total"] == 2
        for client in plain:
            await client.close()
        for client in remaining:
            assert (await client.step({"amount": 1})).observation["total"] == 2
            await client.close()
        assert remaining[0].transport.replays == 1  # type: ignore[attr-defined]
        await asyncio.to_thread(until, lambda: len(forward.hosts()) == 3, 30)
        assert before.keys() - {host["key"] for host in forward.hosts()} == victims

    asyncio.run(play())


def key_of(client: Client[Any]) -> str:
    transport: Any = client.transport
    token: str = getattr(transport, "inner", transport)._token
    return token[:12]


def kill_doors(served: Served) -> None:
    gateways = [
        pid
        for pid in children_of(served.process.pid)
        if b"paddock.scale.gateway_server" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(gateways) == 1
    os.kill(gateways[0], signal.SIGKILL)


def test_sessions_survive_a_crash_of_the_gateway(forward: Served) -> None:
    async def play() -> None:
        async with Client(forward.url) as client:
            await client.reset()
            await client.step({"amount": 1})
            kill_doors(forward)
            assert (await client.step({"amount": 1})).observation["total"] == 2
            assert client.transport.reconnects == 1  # type: ignore[attr-defined]
        await asyncio.to_thread(until, lambda: len(forward.hosts()) == 3, 10)

    asyncio.run(play())


def test_nothing_is_left_of_a_killed_serve_command(nodes: LocalCluster, tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "servers" / "ray_elastic.py"), nodes.address]
    with serving(command, tmp_path / "killed.log", ends_with=-signal.SIGKILL) as served:
        pids = [host["pid"] for host in served.hosts()] + children_of(served.process.pid)
        served.process.kill()
        assert len(pids) >= 2
        assert until(lambda: not any(is_alive(pid) for pid in pids), 10) < 10


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_node_is_known_within_seconds(nodes: LocalCluster, forward: Served) -> None:
    async def play() -> None:
        clients = [await Client.connect(forward.url, queue_timeout=30) for _ in range(4)]
        for client in clients:
            await client.reset()
        places = {host["node"] for host in forward.hosts()} - {nodes.nodes[0].address}
        victim = next(number for number, node in enumerate(nodes.nodes) if node.address in places)
        lost = {host["key"] for host in forward.hosts() if host["node"] == nodes.nodes[victim].address}
        keys = [key_of(client) for client in clients]
        began = time.monotonic()
        nodes.kill_node(victim)
        await asyncio.to_thread(until, lambda: not lost & {host["key"] for host in forward.hosts()}, 3)
        ended = [await outcome(client) for client in clients]
        assert time.monotonic() - began < 6
        assert "lost" in ended
        assert ended == ["lost" if key in lost else "ok" for key in keys]
        for client in clients:
            await client.reset(timeout=30)
            await client.close()
        await asyncio.to_thread(until, lambda: len(forward.hosts()) == 3, 40)
        assert time.monotonic() - began < 12, "Ray would have needed longer"

    async def outcome(client: Client[Any]) -> str:
        try:
            await client.step({"amount": 1})
        except EpisodeLost:
            return "lost"
        return "ok"

    asyncio.run(play())
