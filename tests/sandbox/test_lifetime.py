"""How sandboxes begin and end, and that nothing of them stays."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from paddock.errors import ConfigError, SandboxError
from paddock.processes import end_marked_processes, find_descendants, find_marked_processes, process_start_time
from paddock.sandbox import (
    Command,
    Mount,
    SandboxSpec,
    available,
    end_orphan,
    new_sandbox_id,
    open_sandbox,
)
from paddock.sandbox.guest.entry import HOME
from paddock.sandbox.guest.files import acting_as
from paddock.sandbox.guest_sandbox import remove_paths
from sandbox.places import LIMITS, SPEC, both, descriptors, is_gone, needs_bwrap, opened, wait_until

OWNER = """
import asyncio, sys, time
from paddock.limits import SandboxLimits
from paddock.sandbox import Command, SandboxSpec, open_sandbox

async def main():
    for _ in range(3):
        sandbox = await open_sandbox(sys.argv[1], SandboxSpec(SandboxLimits(disk_bytes=1 << 24)), consent=True)
        await sandbox.exec(Command("setsid sleep 1000 > /dev/null 2>&1 &"), timeout=20)
        await sandbox.start(Command("sleep 1000"))
        print(sandbox.host_pid, sandbox.host_start_time, *sandbox.host_paths, flush=True)
    print("ready", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def owner(backend: str, **options: object) -> tuple[subprocess.Popen[str], list[list[str]]]:
    """Another process with three sandboxes, and the pid, start time and paths of each of them."""
    command = [options.pop("python", sys.executable), "-c", OWNER, backend]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
    sandboxes = []
    for line in process.stdout:
        if line == "ready\n":
            return process, sandboxes
        sandboxes.append(line.split())
    raise AssertionError("the owner ended early")


def end_at_once(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    process.stdout.close()  # type: ignore[union-attr]


@both
def test_killing_the_owner_leaves_no_process(backend: str) -> None:
    process, sandboxes = owner(backend)
    pids = find_descendants(process.pid)
    assert len(pids) >= 9
    end_at_once(process)
    wait_until(lambda: all(map(is_gone, pids)), 2)
    for pid, started, *paths in sandboxes:
        assert end_orphan(int(pid), int(started), paths)
        assert not any(Path(path).exists() for path in paths)


DYING_OWNER = """
import asyncio, os, signal, subprocess, sys, time
from paddock.limits import SandboxLimits
from paddock.sandbox import SandboxSpec, open_sandbox
from paddock.sandbox.bwrap import find_bwrap

find_bwrap()
start_process = subprocess.Popen

def start_and_die(*arguments, **options):
    start_process(*arguments, **options)
    time.sleep(float(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGKILL)

subprocess.Popen = start_and_die
asyncio.run(open_sandbox("bwrap", SandboxSpec(SandboxLimits(disk_bytes=1 << 24)), sandbox_id=sys.argv[1]))
"""


@needs_bwrap
@pytest.mark.parametrize("milliseconds", [0, 1, 2, 3, 5, 8])
def test_an_owner_that_is_killed_while_bubblewrap_starts_leaves_no_process(milliseconds: int) -> None:
    ids = [new_sandbox_id() for _ in range(3)]
    for sandbox_id in ids:
        command = [sys.executable, "-c", DYING_OWNER, sandbox_id, str(milliseconds / 1000)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    try:
        wait_until(lambda: not any(map(find_marked_processes, ids)), 5)
    finally:
        for sandbox_id in ids:
            end_marked_processes(sandbox_id)


FORKING_OWNER = """
import asyncio, os, sys, time
from paddock.limits import SandboxLimits
from paddock.sandbox import SandboxSpec, open_sandbox

async def main():
    sandbox = await open_sandbox(sys.argv[1], SandboxSpec(SandboxLimits(disk_bytes=1 << 24)), consent=True)
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    print(child, sandbox.host_pid, sandbox.host_start_time, *sandbox.host_paths, flush=True)
    time.sleep(1000)

asyncio.run(main())
"""


@both
def test_a_sandbox_ends_with_its_owner_although_a_forked_process_holds_the_connection(backend: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", FORKING_OWNER, backend], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child, guest, started, *paths = process.stdout.readline().split()
    try:
        assert not is_gone(int(guest))
        end_at_once(process)
        wait_until(lambda: is_gone(int(guest)), 5)
        assert not is_gone(int(child))
    finally:
        os.kill(int(child), signal.SIGKILL)
        assert end_orphan(int(guest), int(started), paths)


@needs_bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_unprivileged_user_can_open_sandboxes() -> None:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    options = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/", "env": {"PYTHONPATH": path}}
    probe = subprocess.run(
        ["/usr/bin/python3", "-c", "from paddock.sandbox.bwrap import find_bwrap; find_bwrap()"],
        capture_output=True,
        **options,  # type: ignore[call-overload]
    )
    if probe.returncode != 0:
        pytest.skip("nobody cannot read this installation")
    process, _ = owner("bwrap", python="/usr/bin/python3", **options)
    pids = find_descendants(process.pid)
    assert len(pids) >= 9
    end_at_once(process)
    wait_until(lambda: all(map(is_gone, pids)), 2)


def test_folders_without_rights_are_removed_too() -> None:
    with tempfile.TemporaryDirectory(prefix="paddock-test-") as name:
        Path(name).chmod(0o777)
        # The kernel makes such folders in the work folder of an overlay.
        with acting_as(65534 if os.geteuid() == 0 else None):
            closed = Path(name, "fs.work", "work")
            (closed / "inner").mkdir(parents=True)
            closed.chmod(0)
            remove_paths((closed.parent,))
        assert os.listdir(name) == []


@both
def test_an_orphan_is_ended_only_if_it_is_the_same_process(backend: str) -> None:
    process, sandboxes = owner(backend)
    try:
        pid, started = int(sandboxes[0][0]), int(sandboxes[0][1])
        below = [pid, *find_descendants(pid)]
        assert len(below) >= 3
        assert end_orphan(pid, started + 1, ())
        assert not any(map(is_gone, below))
        assert end_orphan(pid, started, sandboxes[0][2:])
        assert all(map(is_gone, below))
        assert end_orphan(pid, started, sandboxes[0][2:])
    finally:
        pids = find_descendants(process.pid)
        end_at_once(process)
        wait_until(lambda: all(map(is_gone, pids)), 2)
        for pid_text, started_text, *paths in sandboxes:
            end_orphan(int(pid_text), int(started_text), paths)


def test_a_start_time_distinguishes_processes() -> None:
    assert process_start_time(os.getpid()) == process_start_time(os.getpid())
    assert process_start_time(1) != process_start_time(os.getpid())
    assert process_start_time(2**22 + 5) is None
    assert process_start_time(None) is None


@both
def test_nothing_is_left_after_close(backend: str) -> None:
    async def scenario() -> None:
        before = descriptors()
        spec = SandboxSpec(LIMITS, readonly_tests={"test.sh": b""})
        sandbox = await opened(backend, spec)
        job = await sandbox.start(Command("sleep 1000"))
        pids = [sandbox.host_pid, *find_descendants(sandbox.host_pid)]
        assert all(path.exists() for path in sandbox.host_paths)
        assert sandbox.host_start_time == process_start_time(sandbox.host_pid)
        await sandbox.close()
        await job.wait(5)
        assert all(map(is_gone, pids))
        assert not any(path.exists() for path in sandbox.host_paths)
        assert descriptors() == before
        await sandbox.close()

    asyncio.run(scenario())


@both
def test_a_cancelled_creation_leaves_nothing(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def scenario() -> None:
        spec = SandboxSpec(LIMITS, readonly_tests={"test.sh": b""})
        for moment in range(0, 40, 4):
            opening = asyncio.create_task(opened(backend, spec))
            await asyncio.sleep(moment / 1000)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await (await opening).close()

    asyncio.run(scenario())
    wait_until(lambda: find_descendants(os.getpid()) == [], 2)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_creation_says_why_and_leaves_nothing() -> None:
    async def scenario() -> None:
        missing = SandboxSpec(LIMITS, mounts=(Mount(Path("/no/such/folder"), HOME / "x"),))
        before = descriptors()
        with pytest.raises(SandboxError, match="/no/such/folder"):
            await opened("bwrap", missing)
        with pytest.raises(SandboxError, match="outside"):
            await opened("process", SandboxSpec(LIMITS, readonly_tests={"../x": b""}))
        assert descriptors() == before

    asyncio.run(scenario())
    assert find_descendants(os.getpid()) == []


@needs_bwrap
def test_what_bubblewrap_says_reaches_the_caller() -> None:
    # A folder cannot be mounted where a program of the system is.
    spec = SandboxSpec(LIMITS, mounts=(Mount(Path("/tmp"), HOME.parent.parent / "usr/bin/env"),))
    with pytest.raises(SandboxError, match="bubblewrap did not start: bwrap: "):
        asyncio.run(opened("bwrap", spec))


def test_a_backend_without_isolation_wants_consent(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SandboxError, match="does not isolate") as refused:
        asyncio.run(open_sandbox("process", SPEC))
    assert "consent" in str(refused.value.hint)
    assert available("process") is None
    assert "all rights" in caplog.text


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="dockre") as refused:
        asyncio.run(open_sandbox("dockre", SPEC))
    assert "bwrap, process" in str(refused.value.hint)
    assert "dockre" in str(available("dockre"))


@both
def test_a_cancelled_command_is_killed(backend: str) -> None:
    async def scenario() -> None:
        async with await opened(backend) as sandbox:
            running = asyncio.create_task(sandbox.exec(Command("echo $$ > pid; exec sleep 1000"), timeout=60))
            while not await written(sandbox, "workdir/pid"):
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            gone = "while kill -0 $(cat pid) 2>/dev/null; do sleep 0.01; done"
            assert (await sandbox.exec(Command(gone), timeout=5)).exit_code == 0

    async def written(sandbox: object, path: str) -> bytes:
        try:
            return await sandbox.read(path)  # type: ignore[attr-defined, no-any-return]
        except FileNotFoundError:
            return b""

    asyncio.run(scenario())


@both
def test_a_sandbox_that_dies_by_itself_ends_its_commands(backend: str) -> None:
    async def scenario() -> None:
        async with await opened(backend) as sandbox:
            job = await sandbox.start(Command("sleep 1000"))
            pids = [sandbox.host_pid, *find_descendants(sandbox.host_pid)]
            os.kill(sandbox.host_pid, signal.SIGKILL)
            done = await job.wait(5)
            assert (done.exit_code, done.timed_out) == (None, False)
            with pytest.raises(SandboxError, match="has ended"):
                await sandbox.start(Command("true"))
        assert all(map(is_gone, pids))

    asyncio.run(scenario())


@needs_bwrap
def test_a_sandbox_starts_quickly() -> None:
    async def start() -> float:
        began = time.perf_counter()
        async with await opened("bwrap") as sandbox:
            await sandbox.exec(Command(["/bin/true"]), timeout=20)
            return time.perf_counter() - began

    # 50 ms on a quiet machine; others may be at work on this one.
    assert min(asyncio.run(start()) for _ in range(5)) < 0.25
