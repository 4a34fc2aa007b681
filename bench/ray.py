"""What Ray costs and what more nodes bring, on a cluster whose nodes are processes of this machine.

    python -m bench.ray [steps|vector|scaling|rollouts|cost|fault] [--rounds N] [--seconds S] [--json FILE]

steps     Steps per second on a host that Ray has placed, against the same server without Ray; through the gateway
          that forwards, and sessions opened at the gateway that forwards, at the one that redirects, and at none.
vector    1,000 sessions of one `VectorClient` through a gateway: on one host, and spread over two.
scaling   Steps per second of 1, 2 and 3 hosts, each step waits 5 ms.
rollouts  Rollouts per minute on 1, 2 and 3 nodes, and by the local engine.
cost      Processor time and memory of one step, one session, one rollout: what a plan for a cluster is made of.
fault     One of three nodes is killed under 300 sessions and 30 rollouts: what becomes of each.

Samples are interleaved; ratios are medians of the rounds' own ratios. The load of the machine is printed with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.processes import family, proportional_memory
from bench.ray_cluster import LocalCluster, rollouts_per_minute
from bench.ray_faults import AGENT, CHECK, SCRIPT, lose_a_node, serving
from bench.samples import note, press
from bench.servers import Server, ServerSpec
from paddock.agents.command import CommandAgent
from paddock.rollouts.api import run_batch
from paddock.scale.cluster import Resources, connected
from paddock.scale.cluster import nodes as nodes_of_cluster
from paddock.scale.rollouts import RayBackend
from paddock.tasks.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable

SLEEPING = "bench.envs:SleepCounter"  # not by its path: beside it lies a module called `ray`
STEP_SESSIONS = (1, 16, 128)
STEP_TARGET = 0.95
OPENS = 500
VECTOR_SESSIONS = 1000
WAIT_THREADS = 8
"""Threads of a host whose steps wait: at 5 ms each, 1,600 steps a second, before any core is full."""
WAIT_SESSIONS = 96
PER_NODE = 4
ROLLOUTS = 12
WORK_SECONDS = 10.0
FAULT_SESSIONS, FAULT_ROLLOUTS, FAULT_SECONDS = 300, 30, 75.0


@dataclass(frozen=True, slots=True)
class Settings:
    rounds: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measure: the values of its rounds, and how they compare with those of its base."""

    measure: str
    unit: str
    values: list[float]
    base: list[float] | None = None
    target: float | None = None

    @property
    def ratio(self) -> float | None:
        if self.base is None:
            return None
        return statistics.median(ours / theirs for ours, theirs in zip(self.values, self.base, strict=True))

    def text(self) -> str:
        median = statistics.median(self.values)
        value_text = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
        compared = "" if self.ratio is None else f"{self.ratio:7.2f}x"
        reached = "" if self.target is None or self.ratio is None else ("yes" if self.ratio >= self.target else "no")
        target = "" if self.target is None else f"at least {self.target:g}x"
        return f"{self.measure:<58} {value_text:>10} {self.unit:<10} {compared:>8}  {target:<15} {reached}"


# -- steps and sessions -------------------------------------------------------------------------------


def steps(settings: Settings) -> list[Measurement]:
    """The same server, in an actor and in a process of its own; then with a gateway before it."""
    options = ["--max-sessions", str(4 * max(*STEP_SESSIONS, OPENS)), "--log-level", "warning"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(1, cpus=8))
        plain = stack.enter_context(serving(None, *options, log=folder / "log"))
        gateways = {
            gateway: stack.enter_context(
                serving(cluster.address, *options, "--hosts", "1", "--gateway", gateway, log=folder / "log")
            )
            for gateway in ("forward", "redirect")
        }
        placed = host_urls(gateways["forward"])[0]
        lines = []
        for sessions in STEP_SESSIONS:
            urls = {"without Ray": plain, "placed by Ray": placed, "through the gateway": gateways["forward"]}
            rates = interleaved(urls, settings, partial(stepping, sessions, settings))
            lines += against(f"steps, {sessions} sessions", "steps/s", rates, {"placed by Ray": STEP_TARGET})
        urls = {"without Ray": plain, "placed by Ray": placed, **gateways}
        rates = interleaved(urls, settings, lambda url: rate_of(url, "opens", OPENS, settings))
        return lines + against(f"sessions opened, {OPENS}", "opens/s", rates, {})


def vector(settings: Settings) -> list[Measurement]:
    """The same client and the same gateway; what differs is how many hosts there are to spread over."""
    options = ["--max-sessions", str(4 * VECTOR_SESSIONS), "--log-level", "warning"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(2, cpus=8))
        urls = {
            name: stack.enter_context(serving(cluster.address, *options, "--hosts", hosts, log=folder / "log"))
            for name, hosts in (("one host", "1"), ("two hosts", "2"))
        }
        rates = interleaved(urls, settings, lambda url: rate_of(url, "vector", VECTOR_SESSIONS, settings))
        return against(f"steps of one client, {VECTOR_SESSIONS:,} sessions", "steps/s", rates, {"two hosts": 1.0})


def scaling(settings: Settings) -> list[Measurement]:
    """Each host has few threads, so that waiting and not the cores is what limits it."""
    options = ["--threads", str(WAIT_THREADS), "--host-cpus", "1", "--max-sessions", str(4 * WAIT_SESSIONS)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(3, cpus=8))
        urls = {}
        for hosts in (1, 2, 3):
            server = serving(cluster.address, "--hosts", str(hosts), *options, target=SLEEPING, log=folder / "log")
            url = urls[f"{hosts} host{'s' if hosts > 1 else ''}"] = stack.enter_context(server)
            wait_for(f"{hosts} hosts", lambda url=url, hosts=hosts: len(host_urls(url)) == hosts)  # type: ignore[misc]
        rates = interleaved(urls, settings, partial(stepping, WAIT_SESSIONS, settings))
    return against(f"steps that wait 5 ms, {WAIT_SESSIONS} sessions", "steps/s", rates, {})


def stepping(sessions: int, settings: Settings, url: str) -> float:
    return rate_of(url, "steps", sessions, settings)


def rate_of(url: str, program: str, sessions: int, settings: Settings) -> float:
    server = Server(ServerSpec("paddock", "counter", sessions), url, os.getpid())
    options: dict[str, float | str] = {} if program == "opens" else {"seconds": settings.seconds}
    return press(server, program, python=sys.executable, sessions=sessions, **options).rate


def host_urls(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        return [host["url"] for host in json.load(answer)["hosts"]]


def wait_for(what: str, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come")
        time.sleep(0.2)


# -- rollouts -----------------------------------------------------------------------------------------


def rollouts(settings: Settings) -> list[Measurement]:
    """Four at a time on each node; by the local engine four at a time as well."""
    nodes = {f"{count} node{'s' if count > 1 else ''}": count for count in (1, 2, 3)}
    with ExitStack() as stack:
        # A rollout that asks for `of2` may run on the first two nodes, and so on.
        cluster = stack.enter_context(LocalCluster(1, cpus=8, resources={"of1": 100, "of2": 100, "of3": 100}))
        cluster.add_node(resources={"of2": 100, "of3": 100})
        cluster.add_node(resources={"of3": 100})
        stack.enter_context(connected(cluster.address))
        wait_for("3 nodes", lambda: sum(node.alive for node in nodes_of_cluster()) == 3)

        def measure(name: str) -> float:
            if name == "local engine":
                return asyncio.run(roll_out("local", PER_NODE))
            count = nodes[name]
            resources = Resources(cpus=0.1, custom={f"of{count}": 1})
            return asyncio.run(roll_out(RayBackend(resources=resources, per_node=PER_NODE), PER_NODE * count))

        names = {name: name for name in ("local engine", *nodes)}
        for name in nodes:
            measure(name)  # the first rollout of a worker imports everything
        rates = interleaved(names, settings, measure)
    return against(f"rollouts, {PER_NODE} at a time on a node, {WORK_SECONDS:g} s of work", "a minute", rates, {})


async def roll_out(engine: Any, parallel: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps(SCRIPT))
        agent = CommandAgent(shlex.join(["python3", "-c", AGENT.format(mark="bench", seconds=WORK_SECONDS)]))
        task = Task(instruction="Write 42 to answer.txt.", id="answer", verifier=CHECK)
        count = max(ROLLOUTS, 2 * parallel)
        result = await run_batch(
            [task], model=f"replay:{script}", agent=agent, store=Path(folder) / "store", n=count, parallel=parallel,
            engine=engine, retries=0,
        )  # fmt: skip
    wrong = [record.error for record in result.records if record.reward != 1.0]
    if wrong:
        raise RuntimeError(f"{len(wrong)} rollouts went wrong, the first: {wrong[0]}")
    return rollouts_per_minute(result.records)


# -- costs --------------------------------------------------------------------------------------------


def cost(settings: Settings) -> list[Measurement]:
    """Processor time, which other work on the machine changes little, and memory."""
    options = ["--hosts", "1", "--max-sessions", "4000", "--log-level", "warning"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(1, cpus=8))
        url = stack.enter_context(serving(cluster.address, *options, log=folder / "log"))
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            host = json.load(answer)["hosts"][0]["pid"]
        (gateway,) = [pid for pid in children() if b"paddock.scale.gateway_server" in words_of(pid)]
        before = {pid: proportional_memory(pid) for pid in (host, gateway)}
        lines = [
            Measurement("memory of an empty host", "MiB", [before[host]]),
            Measurement("of a gateway", "MiB", [before[gateway]]),
        ]
        spent: dict[int, list[float]] = {host: [], gateway: []}
        for _ in range(settings.rounds):
            began = {pid: cpu_seconds(pid) for pid in spent}
            rate = rate_of(url, "steps", 128, settings)
            for pid, values in spent.items():
                # The generator warms up for half a second, at the same rate.
                values.append(1e6 * (cpu_seconds(pid) - began[pid]) / (rate * (settings.seconds + 0.5)))
        lines += [Measurement("processor time of a step, host", "us", spent[host])]
        lines += [Measurement("processor time of a step, gateway that forwards", "us", spent[gateway])]
        stack.enter_context(connected(cluster.address))
        return lines + rollout_cost()


def rollout_cost() -> list[Measurement]:
    """Of twelve rollouts at once, each with an agent that only waits."""
    workers: dict[int, float] = {}
    observed = threading.Event()

    def watch() -> None:
        while not observed.wait(0.3):
            for pid in [pid for pid in everybody() if b"ray::" in words_of(pid) and b"perform" in words_of(pid)]:
                workers[pid] = max(workers.get(pid, 0.0), proportional_memory(pid))

    asyncio.run(roll_out(RayBackend(resources=Resources(cpus=0.1)), ROLLOUTS))
    watching = threading.Thread(target=watch)
    watching.start()
    began = time.process_time()
    asyncio.run(roll_out(RayBackend(resources=Resources(cpus=0.1)), ROLLOUTS))
    spent = (time.process_time() - began) / (2 * ROLLOUTS)
    observed.set()
    watching.join()
    return [
        Measurement("memory of a rollout's worker, without its agent", "MiB", list(workers.values()) or [0.0]),
        Measurement("processor time of a rollout, driver (with the scripted model)", "ms", [1000 * spent]),
    ]


def everybody() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def children() -> list[int]:
    """All that descend from this process."""
    return [pid for pid in family([os.getpid()]) if pid != os.getpid()]


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- both ---------------------------------------------------------------------------------------------


def interleaved(urls: dict[str, str], settings: Settings, measure: Callable[[str], float]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {name: [] for name in urls}
    for number in range(1, settings.rounds + 1):
        # Every other round goes backwards: whoever comes first after a pause must not always be the same.
        for name, url in list(urls.items())[:: 1 if number % 2 else -1]:
            values[name].append(measure(url))
            note(
                f"round {number} of {settings.rounds}: {name} {values[name][-1]:,.1f} (load {os.getloadavg()[0]:.1f})"
            )
    return values


def against(measure: str, unit: str, rates: dict[str, list[float]], targets: dict[str, float]) -> list[Measurement]:
    """The first is what the others are compared with."""
    first, *others = rates
    lines = [Measurement(f"{measure}, {first}", unit, rates[first])]
    return lines + [
        Measurement(f"{measure}, {name}", unit, rates[name], rates[first], targets.get(name)) for name in others
    ]


def fault() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pf-") as folder, LocalCluster(3, cpus=FAULT_ROLLOUTS) as cluster:
        outcome = lose_a_node(
            cluster, Path(folder), sessions=FAULT_SESSIONS, rollouts=FAULT_ROLLOUTS, work=FAULT_SECONDS
        )
        return outcome.as_json()


MEASURES: dict[str, Callable[[Settings], list[Measurement]]] = {
    "steps": steps,
    "vector": vector,
    "scaling": scaling,
    "rollouts": rollouts,
    "cost": cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ray", description=__doc__.partition("\n")[0])
    parser.add_argument("measures", nargs="*", choices=[*MEASURES, "fault"], help="Default: all of them.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to a file")
    options = parser.parse_args()
    settings = Settings(options.rounds, options.seconds)
    report: dict[str, Any] = {"load_before": os.getloadavg()}
    for name in options.measures or [*MEASURES, "fault"]:
        if name == "fault":
            report[name] = fault()
            print(json.dumps(report[name], indent=2))
            continue
        lines = MEASURES[name](settings)
        report[name] = [{"measure": each.measure, "values": each.values, "ratio": each.ratio} for each in lines]
        print("\n".join(each.text() for each in lines), flush=True)
    report["load_after"] = os.getloadavg()
    print(f"load of the machine: {report['load_before'][0]:.1f} before, {report['load_after'][0]:.1f} after")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
