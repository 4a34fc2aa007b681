"""Interleaved samples: every round presses each server once, one after the other."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from scripts.peers import REPOSITORY

from bench.processes import group_usage, wait_quiet
from bench.servers import Server

OVERHEAD_SECONDS = 90.0
"""How much longer than its measured time a load generator may take, to connect and to close."""

BYSTANDER_CPU_SHARE = 0.03
"""Servers that are up but not pressed may use this much of a core before we complain."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one load generator saw of one server."""

    rate: float
    generator_cpu_share: float
    """1.0 is a whole core: a generator near it may itself be the limit."""

    p50_ms: float | None = None
    p99_ms: float | None = None
    bystander_cpu_share: float = 0.0
    """What the servers that were not pressed used meanwhile; about 0."""


Load = Callable[[Server], Sample]


def press(server: Server, program: str, *, python: str = sys.executable, **options: float | str) -> Sample:
    """Run the load generator `bench.load.PROGRAM` against a server and return what it saw.

    Raises:
        RuntimeError: the generator failed.
        subprocess.TimeoutExpired: it did not come to an end.
    """
    result = subprocess.run(
        load_command(server, program, python=python, **options),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=OVERHEAD_SECONDS + float(options.get("seconds", 0.0)),
        check=False,
    )
    if result.returncode != 0:
        raise RuntimeError(f"{program} against {server.spec} failed:\n{result.stderr[-2000:]}")
    return Sample(**json.loads(result.stdout))


def load_command(server: Server, program: str, *, python: str = sys.executable, **options: float | str) -> list[str]:
    """The command line of a load generator."""
    command = [python, "-m", f"bench.load.{program}", "--url", server.url]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    return command


def interleave(label: str, servers: list[Server], load: Load, rounds: int) -> list[list[Sample]]:
    """Take `rounds` samples of each server in turns; the result is in the servers' order."""
    series: list[list[Sample]] = [[] for _ in servers]
    for number in range(1, rounds + 1):
        for server, samples in zip(servers, series, strict=True):
            wait_quiet([each.group for each in servers])
            sample = _watch_bystanders(server, servers, load)
            samples.append(sample)
            note(
                f"{label}, round {number} of {rounds}: {server.spec.label} {sample.rate:,.0f}/s, "
                f"generator at {sample.generator_cpu_share:.0%} of a core"
            )
    return series


def note(line: str) -> None:
    """Tell the person who waits what just happened."""
    print(line, file=sys.stderr, flush=True)


def _watch_bystanders(server: Server, servers: list[Server], load: Load) -> Sample:
    bystanders = [each.group for each in servers if each is not server]
    cpu_before = sum(group_usage(group).cpu_seconds for group in bystanders)
    began = time.monotonic()
    sample = load(server)
    cpu_used = sum(group_usage(group).cpu_seconds for group in bystanders) - cpu_before
    share = cpu_used / (time.monotonic() - began)
    if share > BYSTANDER_CPU_SHARE:
        note(f"warning: servers without load used {share:.0%} of a core during this sample")
    return replace(sample, bystander_cpu_share=share)
