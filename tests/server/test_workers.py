"""`paddock serve --workers 2` for real: two processes, one port, one capacity, one queue."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from paddock import Client, PaddockError, VectorClient
from paddock.errors import CapacityReached, EpisodeLost
from paddock.net import HttpConnection

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio


class Served:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.url: str = json.loads(process.stdout.readline())["url"]

    def workers(self) -> list[int]:
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with open(children) as listed:
            return [int(pid) for pid in listed.read().split()]


@pytest.fixture
def served() -> Iterator[Served]:
    arguments = ["serve", "counter", "--port", "0", "--json", "--max-sessions", "6", "--workers", "2"]
    command = [sys.executable, "-m", "paddock", *arguments, "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        server = Served(process)
        try:
            yield server
            if process.poll() is None:
                workers = server.workers()
                process.send_signal(signal.SIGTERM)
                assert process.wait(15) == 0
                assert not any_lives(workers)
        finally:
            process.kill()


def any_lives(pids: list[int]) -> bool:
    return any(os.path.exists(f"/proc/{pid}") for pid in pids)


async def get(url: str, path: str) -> Any:
    connection = HttpConnection(url)
    try:
        _, _, body = await connection.request("GET", path)
    finally:
        await connection.close()
    return json.loads(body) if body[:1] in b"[{" else body.decode()


async def opened(url: str, count: int) -> list[Client[Any]]:
    clients: list[Client[Any]] = [Client(url) for _ in range(count)]
    for client in clients:
        await client.__aenter__()
        await client.reset()
    return clients


async def closed(clients: list[Client[Any]]) -> None:
    for client in clients:
        await client.close()


async def test_the_capacity_is_one_over_all(served: Served) -> None:
    clients = await opened(served.url, 6)
    seventh: Client[Any] = Client(served.url)
    with pytest.raises(CapacityReached) as refused:
        await seventh.reset()
    assert refused.value.data["active_sessions"] == 6
    assert (await get(served.url, "/health"))["sessions"] == 6
    assert len(await get(served.url, "/sessions")) == 6
    await closed([*clients, seventh])


async def test_sessions_are_spread_evenly(served: Served) -> None:
    clients = await opened(served.url, 6)
    text = await get(served.url, "/metrics")
    assert 'paddock_sessions{worker="0"} 3\n' in text
    assert 'paddock_sessions{worker="1"} 3\n' in text
    assert text.count("# TYPE paddock_sessions gauge") == 1
    await closed(clients)


async def test_a_dropped_socket_returns_to_its_own_worker(served: Served) -> None:
    clients = await opened(served.url, 4)
    for client in clients:
        await client.step({"amount": 1})
        client.transport.drop()  # type: ignore[attr-defined]
    totals = [(await client.step({"amount": 2})).observation["total"] for client in clients]
    assert totals == [3] * 4
    await closed(clients)


async def test_an_http_episode_is_found_from_any_connection(served: Served) -> None:
    first = HttpConnection(served.url)
    _, headers, _ = await first.request("POST", "/reset")
    await first.close()
    for expected in range(1, 9):
        connection = HttpConnection(served.url)
        action = json.dumps({"action": {"amount": 1}}).encode()
        status, _, body = await connection.request("POST", "/step", action, {"session-id": headers["session-id"]})
        assert (status, json.loads(body)["observation"]["total"]) == (200, expected)
        await connection.close()


async def test_a_session_made_over_mcp_is_found_from_any_connection(served: Served) -> None:
    async def call(method: str, **params: Any) -> Any:
        connection = HttpConnection(served.url)
        document = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        _, _, body = await connection.request("POST", "/mcp", json.dumps(document).encode())
        await connection.close()
        return json.loads(body)

    session = (await call("openenv/session/create"))["result"]["session_id"]
    for _ in range(6):
        answer = await call("tools/list", session_id=session)
        assert answer["error"]["message"] == "Environment does not support MCP"
    assert (await call("openenv/session/close", session_id=session))["result"]["closed"] is True


async def test_who_waits_is_let_in_when_another_worker_has_room(served: Served) -> None:
    clients = await opened(served.url, 6)
    waiting: list[Client[Any]] = [Client(served.url, queue_timeout=10) for _ in range(2)]
    resets = [asyncio.create_task(client.reset()) for client in waiting]
    await asyncio.sleep(0.3)
    assert not any(reset.done() for reset in resets)
    await closed(clients[:2])
    await asyncio.wait_for(asyncio.gather(*resets), 5)
    await closed([*clients[2:], *waiting])


async def test_a_killed_worker_takes_only_its_own_sessions(served: Served) -> None:
    clients = await opened(served.url, 6)
    os.kill(served.workers()[0], signal.SIGKILL)
    outcomes = []
    for client in clients:
        try:
            outcomes.append((await client.step({"amount": 1})).observation["total"])
        except EpisodeLost:
            outcomes.append(None)
    assert sorted(outcomes, key=str) == [1, 1, 1, None, None, None]
    assert (await get(served.url, "/health"))["sessions"] == 3
    lost = [client for client, outcome in zip(clients, outcomes, strict=True) if outcome is None]
    for client in lost:
        assert (await client.reset()).observation["total"] == 0
    await closed(clients)


async def test_a_vector_spreads_over_the_workers_and_survives(served: Served) -> None:
    async with VectorClient(served.url, sessions=6, connections=2) as envs:
        await envs.reset_all()
        text = await get(served.url, "/metrics")
        assert 'paddock_sessions{worker="0"} 3\n' in text
        for trunk in envs._trunks:
            trunk.drop()
        results = await envs.step_all([{"amount": 4}] * 6)
        assert [r if isinstance(r, PaddockError) else r.observation["total"] for r in results] == [4] * 6


async def test_a_killed_parent_takes_its_workers_along(served: Served) -> None:
    workers = served.workers()
    served.process.kill()
    deadline = time.monotonic() + 10
    served.process.wait()
    while any_lives(workers) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert not any_lives(workers)
