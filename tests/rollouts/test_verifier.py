"""The verifier: a clean place, the sealed work as data, and a reward that nobody else wrote."""

import asyncio
import io
import json
import math
import tarfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.errors import SandboxError
from paddock.rollouts.verifier import VerifierResult, parse_reward, verify
from paddock.sandbox import open_sandbox
from paddock.sandbox.base import Sandbox, SandboxSpec
from paddock.store.outcome import Reward
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


def verdict(script: str, work: bytes | None = None, *, timeout: float = 10.0, **tests: str) -> VerifierResult:
    files = {"test.sh": script.encode(), **{name: text.encode() for name, text in tests.items()}}
    work = sealed(answer="42") if work is None else work
    return run(verify(files, work, open_sandbox=opened, limits=LIMITS, timeout=timeout))


def test_the_work_is_there_and_the_place_is_clean() -> None:
    result = verdict(
        'pwd; cat answer; echo; echo "$HOME"; ls -A "$HOME" /logs/verifier; env | grep -c OPENAI', helper="x"
    )
    lines = result.stdout.splitlines()
    assert lines[:3] == ["/home/user/workdir", "42", "/tmp/verifier-home"]
    assert lines[-1] == "0"
    assert result.exit_code == 1


def test_the_tests_are_beside_each_other_and_cannot_be_changed() -> None:
    result = verdict(
        'cat "$(dirname "$0")/helper" /tests/helper; echo x > /tests/helper || echo refused', helper="beside "
    )
    assert result.stdout == "beside beside refused\n"


def test_a_reward_is_read_after_the_tests_whatever_their_exit_code() -> None:
    assert verdict("echo 0.25 > /logs/verifier/reward.txt; exit 7").reward.value == 0.25
    assert verdict("echo 0.5 > ~user/logs/verifier/reward.txt").reward.value == 0.5


def test_killed_tests_give_no_reward() -> None:
    result = verdict("echo 1 > /logs/verifier/reward.txt; kill -9 $$")
    assert (result.reward.value, result.exit_code) == (None, 137)


def test_what_the_tests_leave_running_neither_holds_them_up_nor_writes() -> None:
    began = time.monotonic()
    result = verdict(
        "(sleep 0.05; echo 1 > /logs/verifier/reward.txt; sleep 60) & echo 0 > /logs/verifier/reward.txt"
    )
    assert result.reward.value in (0.0, None)
    assert time.monotonic() - began < 5


def test_the_outputs_are_kept_apart_and_within_bounds() -> None:
    result = verdict("echo out; echo err >&2; yes | head -c 20M; echo 1 > /logs/verifier/reward.txt")
    assert result.reward.value == 1.0
    assert result.stdout.startswith("out\n")
    assert result.stderr == "err\n"
    assert len(result.stdout) <= LIMITS.output_bytes


def test_no_tests_is_no_reward() -> None:
    reply = run(verify({}, sealed(), open_sandbox=opened, limits=LIMITS, timeout=5))
    assert reply.reward.value is None
    assert "test.sh" in (reply.reward.reason or "")


def test_a_folder_that_does_not_fit_scores_like_an_empty_one() -> None:
    big = sealed(answer="42", big="x" * LIMITS.disk_bytes)
    result = verdict("[ -e answer ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt", big)
    assert result.reward.value == 0.0


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


# -- what the tests wrote --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"1", 1.0),
        (b" 0.5\n", 0.5),
        (b"-2.", -2.0),
        (b"+.25", 0.25),
        (b"1e-3\r\n", 0.001),
        (b"0", 0.0),
        (b"7.5e1", 75.0),
    ],
)
def test_one_number_is_the_reward(text: bytes, value: float) -> None:
    assert parse_reward(text, None) == Reward(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"1 2", "not one number"),
        (b"1.0\n1.0", "not one number"),
        (b"1_0", "not one number"),
        (b"0x1", "not one number"),
        ("١".encode(), "not one number"),
        (b"\xff", "not one number"),
        (b"true", "not one number"),
        (b"NaN", "not finite"),
        (b"-inf", "not finite"),
        (b"1e999", "not finite"),
        (b"1" * 5000, "5000 bytes"),
    ],
)
def test_anything_else_is_unknown_and_says_why(text: bytes, reason: str) -> None:
    reward = parse_reward(text, None)
    assert reward.value is None
    assert reason in str(reward.reason)
    assert parse_reward(text, b'{"reward": 1.0}').value is None


def test_no_file_is_unknown() -> None:
    assert parse_reward(None, None) == Reward.unknown("the verifier wrote no reward")


@pytest.mark.parametrize(
    ("data", "value", "parts"),
    [
        ({"reward": 0.5}, 0.5, {}),
        ({"reward": 1, "speed": 0.25, "note": "fine", "done": True}, 1.0, {"speed": 0.25}),
        ({"reward": 0.5, "parts": {"a": 1, "b": 0, "c": "x"}, "d": 2}, 0.5, {"a": 1.0, "b": 0.0, "d": 2.0}),
        ({"score": 0.3, "total": 9}, 0.3, {"total": 9.0}),
        ({"total": 0.3, "a": 1}, 0.3, {"a": 1.0}),
        ({"accuracy": 0.7}, 0.7, {"accuracy": 0.7}),
        ({"parts": {"accuracy": 0.7}}, 0.7, {"accuracy": 0.7}),
    ],
)
def test_named_numbers_are_value_and_parts(data: object, value: float, parts: dict[str, float]) -> None:
    assert parse_reward(None, json.dumps(data).encode()) == Reward(value, None, parts)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "not valid JSON"),
        (b"0.5", "not an object"),
        (b"{}", "no number"),
        (b'{"a": 1, "b": 0}', "several numbers and none is 'reward': a, b"),
        (b'{"reward": "1"}', "no number under 'reward'"),
        (b'{"reward": true}', "no number under 'reward'"),
        (b'{"reward": NaN}', "not finite: reward"),
        (b'{"reward": 1, "parts": {"a": Infinity}}', "not finite: a"),
        (b'{"reward": ' + b"9" * 5000 + b"}", "not finite"),
        (b"[" * 60_000, "not valid JSON"),
        (b'{"reward": 1, "x": "' + b"x" * 70_000 + b'"}', "bytes"),
    ],
    ids=range(11),
)
def test_an_object_without_a_clear_value_is_unknown(text: bytes, reason: str) -> None:
    reward = parse_reward(None, text)
    assert reward.value is None
    assert reason in str(reward.reason)


def test_parts_are_kept_where_the_value_is_unknown() -> None:
    assert parse_reward(None, b'{"a": 1, "b": 0}').parts == {"a": 1.0, "b": 0.0}


def test_the_text_decides_and_the_object_gives_the_parts() -> None:
    assert parse_reward(b"0.25", b'{"reward": 0.25, "a": 0.5}') == Reward(0.25, None, {"a": 0.5})
    assert parse_reward(b"0.25", b"broken") == Reward(0.25)


@given(
    st.none() | st.binary(max_size=60),
    st.none() | st.binary(max_size=60) | st.text().map(lambda text: json.dumps({text: 1}).encode()),
)
def test_whatever_is_written_gives_a_finite_value_or_a_reason(text: bytes | None, data: bytes | None) -> None:
    reward = parse_reward(text, data)
    assert reward.reason if reward.value is None else math.isfinite(reward.value)


def test_two_different_rewards_are_unknown() -> None:
    both = parse_reward(b"1.0", b'{"reward": 0.0, "parts": {"a": 0.0}}')
    assert (both.value, both.reason) == (None, "reward.txt says 1, but reward.json says 0")
    assert parse_reward(b"1.0", b'{"reward": 1, "parts": {"a": 0.0}}').value == 1.0
    assert parse_reward(b"1.0", b'{"accuracy": 0.5}').value == 1.0
