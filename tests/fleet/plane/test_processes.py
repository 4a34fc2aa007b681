"""Many at once, and processes kept warm for the next."""

import asyncio
import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from running import wait_until

from .running_plane import RunningPlane, StartPlane, is_gone

INSTANCES = "/v1/env/instances"
TICK = 0.005


async def longest_stall(until: asyncio.Event) -> tuple[float, float]:
    """The longest time between two turns of the loop: its own work, and by the clock."""
    own, clock = 0.0, 0.0
    while not until.is_set():
        before = time.thread_time(), time.monotonic()
        await asyncio.sleep(TICK)
        own = max(own, time.thread_time() - before[0])
        clock = max(clock, time.monotonic() - before[1] - TICK)
    return own, clock


def test_ninety_six_at_once_are_served_and_the_loop_stays_free(start_plane: StartPlane) -> None:
    plane = start_plane(instance_limit=96, warm=2)
    assert plane.loop is not None
    done = asyncio.Event()
    gc.freeze()  # what earlier tests left behind in this process is not the loop's to go through
    stall = asyncio.run_coroutine_threadsafe(longest_stall(done), plane.loop)
    with ThreadPoolExecutor(96) as threads:
        answers = list(threads.map(lambda n: plane("POST", INSTANCES, {"env_key": "serve"}), range(96)))
    plane.loop.call_soon_threadsafe(done.set)
    assert [answer.status for answer in answers] == [200] * 96
    assert len({answer.json["urls"]["root"] for answer in answers}) == 96
    own, clock = stall.result(5)
    gc.unfreeze()
    assert own < 0.05
    # A busy machine may leave the loop waiting for longer than it works.
    assert clock < 0.5
    assert plane("DELETE", f"{INSTANCES}/batch?profile_id=local").status == 200
    assert plane.get("/v1/account")["instance_count"] == 0


def test_creates_are_served_in_order(start_plane: StartPlane) -> None:
    plane = start_plane(parallel_starts=1)
    with ThreadPoolExecutor(6) as threads:
        slow = threads.submit(plane.make, "slow-0.5")
        for number in range(5):
            wait_until(lambda before=number: plane.get("/v1/account")["instance_count"] == before + 1)
            threads.submit(plane.make, run_id=str(number))
        slow.result()
    begun = sorted(plane.get(INSTANCES), key=lambda instance: instance["updated_at"])
    assert [instance["run_id"] for instance in begun] == [None, "0", "1", "2", "3", "4"]


def test_a_hanging_start_is_ended(start_plane: StartPlane) -> None:
    plane = start_plane(parallel_starts=1, start_seconds=0.3)
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(plane, "POST", INSTANCES, {"env_key": "hang"})
        wait_until(lambda: plane.get(INSTANCES))
        assert plane.make()["status"] == "running"
        assert hanging.result().json["retryable"]


def warm_pids(plane: RunningPlane) -> list[int]:
    return [process.pid for process in list(plane.plane.instances.pool._idle)]


def test_a_warm_process_becomes_the_next_instance_and_is_replaced(start_plane: StartPlane) -> None:
    plane = start_plane(warm=2)
    wait_until(lambda: len(warm_pids(plane)) == 2)
    warm = warm_pids(plane)
    assert plane.pid(plane.make()["instance_id"]) == warm[0]
    wait_until(lambda: len(warm_pids(plane)) == 2)
    assert warm[0] not in warm_pids(plane)


def test_a_warm_process_that_died_is_not_handed_out(start_plane: StartPlane) -> None:
    plane = start_plane(warm=1)
    wait_until(lambda: warm_pids(plane))
    os.kill(warm_pids(plane)[0], signal.SIGKILL)
    assert plane.make()["status"] == "running"


@pytest.mark.parametrize("warm", [0, 1])
def test_a_warm_process_that_dies_on_use_is_replaced(start_plane: StartPlane, warm: int) -> None:
    plane = start_plane(warm=warm)
    wait_until(lambda: len(warm_pids(plane)) == warm)
    assert plane("POST", INSTANCES, {"env_key": "once"}).status == (200 if warm else 400)


def test_warm_processes_end_with_the_plane(start_plane: StartPlane) -> None:
    plane = start_plane(warm=2)
    wait_until(lambda: len(warm_pids(plane)) == 2)
    pids = warm_pids(plane)
    plane.stop()
    assert all(map(is_gone, pids))
