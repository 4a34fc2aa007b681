"""Many episodes at once on a real plane while things break: `python -m bench.fleet_storm`.

Each kind of fault meets about one in twenty of its requests. Every episode must end with one outcome, with no
instance running and no thread left; the events of starts and completions must balance.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import multiprocessing
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from paddock.fleet import FleetTaskEnv
from paddock.fleet.plane import HostedEnvironment, PlaneSettings, serve_plane
from paddock.telemetry.bus import Bus

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

KEY = "storm"
TASK = {
    "task_key": "storm",
    "prompt": "Add three notes.",
    "env_key": "notes",
    "verifier_code": "def verify(env):\n    return float(len(env.db('current').table('notes').all()) >= 4)\n",
}
AT_THE_PLANE: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "^/v1/env/instances$", {"status": 503}),
    ("POST", "^/v1/env/instances$", {"drop": True}),
    ("POST", "^/v1/env/instances$", {"drop": True, "after": True}),
    ("POST", "^/v1/env/instances$", {"delay": 3.0}),
    ("POST", "^/v1/verifiers/execute$", {"status": 500}),
    ("POST", "^/v1/verifiers/execute$", {"drop": True, "after": True}),
    ("DELETE", "^/v1/env/instances/", {"status": 502}),
    ("DELETE", "^/v1/env/instances/", {"drop": True, "after": True}),
)
# Ids of instances end in a hexadecimal digit, so each of these meets one instance in sixteen.
AT_AN_INSTANCE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("1/.*reset$", {"status": 500}),
    ("3/.*reset$", {"hang": True}),
    ("5/(api/v1/)?mcp$", {"status": 502}),
    ("7/(api/v1/)?mcp$", {"drop": True}),
    ("9/(api/v1/)?mcp$", {"drop": True, "after": True}),
    ("b/(api/v1/)?mcp$", {"hang": True}),
    ("d/(api/v1/)?mcp$", {"dribble": 0.02}),
)


def plane_process(folder: str, limit: int, report: Connection) -> None:
    hosted = (HostedEnvironment("notes", "notes"),)
    settings = PlaneSettings(
        state=Path(folder), environments=hosted, api_key=KEY, warm=8, instance_limit=limit, faults=True
    )
    serve_plane(settings, announce=lambda url, _: report.send(url))


@contextlib.contextmanager
def running_plane(limit: int) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.get_context("spawn").Process(target=plane_process, args=(folder, limit, theirs))
        process.start()
        try:
            yield ours.recv()
        finally:
            process.terminate()
            process.join(60)


async def inject(url: str, count: int) -> int:
    """Break one in twenty, of each kind. Returns how many faults there are."""
    share = max(1, count // 20)
    wanted = [{"method": method, "path": path, "times": share, **fault} for method, path, fault in AT_THE_PLANE]
    wanted += [{"path": rf"^/[0-9a-f]*{path}", "times": 1, **fault} for path, fault in AT_AN_INSTANCE]
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for fault in wanted:
            async with session.post(f"{url}/_lab/faults", json=fault) as answer:
                answer.raise_for_status()
    return len(wanted)


async def running_instances(url: str) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{url}/v1/env/instances", params={"status": "running"}) as answer,
    ):
        return len(await answer.json())


async def episode(url: str, bus: Bus) -> str:
    """What came of one episode, in a word."""
    async with FleetTaskEnv(TASK, KEY, base_url=url, bus=bus, trajectory_timeout_s=240.0) as env:
        await env.reset_async()
        for number in range(3):
            await env.step_async({"tool": "add_note", "params": {"title": str(number)}})
        reward = (await env.step_async({"done": True}))[1]
    return "no grade" if reward is None else f"reward {reward:g}"


async def storm(url: str, count: int) -> dict[str, Any]:
    bus = Bus()
    events: collections.Counter[str] = collections.Counter()
    bus.subscribe(lambda event: events.update([event.name]))
    kinds = await inject(url, count)
    threads = threading.active_count()
    began = time.perf_counter()
    ended = await asyncio.gather(*(episode(url, bus) for _ in range(count)), return_exceptions=True)
    took = time.perf_counter() - began
    outcomes = collections.Counter(type(each).__name__ if isinstance(each, BaseException) else each for each in ended)
    return {
        "episodes": count,
        "kinds of faults": kinds,
        "seconds": round(took, 1),
        "outcomes": dict(outcomes),
        "running afterwards": await running_instances(url),
        "started - completed": events["fleet_rollout_started"] - events["fleet_rollout_completed"],
        "started": events["fleet_rollout_started"],
        "threads left": threading.active_count() - threads,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=200)
    options = parser.parse_args()
    with running_plane(options.episodes + 50) as url:
        report = asyncio.run(storm(url, options.episodes))
    for name, value in report.items():
        print(f"{name:<22}{value}")
    clean = not report["running afterwards"] and not report["started - completed"] and not report["threads left"]
    return 0 if clean else 1


if __name__ == "__main__":
    raise SystemExit(main())
