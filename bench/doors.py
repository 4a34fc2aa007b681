"""The same counter three ways: served plainly, by a host on Ray behind a door that forwards, and behind one that
redirects. Steps per second and sessions opened per second, in turns. Usage: python -m bench.doors"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from paddock.testing.ray_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = ("plain", "forward", "redirect")
LOAD_SECONDS = 120.0
SESSIONS = (1, 16, 128)


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The counter, served as `options` say, at any port."""
    command = [sys.executable, "-m", "paddock", "serve", "counter", "--port", "0", "--json", "--max-sessions", "2000"]
    quiet = ["--log-level", "error"]
    process = subprocess.Popen([*command, *quiet, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def load(program: str, url: str, **options: float) -> dict[str, float]:
    """The report of one of the load programs."""
    asked = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", f"bench.load.{program}", "--url", url, *asked]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=LOAD_SECONDS, check=True)
    report: dict[str, float] = json.loads(finished.stdout)
    return report


def compare(
    rounds: int = 3, seconds: float = 1.5, sessions: tuple[int, ...] = SESSIONS
) -> dict[str, dict[str, float]]:
    """Medians of `rounds` turns for each way: steps per second by number of sessions, sessions opened per second."""
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    with LocalCluster(1, cpus=4) as cluster, ExitStack() as stack:
        ray = ["--engine", "ray", "--ray-address", cluster.address]
        urls = {"plain": stack.enter_context(served())}
        urls |= {way: stack.enter_context(served(*ray, "--door", way)) for way in WAYS[1:]}
        for _ in range(rounds):
            for count in sessions:
                for way, url in urls.items():
                    report = load("steps", url, sessions=count, seconds=seconds)
                    found[way].setdefault(f"steps/s at {count}", []).append(report["rate"])
            for way, url in urls.items():
                report = load("opens", url)
                found[way].setdefault("opens/s", []).append(report["rate"])
    return {
        way: {name: statistics.median(rates) for name, rates in measured.items()} for way, measured in found.items()
    }


if __name__ == "__main__":
    measured = compare(int(os.environ.get("ROUNDS", "3")))
    for name in measured["plain"]:
        plain = measured["plain"][name]
        shown = "  ".join(f"{way} {measured[way][name]:,.0f} ({measured[way][name] / plain:.2f}x)" for way in WAYS)
        print(f"{name}: {shown}")
