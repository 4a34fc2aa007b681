"""A command marked as the last takes everything else inside with it."""

import asyncio

import pytest

from paddock.limits import SandboxLimits
from paddock.sandbox import open_sandbox
from paddock.sandbox.base import Command, SandboxSpec

BACKENDS = ("bwrap", "process")
REWRITES = "setsid sh -c 'while true; do echo 1 > ~/reward; done' >/dev/null 2>&1 & sleep 0.2; echo 0 > ~/reward"


async def run_last(backend: str) -> tuple[int | None, int | None]:
    async with await open_sandbox(backend, SandboxSpec(SandboxLimits()), consent=True) as sandbox:
        other = await sandbox.start(Command(["sleep", "30"]))
        done = await sandbox.exec(Command(REWRITES, last=True), timeout=10)
        # The other job is reported, and a second command still runs.
        ended = await other.wait(5)
        again = await sandbox.exec(Command("pgrep -f '[w]hile true' || true"), timeout=10)
        assert backend == "process" or again.stdout == b""
        return done.exit_code, ended.exit_code


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_command_ends_all_others(backend: str) -> None:
    assert asyncio.run(run_last(backend)) == (0, 137)
