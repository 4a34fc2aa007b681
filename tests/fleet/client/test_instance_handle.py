"""Instances of processes that ended badly, or without a word."""

import asyncio
import gc
import os
import signal
import subprocess
import sys

from paddock.fleet import close_all, sweep
from paddock.fleet.client import leases as held

from .plane import KEY, LabPlane, lab
from .test_faults import made

LEAVES = """
import asyncio, sys
from paddock.fleet import FleetEnvClient
from paddock.fleet.client.leases import run_id
async def main():
    return await FleetEnvClient.from_fleet_async("{key}", "notes", base_url="{url}")
kept = asyncio.run(main())
print(run_id(), flush=True)
{end}
"""


def leave(plane: LabPlane, end: str) -> subprocess.Popen[str]:
    code = LEAVES.format(key=KEY, url=plane.url, end=end)
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_what_a_process_leaves_is_ended_at_its_exit() -> None:
    with lab() as plane:
        run, err = leave(plane, "").communicate(timeout=30)
        assert err == f"paddock: run {run.strip()} at {plane.url}; if it is killed: paddock fleet rm --run {run}"
        assert [box.status for box in plane.boxes.values()] == ["stopped"]


def test_what_a_killed_process_leaves_is_swept_by_its_run_id() -> None:
    with lab() as plane:
        process = leave(plane, "sys.stdin.read()")
        assert process.stdout is not None
        run = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)
        assert len(plane.running) == 1
        assert plane.box.body["run_id"] == run
        assert run.startswith("paddock-")
        ended = asyncio.run(sweep(run, api_key=KEY, base_url=plane.url))
        assert [instance.instance_id for instance in ended] == [plane.box.id]
        assert plane.running == []


def test_a_create_whose_caller_left_is_ended_when_it_answers() -> None:
    async def main(plane: LabPlane) -> None:
        making = asyncio.ensure_future(made(plane))
        while not plane.boxes:
            await asyncio.sleep(0.005)
        making.cancel()
        await asyncio.wait([making])
        assert making.cancelled()
        deadline = asyncio.get_running_loop().time() + 5
        while plane.running or held.current().outstanding():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)

    with lab(create_seconds=0.3) as plane:
        asyncio.run(main(plane))
        assert [box.status for box in plane.boxes.values()] == ["stopped"]


def test_a_create_that_was_cut_off_with_its_loop_is_swept_at_the_end() -> None:
    async def main(plane: LabPlane) -> None:
        making = asyncio.ensure_future(made(plane))
        while not plane.boxes:
            await asyncio.sleep(0.005)
        making.cancel()

    with lab(create_seconds=0.3) as plane:
        asyncio.run(main(plane))
        assert len(plane.running) == 1
        asyncio.run(close_all())
        assert plane.running == []


def test_closing_goes_on_when_its_caller_is_cancelled() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane)
        closing = asyncio.ensure_future(orchestrator.close_async())
        while not plane.count("DELETE", "instances"):
            await asyncio.sleep(0.005)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        await close_all()

    with lab() as plane:
        plane.fail("DELETE", "instances", delay=0.2)
        asyncio.run(main(plane))
        assert plane.running == []
        assert plane.count("DELETE", "instances") == 1


def test_a_child_process_does_not_end_what_its_parent_holds() -> None:
    parent = held.run_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, held.run_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    output = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert output.startswith("paddock-")
    assert output != parent


def test_the_key_is_in_no_error_and_no_repr() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, tools = await made(plane)
        visible = f"{tools!r} {orchestrator!r} {vars(orchestrator._fleet_env.plane)['address']!r}"  # type: ignore[union-attr]
        assert KEY not in visible
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main(plane))


def test_a_garbage_collected_instance_is_ended() -> None:
    async def main(plane: LabPlane) -> None:
        forgotten = await made(plane)
        del forgotten
        gc.collect()
        orchestrator, _ = await made(plane)
        deadline = asyncio.get_running_loop().time() + 5
        while len(plane.running) > 1:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert plane.running == [plane.box]
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main(plane))
        assert plane.running == []
