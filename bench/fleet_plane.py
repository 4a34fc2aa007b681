"""What a plane of one's own costs: `python -m bench.fleet_plane [--json]`.

A plane in a process of its own hosts notes. Measured from a client in this process: instances made from warm
processes and from none, tools listed and called, verifiers, and whole rollouts with a model that plays a script.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.processes import wait_quiet
from paddock.fleet.client.env_client import FleetEnvClient
from paddock.fleet.client.http import send
from paddock.fleet.client.settings import PlaneAddress
from paddock.fleet.run import run_tasks
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from paddock.fleet.client.tools import FleetMCPTools

    Made = tuple[FleetEnvClient, FleetMCPTools]

MANY = 16
ALONE = 5
CALL_SECONDS = 3.0
TASKS = 16
DEADLINE_SECONDS = 60.0
VERIFIER = "def verify(env):\n    return 1.0 if env.db('current').table('notes').eq('title', 'milk').all() else 0.0"
SCRIPT = {"turns": [{"tool": "add_note", "arguments": {"title": "milk"}}, {"tool": "list_notes"}, {"text": "Done."}]}


@contextmanager
def plane(*options: str) -> Iterator[PlaneAddress]:
    with tempfile.TemporaryDirectory() as folder:
        up = [sys.executable, "-m", "paddock", "fleet", "up", "--port", "0", "--state", folder, "--json"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLEET_")}
        process = subprocess.Popen(
            [*up, *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        assert process.stdout is not None
        try:
            url = json.loads(process.stdout.readline())["url"]
            yield PlaneAddress(url, (Path(folder) / "api_key").read_text())
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_SECONDS)


async def make(address: PlaneAddress) -> Made:
    return await FleetEnvClient.from_fleet_async(address.api_key, "notes", base_url=address.base_url, ttl_seconds=600)


async def seconds_of(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def together(address: PlaneAddress, count: int) -> tuple[float, list[Made]]:
    """How long `count` instances take that are asked for at once, and the instances."""
    began = time.perf_counter()
    made = await asyncio.gather(*(make(address) for _ in range(count)))
    return time.perf_counter() - began, made


async def close(made: list[Made]) -> None:
    await asyncio.gather(*(instance.close_async() for instance, _ in made))


async def wait_warm(address: PlaneAddress, count: int) -> None:
    """Until so many processes wait, and have imported all they need."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        reply = await send("GET", f"{address.base_url}/status", timeout=5, headers=address.headers)
        if reply.json()["warm"] >= count:
            await asyncio.to_thread(wait_quiet, instance_groups())
            return
        await asyncio.sleep(0.1)
    raise TimeoutError(f"{count} processes did not get warm in {DEADLINE_SECONDS:g} s")


def instance_groups() -> list[int]:
    """The processes that are or may become instances of our planes; each leads a group."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
    planes = {pid for pid, parent in parents.items() if parent == os.getpid()}
    return [pid for pid, parent in parents.items() if parent in planes]


async def cold(address: PlaneAddress) -> dict[str, float]:
    """No process waits: each instance is a new one."""
    alone = []
    for _ in range(ALONE):
        began = time.perf_counter()
        made = await make(address)
        alone.append(time.perf_counter() - began)
        await close([made])
    seconds, many = await together(address, MANY)
    await close(many)
    return {"cold_start_s": statistics.median(alone), "cold_instances_per_s": MANY / seconds}


async def warm(address: PlaneAddress) -> dict[str, float]:
    alone = []
    for _ in range(ALONE):
        await wait_warm(address, MANY)
        began = time.perf_counter()
        made = await make(address)
        alone.append(time.perf_counter() - began)
        await close([made])
    await wait_warm(address, MANY)
    seconds, many = await together(address, MANY)
    ended = await seconds_of(lambda: close(many))
    return {
        "warm_start_s": statistics.median(alone),
        "warm_instances_per_s": MANY / seconds,
        "ended_per_s": MANY / ended,
    }


async def tools(address: PlaneAddress) -> dict[str, float]:
    _, made = await together(address, 8)
    try:
        listed = [await seconds_of(tools.list_tools) for _, tools in made]
        again = [await seconds_of(made[0][1].list_tools) for _ in range(50)]
        one = await called_per_second(made[:1])
        eight = await called_per_second(made)
    finally:
        await close(made)
    return {
        "first_list_tools_ms": statistics.median(listed) * 1000,
        "list_tools_ms": statistics.median(again) * 1000,
        "tool_calls_per_s": one,
        "tool_calls_per_s_on_8": eight,
    }


async def called_per_second(made: list[Made]) -> float:
    """Tool calls in a closed loop, one at a time for each instance."""
    deadline = time.perf_counter() + CALL_SECONDS

    async def call(tools: FleetMCPTools) -> int:
        count = 0
        while time.perf_counter() < deadline:
            answer = await tools.call_tool("list_notes", {})
            if not isinstance(answer, list):
                raise SystemExit(f"a tool answered {answer!r}")
            count += 1
        return count

    counts = await asyncio.gather(*(call(tools) for _, tools in made))
    return sum(counts) / CALL_SECONDS


async def rollouts(address: PlaneAddress) -> dict[str, float]:
    """Whole rollouts, eight at a time: provision, three model calls, two tool calls, verify, delete."""
    task = {"prompt": "Note milk.", "env_key": "notes", "verifier_code": VERIFIER}
    tasks = [{**task, "task_key": f"t{number}"} for number in range(TASKS)]
    await wait_warm(address, 8)
    with tempfile.TemporaryDirectory() as folder:
        async with ReplayServer(SCRIPT) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            began = time.perf_counter()
            result = await run_tasks(tasks, plane=address, model=endpoint, store=folder, parallel=8, retries=0)
            seconds = time.perf_counter() - began
    if [record.reward for record in result.records] != [1.0] * TASKS:
        raise SystemExit(f"a rollout went wrong: {[record.error for record in result.records]}")
    verified = statistics.median(record.stages["verifier"] for record in result.records)
    return {"rollouts_per_s": TASKS / seconds, "verifier_s": verified}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_plane", description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    report: dict[str, float] = {}
    with plane("--warm", "0") as address:
        report |= asyncio.run(cold(address))
    with plane("--warm", str(MANY)) as address:
        for measure in (warm, tools, rollouts):
            report |= asyncio.run(measure(address))
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in report.items()}))
        return
    for name, value in report.items():
        print(f"{name:<24} {value:10.3f}")


if __name__ == "__main__":
    main()
