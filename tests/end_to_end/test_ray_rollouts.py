"""Rollouts over a real Ray cluster of three nodes: one store, one outcome each, nothing left when something dies."""

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
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.gate import CallGate
from paddock.export import export_rollout
from paddock.limits import Budget
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.models.weight_version import Weights
from paddock.processes import find_marked_processes
from paddock.rollouts.api import run_batch
from paddock.rollouts.batch import BatchResult
from paddock.rollouts.fork import fork
from paddock.rollouts.rollout import Rollout
from paddock.store import Store
from paddock.store.record import RolloutRecord
from paddock.targets import load_target
from paddock.tasks.task import Task
from rollouts.played import SPEAKING, UPSTREAM_KEY, a_task, needs_bwrap, python, wait_until

from .processes import quiet_environment

pytest.importorskip("ray")

from bench.ray_cluster import LocalCluster, rollouts_per_minute

from paddock.scale.cluster import Resources, connect, disconnect
from paddock.scale.rollouts import RayBackend

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.end_to_end,
    pytest.mark.timeout(150, func_only=True),
    pytest.mark.filterwarnings("default"),
    needs_bwrap,
]

SMALL = Resources(cpus=0.5)


def script(pause: float) -> dict[str, Any]:
    command = f"echo 42 > answer.txt; sleep {pause}"
    return {"turns": [{"tool": "bash", "arguments": {"command": command}}, {"text": "Done."}]}


@dataclass
class Stage:
    """A cluster, the folder of temporary files of its nodes, and this process as a driver of it."""

    cluster: LocalCluster
    temporary: Path

    def open_sandboxes(self) -> list[str]:
        with Store.open(self.temporary / f"paddock-node-{os.getuid()}", read_only=True) as store:
            return [entry.sandbox_id for entry in store.open_sandboxes()]


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """The path is short: it holds sockets."""
    temporary = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
    before = {name: os.environ.get(name) for name in ("TMPDIR", "RAY_TMPDIR")}
    os.environ["TMPDIR"] = str(temporary)
    os.environ["RAY_TMPDIR"] = str(temporary)
    try:
        with LocalCluster(3, cpus=2, resources={"sandbox_bwrap": 1}) as cluster:
            connect(cluster.address)
            try:
                yield Stage(cluster, temporary)
            finally:
                disconnect()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        shutil.rmtree(temporary, ignore_errors=True)


class Job:
    """A batch to run: the model plays a script behind a key, and every process of an agent bears a mark."""

    def __init__(self, store: Path, pause: float = 0.1, **options: Any) -> None:
        self.store = store
        self.mark = f"mark-{os.urandom(8).hex()}"
        self.seen: dict[str, RolloutRecord] = {}
        self._script = script(pause)
        self._options: dict[str, Any] = {"engine": RayBackend(resources=SMALL), **options}

    async def run(self) -> BatchResult:
        agent = python(f"MARK = '{self.mark}'\n{SPEAKING}\nsys.exit(converse())")
        async with ReplayServer(self._script, api_key=UPSTREAM_KEY) as server:
            model = Endpoint(server.url, "replay", api_key=UPSTREAM_KEY, engine="vllm")
            options = {"on_change": self.note, "retries": 1, **self._options}
            return await run_batch([a_task()], model=model, agent=agent, store=self.store, **options)

    def note(self, rollout: Rollout) -> None:
        self.seen[rollout.id] = rollout.record

    def at_work(self) -> list[RolloutRecord]:
        return [record for record in self.seen.values() if record.stage == "agent" and not record.finished]

    async def until(self, holds: Callable[[], bool], seconds: float = 40.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds():
                await asyncio.sleep(0.02)

    def processes(self) -> list[int]:
        return processes_with(self.mark)

    def records(self) -> list[RolloutRecord]:
        with Store.open(self.store, read_only=True) as store:
            return list(store.list(newest_first=False))


def processes_with(mark: str, without: str = "no such word") -> list[int]:
    """Processes that have the one word among their own, and not the other."""
    collected = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if mark.encode() in words and without.encode() not in words:
                collected.append(int(entry.name))
    return collected


def node_of(record: RolloutRecord) -> str:
    return str(record.metadata["node"]["node"])


def most_at_once(records: list[RolloutRecord]) -> dict[str, int]:
    """For each node, how many rollouts it had at the same time."""
    most = {}
    for node in {node_of(record) for record in records}:
        here = [record for record in records if node_of(record) == node]
        most[node] = max(
            sum(other.started_at <= record.started_at < (other.finished_at or 0) for other in here) for record in here
        )
    return most


def run_within(work: Any, seconds: float = 60.0) -> Any:
    return asyncio.run(asyncio.wait_for(work, seconds))


# -- one store ------------------------------------------------------------------------------------


def test_a_batch_spreads_over_nodes_and_is_kept_as_if_it_had_run_here(stage: Stage, tmp_path: Path) -> None:
    there, here = Job(tmp_path / "there", n=6, parallel=6), Job(tmp_path / "here", engine="local")
    here.mark = there.mark
    live: set[tuple[str, int]] = set()

    def watch(rollout: Rollout) -> None:
        with Store.open(there.store, read_only=True) as store:
            stored = store.get(rollout.id)
            if stored is not None and stored.outcome is None:
                live.add((stored.stage, len(store.calls(rollout.id))))

    there._options["on_change"] = watch
    result = run_within(there.run(), 90)
    assert [(record.outcome, record.error) for record in result.records] == [("ok", None)] * 6
    assert len({node_of(record) for record in result.records}) == 3
    assert rollouts_per_minute(result.records) > 0
    run_within(here.run())
    with Store.open(there.store, read_only=True) as far, Store.open(here.store, read_only=True) as near:
        (local,) = near.list()
        expected = near.get(local.rollout_id)
        for record in result.records:
            stored = far.get(record.rollout_id)
            assert stored is not None
            assert expected is not None
            assert_alike(stored, expected)
            calls, reference = far.calls(stored.rollout_id), near.calls(expected.rollout_id)
            assert [call.message for call in calls] == [call.message for call in reference]
            assert [call.completion_token_ids for call in calls] == [call.completion_token_ids for call in reference]
            assert [call.logprobs for call in calls] == [call.logprobs for call in reference]
            assert [call.parent for call in calls] == [None, "c0"]
            assert far.get_blob(stored.workdir_blob or "") == near.get_blob(expected.workdir_blob or "")
            kinds = [(event.kind, event.data.get("stage")) for _, event in far.events(stored.rollout_id)]
            assert kinds == [(event.kind, event.data.get("stage")) for _, event in near.events(expected.rollout_id)]
            assert UPSTREAM_KEY not in repr((stored, calls))
            assert len(list(export_rollout("trl", stored, calls))) == 1
    assert {stage for stage, _ in live} >= {"sandbox", "agent", "verifier"}
    assert ("agent", 1) in live, "calls are seen while the rollout runs"
    assert stage.open_sandboxes() == []


def assert_alike(actual: RolloutRecord, expected: RolloutRecord) -> None:
    """The same in all that does not tell two rollouts apart."""
    whose = {"rollout_id", "batch_id", "member", "sandbox_id", "metadata"}
    when = {"started_at", "finished_at", "stages", "usage", "proxy_log"}
    for each in fields(RolloutRecord):
        if each.name not in whose | when:
            assert getattr(actual, each.name) == getattr(expected, each.name), each.name
    assert actual.stages.keys() == expected.stages.keys()
    assert actual.usage.keys() == expected.usage.keys()
    assert set(actual.metadata) - set(expected.metadata) == {"node"}
    assert actual.trainable


def test_a_node_never_has_more_at_once_than_allowed(stage: Stage, tmp_path: Path) -> None:
    limited = RayBackend(resources=Resources(cpus=0.1), per_node=1)
    labelled = RayBackend(resources=Resources(cpus=0.1, custom={"sandbox_bwrap": 1}))

    async def both() -> list[BatchResult]:
        jobs = [
            Job(tmp_path / "limited", 0.5, n=6, parallel=6, engine=limited),
            Job(tmp_path / "labelled", 0.5, n=6, parallel=6, engine=labelled),
        ]
        return [await job.run() for job in jobs]

    first, second = run_within(both(), 90)
    for result in (first, second):
        assert {record.outcome for record in result.records} == {"ok"}
        assert set(most_at_once(result.records).values()) == {1}


def test_new_weights_reach_a_rollout_that_is_under_way(stage: Stage, tmp_path: Path) -> None:
    weights = Weights("1")
    job = Job(tmp_path / "store", 1.0, weight_version=weights)

    async def train() -> BatchResult:
        running = asyncio.ensure_future(job.run())
        await job.until(lambda: any(record.call_count == 1 for record in job.seen.values()))
        weights.set("2")
        return await running

    (record,) = run_within(train()).records
    with Store.open(job.store, read_only=True) as store:
        assert [call.admitted_version for call in store.calls(record.rollout_id)] == ["1", "2"]


def test_a_pause_reaches_the_rollouts_on_all_nodes(stage: Stage, tmp_path: Path) -> None:
    weights, gate = Weights("1"), CallGate()
    job = Job(tmp_path / "store", 3.0, weight_version=weights, gate=gate, n=2, parallel=2)

    async def train() -> BatchResult:
        await gate.pause()
        running = asyncio.ensure_future(job.run())
        await job.until(lambda: len(job.seen) == 2 and all(record.stage == "paused" for record in job.seen.values()))
        gate.resume()
        await job.until(lambda: all(record.call_count == 1 for record in job.seen.values()))
        assert (await gate.pause()).in_flight == 0
        await job.until(lambda: all(record.stage == "paused" for record in job.seen.values()))
        weights.set("2")
        gate.resume()
        return await running

    records = run_within(train(), 90).records
    assert {record.outcome for record in records} == {"ok"}
    assert [record.pauses["count"] for record in records] == [2, 2]
    with Store.open(job.store, read_only=True) as store:
        for record in records:
            assert [call.weight_version for call in store.calls(record.rollout_id)] == ["1", "2"]


def test_the_loop_works_in_an_environment_on_a_node(stage: Stage, tmp_path: Path) -> None:
    turns = [{"tool": "echo_message", "arguments": {"message": "hi"}}, {"text": "Done."}]

    async def work() -> BatchResult:
        async with ReplayServer({"turns": turns}) as server:
            model = Endpoint(server.url, "replay", engine="vllm")
            options: dict[str, Any] = {"env": load_target("echo")[0], "engine": RayBackend(resources=SMALL)}
            return await run_batch([Task("Say hi.")], model=model, agent="loop", store=tmp_path, **options)

    (record,) = run_within(work()).records
    assert (record.outcome, record.error, record.call_count) == ("ok", None, 2)
    assert "hi" in str(record.transcript[-2]["content"])
    assert node_of(record)


# -- stopping -------------------------------------------------------------------------------------


def test_an_abort_in_the_store_stops_a_rollout_on_its_node(stage: Stage, tmp_path: Path) -> None:
    job = Job(tmp_path / "store", 30.0, retries=0)

    async def stopped() -> tuple[BatchResult, float]:
        running = asyncio.ensure_future(job.run())
        await job.until(lambda: any(record.call_count == 1 for record in job.at_work()))
        with Store.open(job.store) as page:
            page.aborts.request(next(iter(job.seen)), "enough of it")
        began = time.monotonic()
        return await running, time.monotonic() - began

    result, seconds = run_within(stopped())
    (record,) = result.records
    assert (record.outcome, record.error) == ("cancelled", "enough of it")
    assert seconds < 8
    assert job.processes() == []
    assert stage.open_sandboxes() == []


def test_a_cancelled_batch_cancels_all_of_them_at_once(stage: Stage, tmp_path: Path) -> None:
    job = Job(tmp_path / "store", 30.0, n=5, parallel=5, engine=RayBackend(resources=Resources(cpus=1.5)))

    async def cancel() -> float:
        running = asyncio.ensure_future(job.run())
        await job.until(lambda: len(job.at_work()) == 3)  # the others have no room
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return time.monotonic() - began

    assert run_within(cancel()) < 8
    assert job.processes() == []
    assert [record.outcome for record in job.records()] == ["cancelled"] * 5
    assert stage.open_sandboxes() == []


# -- losing ---------------------------------------------------------------------------------------


def killed(
    job: Job, kill: Callable[[list[RolloutRecord]], None], node: str | None = None
) -> tuple[BatchResult, float]:
    """Run until some are at work (on a node), kill, and go on to the end. How long until these have an outcome."""

    def at_work() -> list[RolloutRecord]:
        return [record for record in job.at_work() if node in (None, node_of(record))]

    async def run() -> tuple[BatchResult, float]:
        running = asyncio.ensure_future(job.run())
        await job.until(lambda: bool(at_work()))
        began, chosen = time.monotonic(), at_work()
        kill(chosen)
        await job.until(lambda: all(record.finished for record in chosen))
        seconds = time.monotonic() - began
        return await running, seconds

    result, seconds = run_within(run(), 90)
    return result, seconds


def assert_retried_once(job: Job, result: BatchResult, n: int) -> list[RolloutRecord]:
    """Those that were lost, each with one outcome and one attempt more, on another node."""
    records = job.records()
    broken = [record for record in records if record.outcome == "sandbox"]
    assert [record.outcome for record in result.records] == ["ok"] * n
    assert Counter((record.member, record.attempt) for record in records).most_common(1)[0][1] == 1
    assert len(records) == n + len(broken)
    again = {record.member: record for record in result.records if record.attempt == 1}
    assert again.keys() == {record.member for record in broken}
    for record in broken:
        assert node_of(again[record.member]) != node_of(record)
        assert record.sandbox_id is not None
        assert find_marked_processes(record.sandbox_id) == []
    assert job.processes() == []
    return broken


def test_a_killed_worker_costs_its_rollout_one_attempt(stage: Stage, tmp_path: Path) -> None:
    job = Job(tmp_path / "store", 1.0, n=3, parallel=3)

    def kill(records: list[RolloutRecord]) -> None:
        os.kill(records[0].metadata["node"]["pid"], signal.SIGKILL)
        del records[1:]

    result, seconds = killed(job, kill)
    assert seconds < 5
    (broken,) = assert_retried_once(job, result, 3)
    assert "worker" in (broken.error or "")
    assert broken.reward is None


def test_a_killed_driver_leaves_nothing_and_its_batch_goes_on(stage: Stage, tmp_path: Path) -> None:
    job = Job(tmp_path / "store")
    played = tmp_path / "script.json"
    played.write_text(json.dumps(script(60.0)))
    (tmp_path / "tasks.jsonl").write_text(json.dumps(a_task().to_json()))
    agent = f"MARK = '{job.mark}'\n{SPEAKING}\nsys.exit(converse())"
    command = [
        *(sys.executable, "-m", "paddock", "rollout", str(tmp_path / "tasks.jsonl"), "--store", str(job.store)),
        *("--agent", f"command:{shlex.join(['python3', '-c', agent])}", "--model", f"replay:{played}", "-n", "3"),
        *("--parallel", "3", "--batch-id", "b-ray", "--engine", "ray", "--ray-address", stage.cluster.address),
        *("--rollout-cpus", "0.5", "--json"),
    ]
    with driving(command, tmp_path / "log") as driver:
        wait_until(lambda: driver.poll() is not None or len(agents(job)) >= 3, 60)
        assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
        driver.kill()
        driver.wait(10)
    wait_until(lambda: agents(job) == [], 8)
    played.write_text(json.dumps(script(0.1)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=quiet_environment(), check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["outcome"], line["reward"]) for line in lines] == [("ok", 1.0)] * 3
    assert Counter(record.outcome for record in job.records()) == {"ok": 3, "cancelled": 3}
    assert stage.open_sandboxes() == []
    assert list(stage.temporary.glob("paddock-sb-*")) == []


def agents(job: Job) -> list[int]:
    """Those in sandboxes; the driver has the mark among its own words."""
    return processes_with(job.mark, without="--ray-address")


@contextmanager
def driving(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=quiet_environment())
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_a_killed_node_costs_its_rollouts_one_attempt(stage: Stage, tmp_path: Path) -> None:
    job = Job(tmp_path / "store", 1.5, n=6, parallel=6)
    name = stage.cluster.nodes[2].node_id

    def kill(_: list[RolloutRecord]) -> None:
        stage.cluster.kill_node(2)

    result, seconds = killed(job, kill, name)
    assert seconds < 5
    broken = assert_retried_once(job, result, 6)
    assert broken
    assert {node_of(record) for record in broken} == {name}
    assert all("node" in (record.error or "") for record in broken)


def test_forks_and_resumed_members_replay_their_calls_on_a_node(stage: Stage, tmp_path: Path) -> None:
    async def play() -> None:
        async with ReplayServer(script(0.0), api_key=UPSTREAM_KEY) as server:
            model = Endpoint(server.url, "replay", api_key=UPSTREAM_KEY, engine="vllm")
            options: dict[str, Any] = {"model": model, "agent": python(f"{SPEAKING}\nsys.exit(converse())")}
            options |= {"store": tmp_path, "engine": RayBackend(resources=SMALL), "snapshots": True}
            stopped = await run_batch([a_task()], budget=Budget(calls=1), batch_id="b-one", **options)
            (resumed,) = (await run_batch([a_task()], resume="b-one", **options)).records
            (forked,) = (await fork(stopped.records[0], at=1, budget=Budget(calls=9), **options)).records
            for record in (resumed, forked):
                fidelity = record.fork["fidelity"]
                assert (record.reward, fidelity["replayed_calls"]) == (1.0, 1), record.error
                assert (fidelity["files"]["state"], fidelity["files"]["compared_calls"]) == ("equal", 1), fidelity
            assert [served.turn for served in server.log] == [0, 1, 1]

    asyncio.run(play())
