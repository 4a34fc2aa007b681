"""What only the process backend does: other paths, shared ports, watched limits."""

import asyncio
import os
import signal
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.limits import MEBIBYTE
from paddock.processes import find_descendants
from paddock.sandbox import Command, Completed, Mount, SandboxSpec
from paddock.sandbox.process import ProcessSandbox
from sandbox.places import LIMITS, SPEC, is_gone, opened, wait_until


def sandbox_named(name: str, spec: SandboxSpec = SPEC) -> ProcessSandbox:
    async def make() -> ProcessSandbox:
        return ProcessSandbox(name, spec)

    return asyncio.run(make())


def test_standard_paths_are_rewritten() -> None:
    sandbox = sandbox_named(
        "sb-x", SandboxSpec(LIMITS, mounts=(Mount(Path("/real/tool"), PurePosixPath("/opt/tool")),))
    )
    home = str(sandbox.home)
    assert (
        sandbox.localize("cd /home/user/workdir; ls /logs/verifier") == f"cd {home}/workdir; ls {home}/logs/verifier"
    )
    assert sandbox.localize('"/home/user"') == f'"{home}"'
    assert sandbox.localize("sh /tests/test.sh") == f"sh {home.removesuffix('/home')}/tests/test.sh"
    assert sandbox.localize("/opt/tool/bin") == "/real/tool/bin"


def test_other_paths_stay() -> None:
    sandbox = sandbox_named("sb-x")
    for text in ("/var/logs/x", "/home/username", "/tests2", "./tests", "~/logs", "a/home/user", "/logs.old"):
        assert sandbox.localize(text) == text


def test_rewriting_twice_is_rewriting_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/home/user/tmp")
    sandbox = sandbox_named("sb-x")
    once = sandbox.localize("/home/user/a /logs")
    assert once == "/home/user/tmp/paddock-sb-x/home/a /home/user/tmp/paddock-sb-x/home/logs"
    assert sandbox.localize(once) == once


def run(script: str, **limits: Any) -> tuple[Completed, list[int]]:
    async def scenario() -> tuple[Completed, list[int]]:
        async with await opened("process", replace(SPEC, limits=replace(LIMITS, **limits))) as sandbox:
            job = await sandbox.start(Command(script))
            return await job.wait(20), [sandbox.host_pid, *find_descendants(sandbox.host_pid)]

    return asyncio.run(scenario())


def test_commands_and_their_environment_are_rewritten() -> None:
    async def scenario() -> bytes:
        async with await opened("process") as sandbox:
            command = Command(
                ["sh", "-c", 'cd /home/user && [ "$PWD" = "$WHERE" ] && echo same'], env={"WHERE": "/home/user"}
            )
            return (await sandbox.exec(command, timeout=20)).stdout  # type: ignore[no-any-return]

    assert asyncio.run(scenario()) == b"same\n"


def test_too_much_on_the_disk_ends_the_sandbox() -> None:
    done, _ = run("for n in 1 2 3; do head -c 5000000 /dev/zero > $n; done; sleep 60", disk_bytes=8 * MEBIBYTE)
    assert done.killed_for == "disk"


def test_too_many_processes_end_the_sandbox() -> None:
    done, _ = run("for n in $(seq 60); do sleep 60 & done; wait", processes=30)
    assert done.killed_for == "processes"


def test_what_a_killed_guest_started_is_found_again() -> None:
    async def scenario() -> None:
        async with await opened("process") as sandbox:
            done = await sandbox.exec(Command("setsid sleep 1000 > /dev/null 2>&1 & echo $!"), timeout=20)
            left = int(done.stdout)
            os.kill(sandbox.host_pid, signal.SIGKILL)
            await sandbox.kill()
            wait_until(lambda: is_gone(left), 2)

    asyncio.run(scenario())
