"""Forks and resuming, with real agents and a scripted model that counts what is sampled.

    python -m bench.forks [fidelity|engine|start|crash] [--agents pi,codex] [--tasks files,noise,helpers]

fidelity  Every rollout is forked at every call with the same script: requests, work folder and reward are compared.
engine    What the engine samples for eight forks at a call, against the calls that follow it.
start     From the start of the agent to the first live call, against its own start-up and its tools' time.
crash     A rollout of twelve calls, killed at each call, then resumed: rewards, calls sampled again, what is left.

Needs bubblewrap, and the agents in the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from paddock.agents import AGENTS, find_agent
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.processes import find_marked_processes
from paddock.rollouts.api import run_rollout
from paddock.rollouts.fork import fork
from paddock.store import Store
from paddock.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.models.replay import ServedRequest
    from paddock.store.record import RolloutRecord

MEASURES = ("fidelity", "engine", "start", "crash")
WITH_TOOLS = [name for name in AGENTS if find_agent(name).tools is not None]
PARALLEL = 2
FORKS = 8
ROUNDS = 7
CRASH_CALLS = 12
SECONDS = 120.0
"""For one rollout."""
START_TARGET = 1.1
INSTRUCTION = "Write 42 to answer.txt."
TEST = """
mkdir -p /logs/verifier
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
FILES = (
    "seq 1 300 > numbers.txt; mkdir -p src; wc -l numbers.txt",
    "printf 41 > answer.txt; cat answer.txt",
    "sed -i 's/41/42/' answer.txt; head -3 numbers.txt > src/three.txt",
    "ls -la; cat missing.txt",
    "cp -r src copy; rm numbers.txt; find . -type f | sort",
)
NOISE = (
    "date; date +%s; date -Ins; echo pid $$; echo $RANDOM$RANDOM",
    "printf 42 > answer.txt; stat answer.txt; ls -l --time-style=full-iso",
    "mktemp; head -c 16 /dev/urandom | sha256sum; cat /proc/sys/kernel/random/uuid; printf '%x\\n' $$$RANDOM",
    "time sleep 0.01; echo took 0.0$RANDOM s; ps; uptime; free -k | head -2",
    "python3 -c 'import socket,os; s=socket.create_server((\"127.0.0.1\",0)); print(s, id(s), object(), os.times())'",
    "sleep 30 & jobs -l; kill $!; dd if=/dev/zero of=/dev/null count=1000; df . | tail -1; cat /proc/self/stat",
)
HELPERS: dict[str, dict[str, Any]] = {
    "claude-code": {"tool": "Agent", "arguments": {"description": "Looks", "subagent_type": "general-purpose"}},
    "codex": {"tool": "multi_agent_v1__spawn_agent", "arguments": {"agent_type": "default"}},
    "gemini-cli": {"tool": "invoke_agent", "arguments": {"agent_name": "codebase_investigator"}},
    "opencode": {"tool": "task", "arguments": {"description": "Looks", "subagent_type": "general"}},
    "qwen-code": {"tool": "agent", "arguments": {"description": "Looks", "subagent_type": "general-purpose"}},
}
"""How a model begins a sub-agent. The other agents have none."""
REPORTS = {"gemini-cli": {"tool": "complete_task", "arguments": {"report": "All is there."}}}
PLACES = ("the first half", "the second half")


def run_turn(agent: str, *commands: str) -> dict[str, Any]:
    tools = find_agent(agent).tools
    assert tools is not None
    uses = [tools.run(command) for command in commands]
    calls = [{"tool": name, "arguments": arguments} for name, arguments in uses]
    return {"thinking": "What next?", "text": "I am at it.", "tools": calls}


def finish_turn(agent: str) -> dict[str, Any]:
    tools = find_agent(agent).tools
    assert tools is not None
    if tools.finish is None:
        return {"text": "Done."}
    name, arguments = tools.finish
    return {"text": "Done.", "tool": name, "arguments": arguments}


def make_script(agent: str, task: str) -> dict[str, Any]:
    """What the model says: one tool call after the other, the last two together."""
    if task == "helpers":
        return helper_script(agent)
    commands = FILES if task == "files" else NOISE
    turns = [run_turn(agent, command) for command in commands[:-2]]
    return {"turns": [*turns, run_turn(agent, *commands[-2:]), finish_turn(agent)]}


def helper_script(agent: str) -> dict[str, Any]:
    """Two sub-agents at once, which run noisy commands of different length. Agents without them do so themselves."""
    write = run_turn(agent, "printf 42 > answer.txt; date")
    if agent not in HELPERS:
        return {"turns": [run_turn(agent, *NOISE[:2]), run_turn(agent, *NOISE[2:4]), write, finish_turn(agent)]}
    spawn = HELPERS[agent]
    key = "message" if agent == "codex" else "prompt"
    calls = [{**spawn, "arguments": {**spawn["arguments"], key: f"Look at {place}."}} for place in PLACES]
    report = REPORTS.get(agent, {"text": "All is there."})
    tasks: list[dict[str, Any]] = [
        {
            "when": f"Look at {place}.",
            "turns": [
                run_turn(agent, f"sleep 0.{3 - number}; echo {place}; date +%N"),
                run_turn(agent, f"echo {place} > helper{number}.txt; echo $RANDOM"),
                report,
            ],
        }
        for number, place in enumerate(PLACES)
    ]
    if agent == "codex":
        # Its sub-agents see what the user said, so they play the agent's turns too. The agent gets a head start, is
        # the first to wait, and ends last.
        start = run_turn(agent, "mkdir /tmp/started 2>/dev/null || sleep 1")
        own = [start, {"tools": calls}, run_turn(agent, "mkdir /tmp/first 2>/dev/null && sleep 5; ls")]
    else:
        own = [{"tools": calls}, run_turn(agent, "sleep 1.5; ls")]
    own += [write, finish_turn(agent)]
    return {"tasks": [*tasks, {"when": "", "turns": own}]}


TASKS = ("files", "noise", "helpers")


@dataclass(frozen=True, slots=True)
class Recorded:
    """A recorded rollout, and the model that samples for its forks."""

    record: RolloutRecord
    store: Store
    server: ReplayServer

    async def forked(self, at: int, n: int = 1, parallel: int = PARALLEL) -> list[RolloutRecord]:
        self.server.log.clear()
        model = endpoint_of(self.server)
        result = await fork(self.record, at=at, n=n, parallel=parallel, model=model, store=self.store, retries=0)
        return result.records


def endpoint_of(server: ReplayServer) -> Endpoint:
    return Endpoint(server.url, "replay", engine="vllm")


@asynccontextmanager
async def recorded(agent: str, script: dict[str, Any]) -> AsyncIterator[Recorded]:
    with (
        tempfile.TemporaryDirectory(prefix="paddock-bench-forks-") as folder,
        Store.open(Path(folder, "store")) as store,
    ):
        async with ReplayServer(script) as server:
            record = await record_one(agent, server, store)
            if record.reward != 1.0:
                raise RuntimeError(f"{agent} ended with {record.outcome}: {record.error}")
            yield Recorded(record, store, server)


async def record_one(agent: str, server: ReplayServer, store: Store) -> RolloutRecord:
    task = Task(INSTRUCTION, id="answer", verifier=TEST)
    async with asyncio.timeout(SECONDS):
        return await run_rollout(task, model=endpoint_of(server), agent=agent, store=store, retries=0)


def count_tokens(served: list[ServedRequest]) -> int:
    return sum(len(each.sampled_ids) for each in served)


def read_folder(one: Recorded, record: RolloutRecord) -> dict[str, bytes | None]:
    """Paths and contents of a sealed work folder."""
    if record.workdir_blob is None:
        return {}
    with tarfile.open(fileobj=io.BytesIO(one.store.get_blob(record.workdir_blob))) as packed:
        files = {member.name: packed.extractfile(member) for member in packed}
        return {name: None if file is None else file.read() for name, file in files.items()}


# -- fidelity -----------------------------------------------------------------------------------------


async def measure_fidelity(agent: str, task: str) -> dict[str, Any]:
    states: Counter[str] = Counter()
    problems: list[str] = []
    began = time.monotonic()
    async with recorded(agent, make_script(agent, task)) as one:
        folder = read_folder(one, one.record)
        # The call after the last one: everything is replayed.
        for at in range(one.record.call_count + 1):
            async with asyncio.timeout(SECONDS):
                (record,) = await one.forked(at)
            fidelity = record.fork["fidelity"]
            states[fidelity["state"]] += 1
            problems += find_problems(one, record, at, folder)
            problems += [
                f"c{at}: {entry['fidelity']} {entry['difference']}"
                for entry in fidelity["different_calls"]
                if entry["fidelity"] != "tool_output"
            ]
    return {
        "agent": agent,
        "task": task,
        "calls": one.record.call_count,
        "forks": sum(states.values()),
        **{state: states[state] for state in ("equal", "tool_output", "same_shape", "diverged")},
        "problems": len(problems),
        "seconds": round(time.monotonic() - began),
        "details": problems,
    }


def find_problems(one: Recorded, record: RolloutRecord, at: int, folder: dict[str, bytes | None]) -> list[str]:
    problems = []
    if (record.outcome, record.reward) != (one.record.outcome, one.record.reward):
        problems.append(f"c{at}: {record.outcome}, reward {record.reward}: {record.error}")
    if read_folder(one, record) != folder:
        problems.append(f"c{at}: another work folder: {sorted(read_folder(one, record))}")
    expected = one.record.call_count - at
    if len(one.server.log) != expected:
        problems.append(f"c{at}: the engine got {len(one.server.log)} requests, not {expected}")
    return problems


# -- what the engine samples --------------------------------------------------------------------------


async def measure_engine(agent: str, task: str) -> dict[str, Any]:
    async with recorded(agent, make_script(agent, task)) as one:
        calls = one.store.calls(one.record.rollout_id)
        at = len(calls) // 2
        await one.forked(at, FORKS)
        expected = FORKS * sum(len(call.completion_token_ids) for call in calls[at:])
        prompts = {tuple(call.prompt_token_ids) for call in calls[:at]}
        again = sum(tuple(each.prompt_ids) in prompts for each in one.server.log)
        return {
            "agent": agent,
            "task": task,
            "calls": len(calls),
            "at": at,
            "sampled": count_tokens(one.server.log),
            "expected": expected,
            "prompts of replayed calls": again,
        }


# -- start ------------------------------------------------------------------------------------------------


async def measure_start(agent: str, task: str) -> dict[str, Any]:
    """The time of a rollout from its start to call `at`, and of its fork, in turns."""
    async with recorded(agent, make_script(agent, task)) as one:
        at = one.record.call_count - 1
        forked: list[float] = []
        alone: list[float] = []
        for _ in range(ROUNDS):
            source = await record_one(agent, one.server, one.store)
            (record,) = await one.forked(at)
            own = one.store.calls(source.rollout_id)
            tools = sum(later.started - (call.ended or 0.0) for call, later in pairwise(own[: at + 1]))
            alone.append(own[0].started - source.started_at + tools)
            live = one.store.calls(record.rollout_id)[at]
            forked.append(live.started - record.started_at)
        return {
            "agent": agent,
            "task": task,
            "at": at,
            "start-up and tools": f"{median(alone):.2f} s",
            "fork to live call": f"{median(forked):.2f} s",
            "ratio of medians": f"{median(forked) / median(alone):.2f}",
            "of minima": f"{min(forked) / min(alone):.2f}",
            "target": START_TARGET,
        }


# -- crash ------------------------------------------------------------------------------------------------


async def measure_crash(agent: str, _: str) -> dict[str, Any]:
    """Kill `paddock rollout` when the engine gets call k, for each k, and resume the batch."""
    commands = [f"echo {number} >> lines.txt; date" for number in range(CRASH_CALLS - 2)]
    turns = [*(run_turn(agent, command) for command in commands), run_turn(agent, "printf 42 > answer.txt")]
    script = {"turns": [*turns, finish_turn(agent)], "faults": [{"delay": 0.2}]}
    solved, again, left, calls = 0, 0, 0, []
    with tempfile.TemporaryDirectory(prefix="paddock-bench-forks-") as name:
        folder = Path(name)
        task = folder / "task"
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text(INSTRUCTION)
        (task / "tests" / "test.sh").write_text(TEST)
        for kill in range(CRASH_CALLS):
            async with ReplayServer(script) as server:
                place = Place(folder, agent, server)
                await place.kill_at(kill)
                repeated, reward = await place.resume()
                again += repeated
                solved += reward == 1.0
                calls.append(len(server.log))
                left += await asyncio.to_thread(place.count_left)
    return {
        "agent": agent,
        "calls": CRASH_CALLS,
        "same reward": f"{solved} of {CRASH_CALLS}",
        "recorded calls sampled again": again,
        "left behind": left,
        "requests": " ".join(map(str, calls)),
    }


@dataclass(slots=True)
class Place:
    """One batch that is killed and resumed."""

    folder: Path
    agent: str
    server: ReplayServer
    batch: str = ""

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        temporary = self.folder / "temporary"
        temporary.mkdir(exist_ok=True)
        command = [
            *(sys.executable, "-m", "paddock", "rollout", str(self.folder / "task"), "--agent", self.agent, "--json"),
            *("--model", self.server.url, "--retries", "0", "--store", str(self.folder / "store"), *words),
        ]
        variables = {**os.environ, "TMPDIR": str(temporary)}
        return await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables
        )

    async def kill_at(self, call: int) -> None:
        self.batch = f"b-kill-{call}"
        process = await self.start("--batch-id", self.batch)
        async with asyncio.timeout(SECONDS):
            while len(self.server.log) <= call:
                await asyncio.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            await process.wait()

    async def resume(self) -> tuple[int, float | None]:
        """How many recorded calls were sampled again, and the reward."""
        with Store.open(self.folder / "store", read_only=True) as store:
            (record,) = store.list(batch_id=self.batch)
            recorded = {tuple(call.prompt_token_ids) for call in store.calls(record.rollout_id) if call.ok}
        before = len(self.server.log)
        process = await self.start("--resume", self.batch)
        async with asyncio.timeout(SECONDS):
            output, _ = await process.communicate()
        repeated = sum(tuple(each.prompt_ids) in recorded for each in self.server.log[before:])
        return repeated, json.loads(output.splitlines()[-1])["reward"]

    def count_left(self) -> int:
        """Processes, mounts and folders of the batch that are still there."""
        with Store.open(self.folder / "store", read_only=True) as store:
            sandboxes = [record.sandbox_id for record in store.list(batch_id=self.batch)]
        processes = [pid for sandbox in sandboxes for pid in find_marked_processes(sandbox or "none")]
        mounts = Path("/proc/self/mounts").read_text().count(str(self.folder))
        folders = [path for path in (self.folder / "temporary").iterdir() if "runtime" not in path.name]
        return len(processes) + mounts + len(folders)


# -- the command line ---------------------------------------------------------------------------------


def show(row: dict[str, Any], *, with_head: bool) -> None:
    columns = [name for name in row if name != "details"]
    if with_head:
        print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    print(f"| {' | '.join(str(row[name]) for name in columns)} |", flush=True)
    for detail in row.get("details", ()):
        print(f"  {detail}", file=sys.stderr)


async def measure(name: str, agents: list[str], tasks: list[str]) -> None:
    work = {
        "fidelity": measure_fidelity,
        "engine": measure_engine,
        "start": measure_start,
        "crash": measure_crash,
    }[name]
    print(f"\n{name}\n")
    with_head = True
    for agent in agents:
        for task in tasks[:1] if name == "crash" else tasks:
            try:
                row = await work(agent, task)
            except (RuntimeError, TimeoutError) as error:
                print(f"error: {agent} {task} was not measured: {error!r}", file=sys.stderr)
                continue
            show(row, with_head=with_head)
            with_head = False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.forks", description=__doc__)
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help=f"of {', '.join(MEASURES)}; default: all")
    parser.add_argument("--agents", default=",".join(WITH_TOOLS), help="names, separated by commas")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names, separated by commas")
    options = parser.parse_args()
    for name in options.measures or MEASURES:
        asyncio.run(measure(name, options.agents.split(","), options.tasks.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
