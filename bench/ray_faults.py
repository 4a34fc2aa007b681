"""A node of a Ray cluster loses its power while sessions step and rollouts run: what becomes of each.

Counts, and the longest that anybody waited. Used by `python -m bench.ray fault` and, smaller, by a test.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock import Client
from paddock.agents.command import CommandAgent
from paddock.errors import EpisodeLost
from paddock.processes import find_marked_processes
from paddock.rollouts.api import run_batch
from paddock.scale.cluster import Resources
from paddock.scale.rollouts import RayBackend
from paddock.store import Store
from paddock.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.ray_cluster import LocalCluster
    from paddock.rollouts.rollout import Rollout

PAUSE = 0.5
"""Between two steps of a session."""
WORK_SECONDS = 6.0
"""How long an agent sleeps between its two model calls."""
DEADLINE_SECONDS = 240.0
SERVER_ENDS_WITHIN = 30.0
SETTLE_SECONDS = 10.0
CHECK = """
mkdir -p /logs/verifier
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
AGENT = """
import http.client, json, os, subprocess, sys, urllib.parse
MARK = {mark!r}
place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
messages = [{{"role": "user", "content": sys.stdin.read()}}]
for command in ("echo 42 > answer.txt; sleep {seconds}", "true"):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    body = json.dumps({{"model": "policy", "messages": messages, "stream": True}})
    key = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    connection.request("POST", place.path + "/chat/completions", body, key)
    connection.getresponse().read()
    messages.append({{"role": "assistant", "content": "Next."}})
    subprocess.run(["/bin/sh", "-c", command])
"""
SCRIPT = {"turns": [{"text": "First."}, {"text": "Done."}]}


@dataclass(slots=True)
class Report:
    """What became of everybody."""

    sessions: int
    rollouts: int
    sessions_lost: int = 0
    """Whose episode was on the node that died: told so, by EpisodeLost."""
    sessions_untouched: int = 0
    sessions_begun_again: int = 0
    """Of the lost: how many stepped in a new episode before the end."""
    sessions_wrong: dict[str, int] = field(default_factory=dict)
    """Any other error that a session met, and how often."""
    slowest_answer_s: float = 0.0
    """The longest that any call of any session took, to its answer or its error, from the kill on."""
    slowest_new_episode_s: float = 0.0
    """From the kill until the last of the lost sessions stepped again."""
    rollouts_at_work: int = 0
    """Whose agent ran when the node was killed."""
    rollouts_lost: int = 0
    """Of these: how many were on that node."""
    slowest_outcome_s: float = 0.0
    """From the kill until the last of the lost rollouts had its outcome."""
    outcomes: dict[str, int] = field(default_factory=dict)
    """Of all attempts."""
    final: dict[str, int] = field(default_factory=dict)
    """Of the batch: one for each rollout."""
    attempts_with_other_than_one_outcome: int = 0
    orphans: int = 0
    """Processes of agents, sandboxes, hosts and gateways that are left on nodes that live, after the end of all."""
    killed_processes: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@contextmanager
def serving(address: str | None, *options: str, log: Path, target: str = "counter") -> Iterator[str]:
    """`paddock serve` on a cluster, or without one, from its first word to its end; its URL.

    Either way it stays in this process' session: a scheduler that shares the cores out among sessions would treat
    a server in a session of its own differently from one that a node of ours has started.
    """
    command = [sys.executable, "-m", "paddock", "serve", target]
    command += [] if address is None else ["--engine", "ray", "--ray-address", address]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*command, "--port", "0", "--json", *options], stdout=subprocess.PIPE, stderr=errors
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        yield json.loads(line)["url"]
    finally:
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(SERVER_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lose_a_node(
    cluster: LocalCluster,
    folder: Path,
    *,
    sessions: int,
    rollouts: int,
    node: int = 2,
    work: float = WORK_SECONDS,
) -> Report:
    """Load three hosts with sessions, and all nodes with rollouts; kill one node, and see everything to its end."""
    mark = f"fault-{os.urandom(6).hex()}"
    os.environ["PADDOCK_FAULT_MARK"] = mark
    options = ["--hosts", "3", "--host-cpus", "0.5", "--max-sessions", str(2 * sessions), "--log-level", "warning"]
    try:
        with serving(cluster.address, *options, log=folder / "serve.log") as url:
            storm = Storm(cluster, folder, url, Report(sessions, rollouts), mark, node, work)
            report = asyncio.run(asyncio.wait_for(storm.run(), 3 * DEADLINE_SECONDS))
    finally:
        del os.environ["PADDOCK_FAULT_MARK"]
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := storm.left_over()) and time.monotonic() < deadline:
        time.sleep(0.2)
    report.orphans = len(left)
    return report


class Storm:
    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        url: str,
        report: Report,
        mark: str,
        node: int,
        work: float,
    ) -> None:
        self.cluster = cluster
        self.report = report
        self._folder = folder
        self._url = url
        self._mark = mark
        self._node = node
        self._work = work
        self._seen: dict[str, Any] = {}
        self._stepped: set[int] = set()
        self._again: set[int] = set()
        self._lost: set[int] = set()
        self._wrong: Counter[str] = Counter()
        self._killed_at = 0.0
        self._over = asyncio.Event()
        self._hosts: set[int] = set()
        self._sandboxes: list[str] = []

    async def run(self) -> Report:
        batch = asyncio.ensure_future(self._roll_out())
        await self._until(self._all_at_work, batch)
        playing = [asyncio.ensure_future(self._play(number)) for number in range(self.report.sessions)]
        await self._until(lambda: len(self._stepped) == self.report.sessions, batch)
        await self._note_hosts()
        await self._kill(batch)
        result = await batch
        await self._until(lambda: self._again >= self._lost)
        await self._note_hosts()
        self._over.set()
        await asyncio.gather(*playing)
        self._count(result)
        return self.report

    async def _kill(self, batch: asyncio.Future[Any]) -> None:
        at_work = self._at_work()
        self.report.rollouts_at_work = len(at_work)
        self._killed_at = time.monotonic()
        killed = await asyncio.to_thread(self.cluster.kill_node, self._node)
        self.report.killed_processes = len(killed)
        broken = [each for each in at_work if each.metadata["node"]["pid"] in killed]
        self.report.rollouts_lost = len(broken)
        await self._until(lambda: all(self._seen[each.rollout_id].finished for each in broken), batch)
        self.report.slowest_outcome_s = time.monotonic() - self._killed_at if broken else 0.0

    def _count(self, result: Any) -> None:
        report = self.report
        with Store.open(self._folder / "store", read_only=True) as store:
            records = list(store.list())
        attempts = Counter((record.member, record.attempt) for record in records)
        unsettled = [record for record in records if record.outcome is None]
        doubled = [name for name, count in attempts.items() if count != 1]
        report.attempts_with_other_than_one_outcome = len(unsettled) + len(doubled)
        report.outcomes = dict(Counter(str(record.outcome) for record in records))
        report.final = dict(Counter(str(record.outcome) for record in result.records))
        report.sessions_lost = len(self._lost)
        report.sessions_untouched = report.sessions - len(self._lost)
        report.sessions_begun_again = len(self._again & self._lost)
        report.sessions_wrong = dict(self._wrong)
        self._sandboxes = [record.sandbox_id for record in records if record.sandbox_id]

    async def _note_hosts(self) -> None:
        def ask() -> Any:
            with urllib.request.urlopen(f"{self._url}/health", timeout=10) as answer:
                return json.load(answer)

        self._hosts |= {host["pid"] for host in (await asyncio.to_thread(ask))["hosts"]}

    def left_over(self) -> list[int]:
        """Agents, the server and its gateway (they bear the mark), the hosts, and processes of the sandboxes."""
        pids = set(marked_processes(self._mark)) - {os.getpid()} | {pid for pid in self._hosts if is_running(pid)}
        return sorted(pids.union(*(find_marked_processes(sandbox) for sandbox in self._sandboxes)))

    # -- sessions -------------------------------------------------------------------------------------

    async def _play(self, number: int) -> None:
        """Step at leisure; whoever is told that the episode is lost begins another one."""
        client: Client[Any]
        async with Client(self._url) as client:
            await self._timed(number, client.reset())
            while not self._over.is_set():
                if await self._timed(number, client.step({"amount": 0})):
                    self._stepped.add(number)
                    self._note_again(number)
                else:
                    await self._timed(number, client.reset(timeout=30))
                await asyncio.sleep(PAUSE)

    async def _timed(self, number: int, call: Any) -> bool:
        """Whether the call was answered with no error; how long it took counts from the kill on."""
        began = time.monotonic()
        try:
            await call
        except EpisodeLost:
            self._lost.add(number)
            return False
        except Exception as error:
            self._wrong[f"{type(error).__name__}: {str(error)[:120]}"] += 1
            return False
        finally:
            if self._killed_at:
                waited = time.monotonic() - max(began, self._killed_at)
                self.report.slowest_answer_s = max(self.report.slowest_answer_s, waited)
        return True

    def _note_again(self, number: int) -> None:
        if number in self._lost and number not in self._again:
            self._again.add(number)
            seconds = time.monotonic() - self._killed_at
            self.report.slowest_new_episode_s = max(self.report.slowest_new_episode_s, seconds)

    # -- rollouts -------------------------------------------------------------------------------------

    async def _roll_out(self) -> Any:
        script = self._folder / "script.json"
        script.write_text(json.dumps(SCRIPT))
        agent = CommandAgent(shlex.join(["python3", "-c", AGENT.format(mark=self._mark, seconds=self._work)]))
        task = Task(instruction="Write 42 to answer.txt.", id="answer", verifier=CHECK)
        engine = RayBackend(self.cluster.address, Resources(cpus=0.1))
        count = self.report.rollouts
        return await run_batch(
            [task], model=f"replay:{script}", agent=agent, store=self._folder / "store", n=count, parallel=count,
            engine=engine, retries=1, on_change=self._note,
        )  # fmt: skip

    def _note(self, rollout: Rollout) -> None:
        self._seen[rollout.id] = rollout.record

    def _at_work(self) -> list[Any]:
        return [each for each in self._seen.values() if each.stage == "agent" and not each.finished]

    def _all_at_work(self) -> bool:
        """Or as many as there will be at one time: on a small machine the first may end before the last begins."""
        running = len(self._at_work())
        return running == self.report.rollouts or (
            bool(running) and any(each.finished for each in self._seen.values())
        )

    async def _until(self, holds: Any, also: asyncio.Future[Any] | None = None) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not holds():
                if also is not None and also.done():
                    also.result()
                await asyncio.sleep(0.05)


def marked_processes(mark: str) -> list[int]:
    """Those that were started with the mark among their arguments or in their environment."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in text:
            pids.append(int(entry.name))
    return pids


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
