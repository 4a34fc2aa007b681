"""Every instance that was or may have been made has one owner until the plane confirms that it is gone."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.fleet import close_all, sweep
from paddock.fleet.client import lease_deletion
from paddock.fleet.client import leases as held
from paddock.fleet.client.errors import ProvisioningFailed
from paddock.fleet.client.lease_deletion import recover
from paddock.fleet.client.lease_journal import dead_journals
from paddock.fleet.client.settings import PlaneAddress
from paddock.fleet.run import sweep as sweep_batch
from paddock.retry import Backoff

from .episodes import EventRecorder, env_on
from .plane import KEY, LabPlane, lab
from .test_faults import made

PROGRAM = """
import asyncio, sys
from paddock.fleet import FleetEnvClient
async def main():
    return await FleetEnvClient.from_fleet_async(
        "{key}", "notes", base_url="{url}", run_id={run!r}, create_timeout_s={seconds}
    )
kept = asyncio.run(main())
print("made", flush=True)
sys.stdin.read()
"""
SOON = 10.0
LATE = 3.0
"""Seconds after which a create is carried out that was sent long before."""


@pytest.fixture(autouse=True)
def short_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_deletion, "ATTEMPT_SECONDS", 0.5)
    monkeypatch.setattr(lease_deletion, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(lease_deletion, "PAUSES", Backoff(first_seconds=0.1, longest_seconds=1.0))


@pytest.fixture(autouse=True)
def journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leases of child processes go where no other test looks. This process has opened its own file already."""
    monkeypatch.setenv("PADDOCK_FLEET_LEASES", str(tmp_path / "leases"))
    return tmp_path / "leases"


def wait_until(is_true: Callable[[], Any], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def address(plane: LabPlane) -> PlaneAddress:
    return PlaneAddress(plane.url, KEY)


@contextlib.contextmanager
def process(plane: LabPlane, run: str | None = None, seconds: float = 900.0) -> Iterator[subprocess.Popen[str]]:
    """Another process that makes an instance and keeps it."""
    code, pipe = PROGRAM.format(key=KEY, url=plane.url, run=run, seconds=seconds), subprocess.PIPE
    started = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=10)


def has_made(started: subprocess.Popen[str]) -> None:
    assert started.stdout is not None
    assert started.stdout.readline() == "made\n"


def kill(started: subprocess.Popen[str], number: int = signal.SIGKILL) -> str:
    os.kill(started.pid, number)
    return started.communicate(timeout=10)[1]


# -- a create without an answer -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "settings", "times"),
    [
        (None, {}, -1),
        (None, {"dedup": False}, -1),
        ("mine", {"shows_request_ids": True}, -1),
        ("mine", {}, 1),
    ],
    ids=["own run", "own run, plane knows no request ids", "shared run, ids shown", "shared run, asked again"],
)
@pytest.mark.parametrize("leaves", ["cancelled", "timed out"])
def test_what_a_hanging_create_made_is_ended_at_once(
    run: str | None, settings: dict[str, Any], times: int, leaves: str
) -> None:
    async def main() -> None:
        if leaves == "timed out":
            with pytest.raises(ProvisioningFailed):
                await made(plane, run_id=run, create_timeout_s=0.3)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(made(plane, run_id=run), 0.3)
        await asyncio.to_thread(wait_until, lambda: plane.boxes and not plane.running)

    with lab(**settings) as plane:
        plane.fail("POST", "/v1/env/instances$", hang=True, after=True, times=times)
        asyncio.run(main())
        assert plane.count("DELETE", "batch") == 0


def test_an_instance_of_another_create_is_not_taken_for_an_orphan() -> None:
    async def main() -> None:
        lost = asyncio.ensure_future(made(plane))
        await asyncio.to_thread(wait_until, lambda: len(plane.boxes) == 1)
        plane.create_seconds = 1.0
        slow = asyncio.ensure_future(made(plane))
        await asyncio.to_thread(wait_until, lambda: len(plane.boxes) == 2)
        lost.cancel()
        orchestrator, _ = await slow
        await asyncio.to_thread(wait_until, lambda: len(plane.running) == 1)
        assert orchestrator._fleet_env is not None
        assert plane.running[0].id == orchestrator._fleet_env.instance_id
        await orchestrator.close_async()

    with lab() as plane:
        plane.fail("POST", "/v1/env/instances$", hang=True, after=True)
        asyncio.run(main())


def test_an_instance_of_another_process_in_the_same_run_is_left_alone() -> None:
    async def main() -> None:
        with pytest.raises(ProvisioningFailed):
            await made(plane, run_id="shared", create_timeout_s=0.3)
        await asyncio.to_thread(wait_until, lambda: len(plane.running) == 1)
        await close_all("shared")

    with lab() as plane, process(plane, "shared") as other:
        has_made(other)
        first = plane.box.id
        plane.fail("POST", "/v1/env/instances$", hang=True, after=True)
        asyncio.run(main())
        assert [box.id for box in plane.running] == [first]


# -- deletions that fail --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 400, "body": {"detail": "Rate limit exceeded"}},
        {"status": 200, "body": {"success": False}},
    ],
    ids=["500", "rate limit", "success false"],
)
def test_a_deletion_is_tried_until_it_is_confirmed(fault: dict[str, Any]) -> None:
    async def main() -> None:
        orchestrator, _ = await made(plane)
        await orchestrator.close_async()
        await asyncio.to_thread(wait_until, lambda: not plane.running)

    with lab() as plane:
        plane.fail("DELETE", "/v1/env/instances/", times=8, **fault)
        asyncio.run(main())
        assert plane.count("DELETE", "/v1/env/instances/") == 9
        assert held.current().outstanding() == []


def test_an_instance_that_lives_on_after_its_deletion_is_deleted_again() -> None:
    async def main() -> None:
        orchestrator, _ = await made(plane)
        plane.fail("DELETE", "/v1/env/instances/", 200, body={"instance_id": plane.box.id, "status": "running"})
        await orchestrator.close_async()
        assert plane.running == []

    with lab() as plane:
        asyncio.run(main())


def test_a_cancelled_caller_does_not_wait_for_a_hanging_deletion() -> None:
    async def episode() -> None:
        async with env_on(plane) as env:
            await env.reset_async()
            await asyncio.sleep(60)

    async def main() -> None:
        running = asyncio.ensure_future(episode())
        await asyncio.sleep(0.5)
        plane.fail("DELETE", "/v1/env/instances/", hang=True)
        began = time.monotonic()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        assert time.monotonic() - began < 0.5
        await asyncio.to_thread(wait_until, lambda: not plane.running)

    with lab() as plane:
        asyncio.run(main())


def test_closing_sweeping_and_exiting_wait_once_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        orchestrator, _ = await made(plane, run_id="a batch")
        plane.fail("DELETE", "/v1/env/instances", hang=True, times=-1)
        began = time.monotonic()
        await orchestrator.close_async()
        await sweep_batch("a batch")
        lease_deletion.delete_at_exit(held.current())
        assert 1.0 < time.monotonic() - began < 2.5
        plane.heal()
        await asyncio.to_thread(wait_until, lambda: not plane.running)

    monkeypatch.setattr(held, "GRACE_SECONDS", 1.5)
    monkeypatch.setattr(lease_deletion, "EXIT_SECONDS", 0.1)
    with lab() as plane:
        asyncio.run(main())


def test_closing_waits_a_few_seconds_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        orchestrator, _ = await made(plane, bus=recorder.bus)
        await orchestrator.close_async()
        assert recorder.count("fleet_close_failed") == 1
        plane.heal()
        await asyncio.to_thread(wait_until, lambda: not plane.running)

    recorder = EventRecorder()
    monkeypatch.setattr("paddock.fleet.client.leases.GRACE_SECONDS", 0.2)
    with lab() as plane:
        plane.fail("DELETE", "/v1/env/instances/", 500, times=-1)
        asyncio.run(main())


# -- processes that were killed -------------------------------------------------------------------------


@pytest.mark.parametrize("run", [None, "named"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_process_ends_what_a_killed_one_left(run: str | None, number: int, journals: Path) -> None:
    with lab() as plane, process(plane, run) as living:
        has_made(living)
        remaining = plane.box.id
        with process(plane, run) as killed:
            has_made(killed)
            reply = kill(killed, number)
        if run is None:
            assert plane.box.body["run_id"] in reply
        assert len(plane.running) == 2
        assert KEY not in "".join(path.read_text() for path in journals.iterdir())
        with process(plane) as following:
            has_made(following)
            wait_until(lambda: len(plane.running) == 2)
            assert remaining in [box.id for box in plane.running]


@pytest.mark.parametrize(
    ("run", "settings"),
    [(None, {}), ("named", {}), ("named", {"shows_request_ids": True})],
    ids=["own run", "asked again", "ids shown"],
)
def test_a_process_that_was_killed_while_its_create_hung_is_recovered(
    run: str | None, settings: dict[str, Any]
) -> None:
    with lab(**settings) as plane, process(plane, run) as killed:
        plane.fail("POST", "/v1/env/instances$", hang=True, after=True)
        wait_until(lambda: plane.boxes)
        kill(killed)
        ended, failures = asyncio.run(recover(address(plane)))
        assert (ended, failures, plane.running) == ([plane.box.id], [], [])
        assert len(plane.boxes) == 1


@pytest.mark.parametrize(
    ("run", "leaves"),
    [(None, "killed"), ("named", "killed"), (None, "exits"), ("named", "exits"), ("named", "run ended")],
)
def test_a_create_that_arrives_after_its_process_has_gone_leaves_nothing(run: str | None, leaves: str) -> None:
    with lab(shows_request_ids=True) as plane, process(plane, run, seconds=0.5) as gone:
        late = plane.fail("POST", "/v1/env/instances$", delay=LATE)
        wait_until(lambda: late.is_waiting)
        if leaves != "exits":
            kill(gone)
        gone.communicate(timeout=10)
        if run is not None and leaves == "run ended":
            asyncio.run(sweep(run, api_key=KEY, base_url=plane.url))
        assert not asyncio.run(recover(address(plane)))[1]
        wait_until(lambda: not late.is_waiting)
        assert plane.boxes
        assert plane.running == []


def test_what_a_create_may_make_is_written_down_before_it_is_sent(journals: Path) -> None:
    with lab() as plane, process(plane) as other:
        plane.fail("POST", "/v1/env/instances$", hang=True)
        wait_until(lambda: plane.count("POST", "/v1/env/instances$"))
        sent = plane.headers[-1]["X-Request-ID"]
        assert sent in next(journals.glob("*.leases")).read_text()
        kill(other)


def test_an_unreachable_plane_is_retried_later(journals: Path) -> None:
    with lab() as plane:
        with process(plane) as killed:
            has_made(killed)
            kill(killed)
        plane.fail("DELETE", "/v1/env/instances", 503, times=1)
        ended, failures = asyncio.run(recover(address(plane)))
        assert ended == []
        assert "503" in str(failures[0])
        assert asyncio.run(recover(PlaneAddress(plane.url, "another key"))) == ([], [])
        assert len(plane.running) == 1
        assert asyncio.run(recover(address(plane))) == ([plane.box.id], [])
        assert list(journals.iterdir()) == []


def test_an_incomplete_line_does_not_affect_the_others(journals: Path) -> None:
    with lab() as plane:
        with process(plane) as killed:
            has_made(killed)
            kill(killed)
        with next(journals.glob("*.leases")).open("a") as file:
            file.write('{"number": 7, "pla')
        with dead_journals() as result:
            assert [record.instance for record in result[0].records.values()] == [plane.box.id]
        asyncio.run(recover(address(plane)))
        assert plane.running == []


def test_without_a_writable_journal_an_instance_is_still_created(tmp_path: Path) -> None:
    (tmp_path / "leases").write_text("a file, not a folder")
    with lab() as plane, process(plane) as other:
        has_made(other)
        assert other.stdin is not None
        _, reply = other.communicate(timeout=10)
        assert "cannot be written" in reply
        assert plane.running == []


# -- the instance limit ---------------------------------------------------------------------------------


def test_at_the_limit_creates_wait_their_turn_in_order() -> None:
    order: list[int] = []

    async def episode(number: int) -> None:
        await asyncio.sleep(number * 0.02)
        async with env_on(plane, recorder) as env:
            await env.reset_async()
            order.append(number)
            await asyncio.sleep(0.1)
            await env.step_async({"done": True})

    async def main() -> None:
        await asyncio.gather(*(episode(number) for number in range(5)))

    recorder = EventRecorder()
    with lab(limit=1) as plane:
        asyncio.run(main())
        assert plane.running == []
    # The next one can overtake a create that is under way, and about to be refused, when an instance ends.
    assert sorted(order) == list(range(5))
    assert all(abs(place - number) <= 1 for place, number in enumerate(order)), order
    assert recorder.count("fleet_make_waiting") > 0
    assert recorder.is_balanced


def test_waiting_for_a_slot_has_a_deadline() -> None:
    async def main() -> None:
        orchestrator, _ = await made(plane)
        began = time.monotonic()
        with pytest.raises(ProvisioningFailed, match="no place became free") as failed:
            await made(plane, limit_wait_s=0.5)
        assert 0.4 < time.monotonic() - began < 2
        assert failed.value.hint is not None
        await orchestrator.close_async()

    with lab(limit=1) as plane:
        asyncio.run(main())


def test_a_slot_that_another_process_frees_is_used() -> None:
    async def main() -> None:
        async with env_on(plane) as env:
            with_place = asyncio.ensure_future(env.reset_async())
            await asyncio.sleep(0.6)
            plane.boxes[first].status = "stopped"
            await with_place

    with lab(limit=1) as plane, process(plane) as other:
        has_made(other)
        first = plane.box.id
        asyncio.run(main())
        assert plane.running == []
