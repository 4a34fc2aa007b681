"""What a rollout costs beside its agent, and whether a kill loses one.

    python -m bench.rollouts [overhead|parallel|agent|crash]

overhead  One rollout of real OpenCode at a time: its wall time without the time of the agent.
parallel  Sixteen at once: our processor time (Paddock with the scripted model in it, bubblewrap, supervisors)
          against that of the agents.
agent     What one rollout of real OpenCode needs of a machine: processor time and memory of all processes in its
          sandbox, for a short one and a long one, the difference of which is what a model call costs.
crash     Twenty times eight rollouts, killed at a random moment; then what the store and the machine hold.

Needs bubblewrap, and OpenCode in the cache or at PADDOCK_OPENCODE.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from bench.processes import family, proportional_memory
from paddock.errors import StoreError
from paddock.processes import find_marked_processes
from paddock.rollouts.api import run_batch
from paddock.rollouts.verifier import verify
from paddock.sandbox import open_sandbox
from paddock.store import Store
from paddock.tasks.task import Task
from paddock.tasks.taskset import load_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from paddock.capture.trace import Call
    from paddock.rollouts.batch import BatchResult
    from paddock.rollouts.rollout import Rollout
    from paddock.sandbox.base import Sandbox, SandboxSpec

SHIPPED = Path(__file__).resolve().parents[1] / "src" / "paddock" / "tasks" / "shipped"
ROUNDS = 5
OVERHEAD_MS = 150.0
PARALLEL = 16
SHARE_PERCENT = 15.0
KILLS = 20
KILLED_AT_ONCE = 8
LATEST_KILL = 1.6
DEADLINE_SECONDS = 60.0
AGENTS, AGENTS_AT_ONCE = 8, 2
SHORT, LONG = 2, 22
"""Model calls of a rollout."""
WATCH_EVERY = 0.2
MEBIBYTE = 1024 * 1024
TEST = """
mkdir -p /logs/verifier
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
TURNS = [
    {"tool": "bash", "arguments": {"command": "echo 42 > answer.txt", "description": "Write it"}},
    {"text": "The answer is in answer.txt."},
]
# Stands for an agent where the agent itself is not the point: one call, some work, one more call.
SMALL_AGENT = """
import http.client, json, os, subprocess, sys, urllib.parse
place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
messages = [{"role": "user", "content": sys.stdin.read()}]
for command in ("echo 42 > answer.txt; sleep 0.5", "true"):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=60)
    body = json.dumps({"model": "policy", "messages": messages, "stream": True})
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", place.path + "/chat/completions", body, key)
    connection.getresponse().read()
    messages.append({"role": "assistant", "content": "Next."})
    subprocess.run(["/bin/sh", "-c", command])
"""


@dataclass(frozen=True, slots=True)
class ReportRow:
    measure: str
    value: str
    target: str = ""
    reached: bool | None = None


# -- overhead -----------------------------------------------------------------------------------------


async def overhead() -> list[ReportRow]:
    task = Task(instruction="Write 42 to answer.txt.", id="answer", verifier=TEST)
    records, calls = [], []
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"turns": TURNS}))
        with Store.open(Path(folder) / "store") as store:
            for round_number in range(ROUNDS + 1):
                result = await run_batch([task], model=f"replay:{script}", store=store, retries=0)
                (record,) = result.records
                if record.reward != 1.0:
                    raise RuntimeError(f"the rollout ended with {record.outcome}: {record.error}")
                if round_number:  # the first one warms caches up
                    records.append(record)
                    calls += store.calls(record.rollout_id)
    parts = {name: [record.stages[name] * 1000 for record in records] for name in ("sandbox", "setup", "verifier")}
    between = [((record.wall_s or 0.0) - sum(record.stages.values())) * 1000 for record in records]
    whole = [((record.wall_s or 0.0) - record.stages["agent"]) * 1000 for record in records]
    overhead = median(whole)
    return [
        ReportRow("overhead of a rollout", f"{overhead:.0f} ms", f"< {OVERHEAD_MS:.0f} ms", overhead < OVERHEAD_MS),
        *(ReportRow(f"  {name}", f"{median(values):.0f} ms") for name, values in parts.items()),
        ReportRow("  between the stages", f"{median(between):.0f} ms"),
        ReportRow("  a model call, first byte to last", f"{median(map(milliseconds, calls)):.1f} ms"),
        ReportRow("the agent itself", f"{median(record.stages['agent'] for record in records) * 1000:.0f} ms"),
    ]


def milliseconds(call: Call) -> float:
    return ((call.ended or call.started) - call.started) * 1000


# -- many at once -------------------------------------------------------------------------------------


async def parallel() -> list[ReportRow]:
    (task,) = load_tasks("fix-test")
    model = f"replay:{SHIPPED / 'replay.json'}"
    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "store") as store:
        own, below, began = time.process_time(), children_cpu(), time.monotonic()
        result = await run_batch([task], model=model, n=PARALLEL, parallel=PARALLEL, store=store, retries=0)
        own, below, wall = time.process_time() - own, children_cpu() - below, time.monotonic() - began
        tests = await cost_of_tests(task, store, result) * PARALLEL
    agents = sum(record.usage.get("cpu_seconds") or 0.0 for record in result.records)
    around = max(0.0, below - agents - tests)
    share = 100 * (own + around) / agents if agents else float("inf")
    rewarded = sum(record.reward == 1.0 for record in result.records)
    return [
        ReportRow(f"rewarded of {PARALLEL} at once", str(rewarded), str(PARALLEL), rewarded == PARALLEL),
        ReportRow(
            "our share of the agents' CPU", f"{share:.1f} %", f"< {SHARE_PERCENT:.0f} %", share < SHARE_PERCENT
        ),
        ReportRow("  Paddock with the scripted model", f"{own:.2f} CPU-s"),
        ReportRow("  bubblewrap and guests", f"{around:.2f} CPU-s"),
        ReportRow("agents", f"{agents:.2f} CPU-s"),
        ReportRow("tests of the task", f"{tests:.2f} CPU-s"),
        ReportRow("wall time", f"{wall:.1f} s"),
    ]


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def cost_of_tests(task: Task, store: Store, result: BatchResult) -> float:
    """Processor seconds that the task's own tests need for one of the rollouts."""
    record = store.get(result.records[0].rollout_id)
    if record is None or record.workdir_blob is None:
        return 0.0
    used: list[float] = []

    @asynccontextmanager
    async def watched(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with await open_sandbox("bwrap", spec) as sandbox:
            yield sandbox
            used.append(sandbox.usage()["cpu_seconds"] or 0.0)

    sealed = store.get_blob(record.workdir_blob)
    await verify(task.tests, sealed, open_sandbox=watched, limits=task.sandbox, timeout=60.0)
    return sum(used)


# -- one agent ----------------------------------------------------------------------------------------


async def agent() -> list[ReportRow]:
    """The tests of the task are not among it: they are whatever a task brings."""
    costs = {calls: await cost_of_agent(calls) for calls in (SHORT, LONG)}
    short, long = costs[SHORT], costs[LONG]
    lines = []
    for calls, cost in costs.items():
        lines += [
            ReportRow(f"OpenCode, {calls} model calls", spread(cost.cpu, "CPU-s")),
            ReportRow("  memory at most, shared pages once", spread(cost.shared_once, "MiB")),
            ReportRow("  memory at most, as limits count it", spread(cost.memory, "MiB")),
            ReportRow("  wall time of the agent", spread(cost.wall, "s")),
        ]
    each = (median(long.cpu) - median(short.cpu)) / (LONG - SHORT)
    grown = (median(long.shared_once) - median(short.shared_once)) / (LONG - SHORT)
    return [
        *lines,
        ReportRow("each further call", f"{1000 * each:.0f} CPU-ms"),
        ReportRow("  memory", f"{grown:.1f} MiB"),
        ReportRow("load of the machine", f"{os.getloadavg()[0]:.1f}"),
    ]


@dataclass(slots=True)
class AgentCost:
    """One value for each rollout."""

    cpu: list[float]
    memory: list[float]
    shared_once: list[float]
    wall: list[float]


async def cost_of_agent(calls: int) -> AgentCost:
    tool = {"tool": "bash", "arguments": {"command": "ls -la; echo 42 > answer.txt", "description": "Work"}}
    task = Task(instruction="Write 42 to answer.txt.", id="answer", verifier=TEST)
    watch = MemoryWatch()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"turns": [tool] * (calls - 1) + [{"text": "Done."}]}))
        with watch:
            result = await run_batch(
                [task], model=f"replay:{script}", n=AGENTS, parallel=AGENTS_AT_ONCE, store=Path(folder) / "store",
                retries=0, on_change=watch.note,
            )  # fmt: skip
    wrong = [(record.outcome, record.error) for record in result.records if record.reward != 1.0]
    if wrong:
        raise RuntimeError(f"{len(wrong)} rollouts went wrong, the first with {wrong[0]}")
    records = result.records
    return AgentCost(
        cpu=[record.usage["cpu_seconds"] for record in records],
        memory=[record.usage["peak_memory_bytes"] / MEBIBYTE for record in records],
        shared_once=[watch.peaks[record.sandbox_id or ""] for record in records],
        wall=[record.stages["agent"] for record in records],
    )


class MemoryWatch:
    """The most that each sandbox ever held, in MiB, pages that processes share counted by their share."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def note(self, rollout: Rollout) -> None:
        if rollout.record.sandbox_id is not None:
            self.peaks.setdefault(rollout.record.sandbox_id, 0.0)

    def _look(self) -> None:
        while not self._over.wait(WATCH_EVERY):
            for sandbox, peak in list(self.peaks.items()):
                self.peaks[sandbox] = max(peak, sum(map(proportional_memory, family(find_marked_processes(sandbox)))))


def spread(values: list[float], unit: str) -> str:
    """The median, and the least and the most."""
    return f"{median(values):.3g} ({min(values):.3g}-{max(values):.3g}) {unit}"


# -- kills --------------------------------------------------------------------------------------------


class Victim:
    """A store, a task and a command that is killed again and again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.mark = f"mark-{os.urandom(8).hex()}"
        (folder / "task" / "tests").mkdir(parents=True)
        (folder / "task" / "instruction.md").write_text("Write 42 to answer.txt.")
        (folder / "task" / "tests" / "test.sh").write_text(TEST)
        (folder / "script.json").write_text(json.dumps({"turns": [{"text": "Next."}]}))

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "paddock", *words, "--store", str(self.store), "--json"]

    def start(self) -> subprocess.Popen[bytes]:
        agent = shlex.join(["python3", "-c", f"MARK = {self.mark!r}{SMALL_AGENT}"])
        count = str(KILLED_AT_ONCE)
        words = (
            "rollout",
            str(self.folder / "task"),
            "--agent",
            f"command:{agent}",
            "-n",
            count,
            "--parallel",
            count,
        )
        command = self.command(*words, "--model", f"replay:{self.folder / 'script.json'}")
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            command, stdout=quiet, stderr=quiet, env={**os.environ, "TMPDIR": str(self.temporary)}
        )

    def clean(self) -> None:
        subprocess.run(self.command("doctor", "--clean"), check=True, capture_output=True, timeout=DEADLINE_SECONDS)

    def begun(self) -> int:
        """How many rollouts its store knows."""
        try:
            with Store.open(self.store, read_only=True) as store:
                return store.count()
        except StoreError:
            return 0

    def survivors(self) -> int:
        """What runs of it: agents, known by a word on their command line, and what has not left its folder yet."""
        count = 0
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words, place = (entry / "cmdline").read_bytes(), os.readlink(entry / "cwd")
            except OSError:
                continue
            count += self.mark.encode() in words or Path(place) == self.folder
        return count


async def crash() -> list[ReportRow]:
    return await asyncio.to_thread(kill_often)


def kill_often() -> list[ReportRow]:
    chance = random.Random(11)
    recorded = interrupted = open_after = changed = processes = folders = 0
    with tempfile.TemporaryDirectory() as folder:
        victim = Victim(Path(folder))
        outcomes: dict[str, str] = {}
        for number in range(KILLS):
            process = victim.start()
            wait_until(lambda: victim.begun() > recorded)  # noqa: B023 - called before `recorded` changes
            time.sleep(chance.uniform(0, LATEST_KILL))
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_SECONDS)
            with Store.open(victim.store, read_only=True) as store:
                interrupted += store.count(finished=False)
            victim.clean()
            processes = victim.survivors()
            folders = len(list(victim.temporary.iterdir()))
            with Store.open(victim.store, read_only=True) as store:
                records = list(store.list())
            changed += sum(outcomes.get(record.rollout_id, record.outcome) != record.outcome for record in records)
            outcomes = {record.rollout_id: str(record.outcome) for record in records}
            open_after = sum(record.outcome is None for record in records)
            recorded = len(records)
            print(f"kill {number + 1}: {recorded} rollouts, {open_after} open", file=sys.stderr)
    return [
        ReportRow("kills", str(KILLS)),
        ReportRow("rollouts", f"{recorded}, {interrupted} of them interrupted"),
        ReportRow("without an outcome afterwards", str(open_after), "0", open_after == 0),
        ReportRow("outcomes that changed later", str(changed), "0", changed == 0),
        ReportRow("processes left", str(processes), "0", processes == 0),
        ReportRow("folders left", str(folders), "0", folders == 0),
    ]


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the rollouts did not begin")
        time.sleep(0.02)


# -- the command line ---------------------------------------------------------------------------------

MEASURES = {"overhead": overhead, "parallel": parallel, "agent": agent, "crash": crash}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rollouts", description=__doc__)
    parser.add_argument("measures", nargs="*", choices=[*MEASURES, []], metavar="MEASURE", help=", ".join(MEASURES))
    lines: list[ReportRow] = []
    for name in parser.parse_args().measures or MEASURES:
        print(f"{name} …", file=sys.stderr)
        lines += asyncio.run(MEASURES[name]())
    print(f"{'measure':<38}{'value':>26}{'target':>10}  reached")
    for line in lines:
        word = "" if line.reached is None else "yes" if line.reached else "NO"
        print(f"{line.measure:<38}{line.value:>26}{line.target:>10}  {word}")
    return 1 if any(line.reached is False for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
