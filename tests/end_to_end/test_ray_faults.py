"""A plane whose instances Ray has placed, and everything at once: on three real nodes that lose what they hold."""

import asyncio
import os
import shutil
import signal
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleet.plane_process import PlaneProcess, note_task, plane_process, played
from paddock.fleet.run import run_tasks
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from rollouts.played import needs_bwrap, wait_until

pytest.importorskip("ray")

from bench.ray_cluster import LocalCluster
from bench.ray_faults import is_running, lose_a_node

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.end_to_end,
    pytest.mark.timeout(150, func_only=True),
    pytest.mark.filterwarnings("default"),
]


@dataclass
class Stage:
    cluster: LocalCluster
    temporary: Path
    """Where the nodes keep their files."""

    def kept(self) -> dict[int, int]:
        """The process of each keeper that has a folder, and that of its instance."""
        collected = {}
        for note in self.temporary.glob("paddock-instances-*/*/process"):
            collected[int(note.parent.name.partition("-")[0])] = int(note.read_text().split()[0])
        return collected


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """The path is short: it holds sockets."""
    temporary = Path(tempfile.mkdtemp(prefix="pf-", dir="/tmp"))
    before = {name: os.environ.get(name) for name in ("TMPDIR", "RAY_TMPDIR")}
    os.environ |= {"TMPDIR": str(temporary), "RAY_TMPDIR": str(temporary)}
    try:
        with LocalCluster(3, cpus=4) as cluster:
            yield Stage(cluster, temporary)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(temporary, ignore_errors=True)


@pytest.fixture(scope="module")
def plane(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneProcess]:
    options = ["--engine", "ray", "--ray-address", stage.cluster.address, "--instance-cpus", "0.5", "--warm", "0"]
    with plane_process(tmp_path_factory.mktemp("plane"), *options) as running:
        yield running


def make(plane: PlaneProcess) -> dict[str, Any]:
    made: dict[str, Any] = plane.ask("POST", "/v1/env/instances", {"env_key": "notes"})
    return made


def look(plane: PlaneProcess, made: dict[str, Any]) -> dict[str, Any]:
    response: dict[str, Any] = plane.ask("GET", f"/v1/env/instances/{made['instance_id']}")
    return response


def node_of(made: dict[str, Any]) -> str:
    return str(made["urls"]["root"].split(":")[1].strip("/"))


def test_instances_spread_over_nodes_and_verifiers_run_beside_them(
    stage: Stage, plane: PlaneProcess, tmp_path: Path
) -> None:
    async def run() -> Any:
        async with ReplayServer(played("milk", "tea", "salt")) as server:
            model = Endpoint(server.url, "replay", engine="vllm")
            tasks = [note_task(title) for title in ("milk", "tea", "salt")]
            return await run_tasks(tasks, plane=plane.address, model=model, store=tmp_path, parallel=3, retries=0)

    result = asyncio.run(asyncio.wait_for(run(), 60))
    assert [(record.outcome, record.reward) for record in result.records] == [("ok", 1.0)] * 3
    assert plane.alive() == []
    wait_until(lambda: stage.kept() == {}, 5)
    made = [make(plane) for _ in range(3)]
    assert {node_of(each) for each in made} == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}
    with urllib.request.urlopen(made[0]["urls"]["health"], timeout=5) as answer:
        assert answer.status == 200
    status = plane.ask("GET", "/status")
    assert (status["engine"], status["lost"]) == ("ray", 0)
    assert sorted(node["processes"] for node in status["nodes"].values()) == [1, 1, 1]
    plane.ask("DELETE", f"/v1/env/instances/{made[0]['instance_id']}")
    assert look(plane, made[0])["status"] == "stopped"
    wait_until(lambda: len(stage.kept()) == 2, 5)


def test_a_killed_actor_takes_its_instance_along_and_the_plane_says_so(stage: Stage, plane: PlaneProcess) -> None:
    before = stage.kept()
    made = make(plane)
    (keeper,) = stage.kept().keys() - before.keys()
    instance = stage.kept()[keeper]
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: look(plane, made)["status"] == "error", 5)
    result = look(plane, made)
    assert "its actor on node 127.0.0." in result["reason"]
    assert result["urls"] is None
    wait_until(lambda: not is_running(instance), 15)


def test_a_killed_node_takes_its_instances_along_and_the_next_is_elsewhere(stage: Stage, plane: PlaneProcess) -> None:
    made = [make(plane) for _ in range(4)]
    there = [each for each in made if node_of(each) == "127.0.0.4"]
    assert there
    stage.cluster.kill_node(2)
    wait_until(lambda: all(look(plane, each)["status"] == "error" for each in there), 6)
    assert all("its node 127.0.0.4 is gone" in look(plane, each)["reason"] for each in there)
    assert all(look(plane, each)["status"] == "running" for each in made if each not in there)
    assert node_of(make(plane)) != "127.0.0.4"
    assert plane.ask("GET", "/status")["lost"] > len(there)
    stage.cluster.add_node()


def test_a_killed_plane_leaves_nothing_on_the_nodes(stage: Stage, tmp_path: Path) -> None:
    options = ["--engine", "ray", "--ray-address", stage.cluster.address, "--warm", "2"]
    before = stage.kept()
    with plane_process(tmp_path, *options, ends_with=-signal.SIGKILL) as doomed:
        make(doomed)
        wait_until(lambda: doomed.ask("GET", "/status")["warm"] == 2, 20)
        ours = stage.kept().items() - before.items()
        processes = [pid for pair in ours for pid in pair]
        assert len(processes) == 6
        os.kill(doomed.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, processes)), 15)


@needs_bwrap
def test_a_dead_node_hangs_and_loses_nothing(stage: Stage, tmp_path: Path) -> None:
    report = lose_a_node(stage.cluster, tmp_path, sessions=24, rollouts=6, node=1, work=3.0)
    assert report.killed_processes > 0
    assert report.sessions_wrong == {}
    assert 0 < report.sessions_lost < 24
    assert report.sessions_begun_again == report.sessions_lost
    assert max(report.slowest_answer_s, report.slowest_new_episode_s, report.slowest_outcome_s) < 10
    assert report.rollouts_lost > 0
    assert report.outcomes == {"ok": 6, "sandbox": report.rollouts_lost}
    assert report.final == {"ok": 6}
    assert report.attempts_with_other_than_one_outcome == 0
    assert report.orphans == 0
