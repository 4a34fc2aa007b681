"""The head of a real Ray cluster dies: what runs goes on or ends with a reason, and nothing stays behind."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleet.plane_process import plane_process
from paddock import Client
from paddock.config import RAY_RECONNECT_SECONDS
from paddock.errors import EpisodeLost
from rollouts.played import SPEAKING, TIMEOUTS, a_task, needs_bwrap, wait_until

pytest.importorskip("ray")

from bench.ray_cluster import LocalCluster, children_of

from .processes import quiet_environment
from .test_ray_hosts import Served, is_alive, serving, until
from .test_ray_rollouts import Job, agents, driving, run_within, script

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.end_to_end,
    pytest.mark.timeout(180, func_only=True),
    pytest.mark.filterwarnings("default"),
]

NOTHING_HANGS = 10.0
RAY_WAITS = 30.0
"""Ray ends a driver whose head is away for so long; we give the head up 20 s before."""
ENDS_WITHIN = 40.0


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For the files of the nodes. The path is short: it holds sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ph-", dir="/tmp"))
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.setenv(name, str(folder))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use it after the cluster is up: it is for commands, not for nodes."""
    monkeypatch.setenv(RAY_RECONNECT_SECONDS.name, f"{RAY_WAITS:g}")


@pytest.fixture
def forgetful() -> Iterator[LocalCluster]:
    """Its head keeps everything in memory, as Ray does by default."""
    with LocalCluster(3, cpus=2) as cluster:
        yield cluster


@contextmanager
def hosts_on(cluster: LocalCluster, log: Path, *, hosts: int = 3, ends_with: int = 0) -> Iterator[Served]:
    command = [sys.executable, "-m", "paddock", "serve", "counter", "--engine", "ray", "--hosts", str(hosts)]
    options = ["--ray-address", cluster.address, "--port", "0", "--max-sessions", "6", "--json", "--host-cpus", "0.5"]
    with serving([*command, *options], log, ends_with=ends_with) as served:
        yield served


def processes_of(served: Served) -> list[int]:
    return [host["pid"] for host in served.hosts()] + children_of(served.process.pid)


async def stepping(clients: list[Client[Any]]) -> list[str]:
    """What a step of each brings, within the time in which nothing may hang."""

    async def step(client: Client[Any]) -> str:
        try:
            await asyncio.wait_for(client.step({"amount": 1}), NOTHING_HANGS)
        except EpisodeLost as error:
            return str(error)
        return "ok"

    return [await step(client) for client in clients]


async def begun(url: str, count: int) -> list[Client[Any]]:
    clients: list[Client[Any]] = [await Client.connect(url) for _ in range(count)]
    for client in clients:
        await client.reset()
    return clients


# -- sessions -----------------------------------------------------------------------------------------


def test_sessions_go_on_over_a_head_that_comes_back_with_its_memory(tmp_path: Path) -> None:
    async def play(cluster: LocalCluster, served: Served) -> None:
        clients = await begun(served.url, 3)
        cluster.kill_gcs()
        await asyncio.to_thread(until, lambda: head_away(served) is not None, NOTHING_HANGS)
        assert await stepping(clients) == ["ok"] * 3
        newcomer = await begun(served.url, 1)
        assert await stepping(newcomer) == ["ok"]
        os.kill(served.hosts()[0]["pid"], signal.SIGKILL)
        await asyncio.to_thread(until, lambda: len(served.hosts()) == 2, NOTHING_HANGS)
        cluster.start_gcs()
        await asyncio.to_thread(until, lambda: head_away(served) is None, 30)
        await asyncio.to_thread(until, lambda: len(served.hosts()) == 3, 60)
        assert sorted(words == "ok" for words in await stepping(clients))[1:] == [True, True]
        for client in (*clients, *newcomer):
            await client.close()

    (tmp_path / "state").mkdir()
    with LocalCluster(3, cpus=2, state=tmp_path / "state") as cluster:
        with hosts_on(cluster, tmp_path / "log") as served:
            asyncio.run(play(cluster, served))
            left = processes_of(served)
        until(lambda: not any(map(is_alive, left)), NOTHING_HANGS)


def head_away(served: Served) -> float | None:
    seconds: float | None = served.get("/health")["autoscaler"]["head"]["away_seconds"]
    return seconds


def test_a_head_that_comes_back_without_its_memory_ends_the_server_and_the_next_one_starts(
    forgetful: LocalCluster, tmp_path: Path
) -> None:
    async def play(served: Served) -> None:
        clients = await begun(served.url, 3)
        forgetful.kill_gcs()
        assert await stepping(clients) == ["ok"] * 3
        forgetful.start_gcs()
        await asyncio.to_thread(served.process.wait, ENDS_WITHIN)
        for words in await stepping(clients):
            assert "the episode is lost" in words
        for client in clients:
            await client.close()

    log = tmp_path / "log"
    with hosts_on(forgetful, log, ends_with=1) as served:
        left = processes_of(served)
        asyncio.run(play(served))
        until(lambda: not any(map(is_alive, left)), NOTHING_HANGS)
    assert f"error: the Ray head at {forgetful.address} was started anew" in log.read_text()
    assert "hint: " in log.read_text()
    forgetful.restart_head()
    with hosts_on(forgetful, tmp_path / "again", hosts=1) as served:
        assert asyncio.run(one_step(served.url)) == ["ok"]


async def one_step(url: str) -> list[str]:
    clients = await begun(url, 1)
    try:
        return await stepping(clients)
    finally:
        await clients[0].close()


def test_a_head_that_stays_away_ends_the_server_in_order(
    forgetful: LocalCluster, impatient: None, tmp_path: Path
) -> None:
    async def play(served: Served) -> list[str]:
        clients = await begun(served.url, 3)
        forgetful.kill_gcs()
        seen: list[str] = []
        while (words := await stepping(clients)) == ["ok"] * 3:
            seen += words
            await asyncio.sleep(0.2)
        assert len(seen) > 6
        for client in clients:
            await client.close()
        return words

    log = tmp_path / "log"
    with hosts_on(forgetful, log, ends_with=1) as served:
        left = processes_of(served)
        assert all("lost" in words or words == "ok" for words in asyncio.run(play(served)))
        served.process.wait(ENDS_WITHIN)
        until(lambda: not any(map(is_alive, left)), NOTHING_HANGS)
    assert f"error: the Ray head at {forgetful.address} has not answered for 10 s" in log.read_text()


def test_a_killed_machine_of_the_head_ends_the_server_that_used_it(forgetful: LocalCluster, tmp_path: Path) -> None:
    """The whole node: this machine's way into the cluster is gone with it."""

    async def play(served: Served) -> None:
        clients = await begun(served.url, 3)
        forgetful.kill_node(0)
        for words in await stepping(clients):
            assert words == "ok" or "lost" in words
        await asyncio.to_thread(served.process.wait, ENDS_WITHIN)
        for client in clients:
            await client.close()

    log = tmp_path / "log"
    with hosts_on(forgetful, log, ends_with=1) as served:
        left = processes_of(served)
        asyncio.run(play(served))
        until(lambda: not any(map(is_alive, left)), NOTHING_HANGS)
    assert f"the head at {forgetful.address}" in log.read_text()


def test_a_server_that_is_killed_while_the_head_is_away_leaves_no_hosts(
    forgetful: LocalCluster, tmp_path: Path
) -> None:
    with hosts_on(forgetful, tmp_path / "log", ends_with=-signal.SIGKILL) as served:
        left = processes_of(served)
        assert len(left) == 4
        forgetful.kill_gcs()
        served.process.kill()
        until(lambda: not any(map(is_alive, left)), 30)


def test_a_server_with_a_cluster_of_its_own_ends_without_errors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "paddock", "serve", "echo", "--engine", "ray", "--hosts", "2", "--port", "0"]
    with serving([*command, "--max-sessions", "4", "--json", "--log-level", "warning"], log) as served:
        until(lambda: len(served.hosts()) == 2, 40)
        left = processes_of(served)
    until(lambda: not any(map(is_alive, left)), NOTHING_HANGS)
    assert log.read_text().splitlines()[-1].strip().startswith("clients: "), log.read_text()


# -- rollouts -----------------------------------------------------------------------------------------


def rollouts_on(cluster: LocalCluster, folder: Path, job: Job, played: Path) -> list[str]:
    agent = f"MARK = '{job.mark}'\n{SPEAKING}\nsys.exit(converse())"
    task = a_task(timeouts=replace(TIMEOUTS, agent=120))
    (folder / "tasks.jsonl").write_text(json.dumps(task.to_json()))
    return [
        *(sys.executable, "-m", "paddock", "rollout", str(folder / "tasks.jsonl"), "--store", str(job.store)),
        *("--agent", f"command:{shlex.join(['python3', '-c', agent])}", "--model", f"replay:{played}", "-n", "5"),
        *("--parallel", "5", "--batch-id", "b-head", "--engine", "ray", "--ray-address", cluster.address),
        *("--rollout-cpus", "1.5", "--json"),
    ]


@needs_bwrap
def test_rollouts_without_a_head_have_one_outcome_each_and_are_resumed(
    forgetful: LocalCluster, impatient: None, tmp_path: Path
) -> None:
    job, played, log = Job(tmp_path / "store"), tmp_path / "script.json", tmp_path / "log"
    played.write_text(json.dumps(script(90.0)))
    command = rollouts_on(forgetful, tmp_path, job, played)
    with driving(command, log) as driver:
        wait_until(lambda: driver.poll() is not None or len(agents(job)) >= 3, 60)  # the others have no room
        assert driver.poll() is None, log.read_text()[-3000:]
        forgetful.kill_gcs()
        assert driver.wait(ENDS_WITHIN) == 1, log.read_text()[-3000:]
    lost = f"the Ray head at {forgetful.address} has not answered for 10 s"
    assert f"error: {lost}" in log.read_text()
    wait_until(lambda: agents(job) == [], NOTHING_HANGS)
    records = job.records()
    assert [(record.outcome, record.error) for record in records] == [("cancelled", lost)] * 5
    assert Counter((record.member, record.attempt) for record in records).most_common(1)[0][1] == 1
    forgetful.restart_head()
    played.write_text(json.dumps(script(0.1)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=quiet_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["outcome"] for line in done.stdout.splitlines()] == ["ok"] * 5
    assert Counter(record.outcome for record in job.records()) == {"ok": 5, "cancelled": 5}


@needs_bwrap
def test_rollouts_under_way_go_on_without_a_head(forgetful: LocalCluster, tmp_path: Path) -> None:
    from paddock.scale.cluster import Resources
    from paddock.scale.rollouts import RayBackend

    job = Job(tmp_path / "store", 4.0, n=3, parallel=3)
    job._options["engine"] = RayBackend(forgetful.address, Resources(cpus=1.5))

    async def run() -> Any:
        running = asyncio.ensure_future(job.run())
        await job.until(lambda: len(job.at_work()) == 3)
        forgetful.kill_gcs()
        return await running

    result = run_within(run(), 90)
    assert [(record.outcome, record.attempt) for record in result.records] == [("ok", 0)] * 3
    assert job.processes() == []


# -- instances ----------------------------------------------------------------------------------------


def test_a_plane_without_a_head_refuses_at_once_and_ends_in_order(
    forgetful: LocalCluster, impatient: None, temporary: Path, tmp_path: Path
) -> None:
    options = ["--engine", "ray", "--ray-address", forgetful.address, "--instance-cpus", "0.5", "--warm", "0"]

    def left() -> list[int]:
        notes = list(temporary.glob("paddock-instances-*/*/process"))
        return [int(note.parent.name.partition("-")[0]) for note in notes] + [
            int(note.read_text().split()[0]) for note in notes
        ]

    with plane_process(tmp_path, *options, ends_with=1) as plane:
        made = plane.ask("POST", "/v1/env/instances", {"env_key": "notes"})
        processes = left()
        assert len(processes) == 2
        forgetful.kill_gcs()
        began = time.monotonic()
        with pytest.raises(urllib.error.HTTPError) as refused:
            plane.ask("POST", "/v1/env/instances", {"env_key": "notes"})
        assert time.monotonic() - began < NOTHING_HANGS
        assert f"the Ray head at {forgetful.address} does not answer" in refused.value.read().decode()
        assert plane.ask("GET", f"/v1/env/instances/{made['instance_id']}")["status"] == "running"
        wait_until(lambda: not is_alive(plane.pid), ENDS_WITHIN)
        wait_until(lambda: not any(map(is_alive, processes)), NOTHING_HANGS)
    assert f"error: the Ray head at {forgetful.address}" in (tmp_path / "plane.log").read_text()
