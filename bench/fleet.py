"""What the fleet client costs, on a real plane of this machine: `python -m bench.fleet`.

Listing tools, one tool call beside the official MCP client on the same endpoint, how long the loop is held up while
many instances are made, and whole episodes at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.peers import peer_python

from paddock.fleet import FleetEnvClient, FleetTaskEnv
from paddock.fleet.plane import HostedEnvironment, PlaneSettings, serve_plane
from paddock.telemetry.bus import Bus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from multiprocessing.connection import Connection

    from paddock.fleet import FleetMCPTools

KEY = "bench"
ROUND = 50
VERIFIER = "def verify(env):\n    return 1.0\n"
TARGETS = {"list_tools_ms": 100.0, "call_ratio": 1.2, "loop_lag_ms": 50.0}
PEER = """
import asyncio, json, sys, time
from mcp import Client
async def main(url):
    async with Client(url, mode="legacy") as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            times = []
            for _ in range(int(line)):
                began = time.perf_counter()
                await client.call_tool("list_notes", {})
                times.append((time.perf_counter() - began) * 1000)
            print(json.dumps(times), flush=True)
asyncio.run(main(sys.argv[1]))
"""


def plane_process(folder: str, limit: int, report: Connection) -> None:
    hosted = (HostedEnvironment("notes", "notes"),)
    settings = PlaneSettings(state=Path(folder), environments=hosted, api_key=KEY, warm=2, instance_limit=limit)
    serve_plane(settings, announce=lambda url, _: report.send(url))


@contextlib.contextmanager
def running_plane(limit: int) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=plane_process, args=(folder, limit, theirs))
        process.start()
        try:
            yield ours.recv()
        finally:
            process.terminate()
            process.join(30)


@contextlib.asynccontextmanager
async def instance(url: str) -> AsyncIterator[FleetMCPTools]:
    orchestrator, tools = await FleetEnvClient.from_fleet_async(KEY, "notes", base_url=url)
    try:
        yield tools
    finally:
        await orchestrator.close_async()


async def calls(url: str, count: int) -> dict[str, float]:
    """Listing, and the same call by us and by the official client in turns."""
    async with instance(url) as tools:
        began = time.perf_counter()
        await tools.list_tools()
        listed = (time.perf_counter() - began) * 1000
        peer = await asyncio.to_thread(_official, tools.mcp_urls[0])
        try:
            ours: list[float] = []
            theirs: list[float] = []
            for _ in range(max(1, count // ROUND) + 1):
                theirs = theirs + await asyncio.to_thread(_round_of, peer)
                for _ in range(ROUND):
                    began = time.perf_counter()
                    await tools.call_tool("list_notes", {})
                    ours.append((time.perf_counter() - began) * 1000)
        finally:
            peer.kill()
            peer.wait()
    mine, official = statistics.median(ours[ROUND:]), statistics.median(theirs[ROUND:])
    return {"list_tools_ms": listed, "call_ms": mine, "official_call_ms": official, "call_ratio": mine / official}


def _official(url: str) -> subprocess.Popen[str]:
    """The official client in a process of its own; it makes a round of calls for each line it is sent."""
    command = [str(peer_python("mcp2")), "-c", PEER, url]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _round_of(peer: subprocess.Popen[str]) -> list[float]:
    assert peer.stdin is not None
    assert peer.stdout is not None
    peer.stdin.write(f"{ROUND}\n")
    peer.stdin.flush()
    seconds: list[float] = json.loads(peer.stdout.readline())
    return seconds


async def lag(url: str, count: int) -> dict[str, float]:
    """The longest the loop was held up while `count` instances were made at once."""
    worst = 0.0

    async def tick() -> None:
        nonlocal worst
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            worst = max(worst, time.perf_counter() - began - 0.005)

    ticking = asyncio.ensure_future(tick())
    began = time.perf_counter()
    made = await asyncio.gather(*(FleetEnvClient.from_fleet_async(KEY, "notes", base_url=url) for _ in range(count)))
    took = time.perf_counter() - began
    ticking.cancel()
    await asyncio.gather(*(orchestrator.close_async() for orchestrator, _ in made))
    return {"instances": count, "made_seconds": took, "loop_lag_ms": worst * 1000}


async def episodes(url: str, count: int) -> dict[str, float]:
    """Whole episodes at once: how many end well, and whether every rollout that started also completed."""
    bus = Bus()
    names: list[str] = []
    bus.subscribe(lambda event: names.append(event.name))
    task = {"task_key": "t", "prompt": "p", "env_key": "notes", "verifier_code": VERIFIER}

    async def one() -> float | None:
        async with FleetTaskEnv(task, KEY, base_url=url, bus=bus) as env:
            await env.reset_async()
            for number in range(5):
                await env.step_async({"tool": "add_note", "params": {"title": str(number), "body": "x"}})
            reward: float | None = (await env.step_async({"done": True}))[1]
            return reward

    threads = threading.active_count()
    began = time.perf_counter()
    rewards = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    took = time.perf_counter() - began
    return {
        "episodes": count,
        "episodes_seconds": took,
        "graded": sum(reward == 1.0 for reward in rewards),
        "unbalanced": names.count("fleet_rollout_started") - names.count("fleet_rollout_completed"),
        "threads_left": threading.active_count() - threads,
    }


async def measured(url: str, options: argparse.Namespace) -> dict[str, float]:
    report: dict[str, float] = await calls(url, options.calls)
    report |= await lag(url, options.instances)
    report |= await episodes(url, options.episodes)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with running_plane(max(options.instances, options.episodes) + 4) as url:
        report: dict[str, Any] = asyncio.run(measured(url, options))
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            target = f"   target: under {TARGETS[name]:g}" if name in TARGETS else ""
            print(f"{name:<20} {value:10.3f}{target}")
    missed = [name for name, most in TARGETS.items() if report[name] >= most]
    return 1 if missed or report["unbalanced"] else 0


if __name__ == "__main__":
    sys.exit(main())
