"""The verifier: a clean place, the sealed work as data, and a reward that nobody else wrote."""

import asyncio
import io
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from paddock.errors import SandboxError
from paddock.rollouts.sandbox import open_sandbox
from paddock.rollouts.sandbox.base import Sandbox, SandboxSpec
from paddock.rollouts.verifier import Verdict, verify
from rollouts.played import LIMITS, needs_bwrap, own_children, run

pytestmark = needs_bwrap


def sealed(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            packed.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


@asynccontextmanager
async def opened(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    async with await open_sandbox("bwrap", spec) as sandbox:
        yield sandbox


def verdict(script: str, work: bytes | None = None, *, timeout: float = 10.0, **tests: str) -> Verdict:
    files = {"test.sh": script.encode(), **{name: text.encode() for name, text in tests.items()}}
    work = sealed(answer="42") if work is None else work
    return run(verify(files, work, open_sandbox=opened, limits=LIMITS, timeout=timeout))


def test_the_work_is_there_and_the_place_is_clean() -> None:
    said = verdict(
        'pwd; cat answer; echo; echo "$HOME"; ls -A "$HOME" /logs/verifier; env | grep -c OPENAI', helper="x"
    )
    lines = said.stdout.splitlines()
    assert lines[:3] == ["/home/user/workdir", "42", "/tmp/verifier-home"]
    assert lines[-1] == "0"
    assert said.exit_code == 1


def test_the_tests_are_beside_each_other_and_cannot_be_changed() -> None:
    said = verdict(
        'cat "$(dirname "$0")/helper" /tests/helper; echo x > /tests/helper || echo refused', helper="beside "
    )
    assert said.stdout == "beside beside refused\n"


def test_a_reward_is_read_after_the_tests_whatever_their_exit_code() -> None:
    assert verdict("echo 0.25 > /logs/verifier/reward.txt; exit 7").reward.value == 0.25
    assert verdict("echo 0.5 > ~user/logs/verifier/reward.txt").reward.value == 0.5


def test_tests_that_were_killed_said_nothing() -> None:
    said = verdict("echo 1 > /logs/verifier/reward.txt; kill -9 $$")
    assert (said.reward.value, said.exit_code) == (None, 137)


def test_what_the_tests_leave_running_neither_holds_them_up_nor_writes() -> None:
    began = time.monotonic()
    said = verdict("(sleep 0.05; echo 1 > /logs/verifier/reward.txt; sleep 60) & echo 0 > /logs/verifier/reward.txt")
    assert said.reward.value in (0.0, None)
    assert time.monotonic() - began < 5


def test_the_outputs_are_kept_apart_and_within_bounds() -> None:
    said = verdict("echo out; echo err >&2; yes | head -c 20M; echo 1 > /logs/verifier/reward.txt")
    assert said.reward.value == 1.0
    assert said.stdout.startswith("out\n")
    assert said.stderr == "err\n"
    assert len(said.stdout) <= LIMITS.output_bytes


def test_no_tests_is_no_reward() -> None:
    said = run(verify({}, sealed(), open_sandbox=opened, limits=LIMITS, timeout=5))
    assert said.reward.value is None
    assert "test.sh" in (said.reward.reason or "")


def test_a_folder_that_does_not_fit_scores_like_an_empty_one() -> None:
    big = sealed(answer="42", big="x" * LIMITS.disk_bytes)
    said = verdict("[ -e answer ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt", big)
    assert said.reward.value == 0.0


def test_a_place_that_cannot_be_made_is_the_sandboxs_fault() -> None:
    @asynccontextmanager
    async def refused(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        raise SandboxError("no room")
        yield

    with pytest.raises(SandboxError, match="no room"):
        run(verify({"test.sh": b"true"}, sealed(), open_sandbox=refused, limits=LIMITS, timeout=5))


def test_a_cancel_ends_the_tests() -> None:
    async def act() -> None:
        work = verify({"test.sh": b"sleep 60"}, sealed(), open_sandbox=opened, limits=LIMITS, timeout=50)
        running = asyncio.ensure_future(work)
        while not own_children():
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(act())
    assert own_children() == []


BUSY = """
import os
if os.fork() == 0:
    os.setsid()
    for number in (0, 1, 2):
        os.close(number)
    while True:
        with open("/logs/verifier/reward.txt", "w") as file:
            file.write("1.0")
"""
NAIVE = "python3 work.py; sleep 0.05; echo 0.0 > /logs/verifier/reward.txt"


def test_a_program_that_keeps_writing_the_reward_is_found_out() -> None:
    for _ in range(4):
        reward = verdict(NAIVE, sealed(**{"work.py": BUSY})).reward
        assert reward.value is None
        assert "(python3) was still running" in (reward.reason or "")
