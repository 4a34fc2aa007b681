"""The verifier: runs a task's tests on the sealed work folder, in a new sandbox, and reads the reward they write.

The agent's sandbox is closed before this one is opened. Only the sealed work folder is copied over: not the agent's
home, its environment variables or its processes. The tests are read-only, and the reward files are guarded.
"""

from __future__ import annotations

import json
import math
import re
import signal
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.rollouts.sandboxes import EMPTY
from paddock.sandbox.base import LOGS, Command, SandboxSpec
from paddock.sandbox.network.policy import NO_NETWORK
from paddock.store.outcome import Reward

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from paddock.limits import SandboxLimits
    from paddock.sandbox.base import Completed, Sandbox
    from paddock.sandbox.network.policy import NetworkPolicy

REWARDS = (LOGS / "verifier" / "reward.txt", LOGS / "verifier" / "reward.json")
ENTRY = "test.sh"
SIGNALLED = 128
"""Exit codes do not decide the reward, but a code above this one means that a signal killed the tests."""
CLEAN_HOME = PurePosixPath("/tmp/verifier-home")
LARGEST_TEXT = 4096
LARGEST_JSON = 64 * 1024
VALUE_KEYS = ("reward", "score", "total")
PARTS_KEY = "parts"
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """The reward that the tests gave, and what they printed."""

    reward: Reward
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    mode: str = "sealed"
    """`sealed`, `live` or `separate`: where the tests ran."""


async def verify(
    tests: Mapping[str, bytes],
    work: bytes,
    *,
    open_sandbox: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]],
    limits: SandboxLimits,
    timeout: float,
    network: NetworkPolicy = NO_NETWORK,
) -> VerifierResult:
    """Score a sealed work folder. Raises SandboxError if there is no sandbox to do it in.

    A folder that cannot be unpacked again scores like an empty one: no agent gains by making it so.
    """
    if ENTRY not in tests:
        return VerifierResult(Reward.unknown("the task has no tests/test.sh"))
    spec = SandboxSpec(limits=limits, readonly_tests=tests, network=network, phase="verifier")
    async with open_sandbox(spec) as sandbox:
        try:
            await sandbox.unpack(sandbox.workdir, work)
        except SandboxError:
            if work == EMPTY:
                raise
        else:
            return await _run_tests(sandbox, timeout)
    return await verify(tests, EMPTY, open_sandbox=open_sandbox, limits=limits, timeout=timeout, network=network)


async def _run_tests(sandbox: Sandbox, timeout: float) -> VerifierResult:
    script = f"mkdir -p {CLEAN_HOME} && exec /bin/bash /tests/{ENTRY}"
    env = {"HOME": str(CLEAN_HOME), "PYTHONDONTWRITEBYTECODE": "1"}
    # `last`: what the agent's programs left running ends with the tests, as it could still write a reward.
    command = Command(script, cwd=sandbox.workdir, env=env, last=True, guarded=REWARDS)
    done = await sandbox.exec(command, timeout=timeout)
    await sandbox.kill()
    reward = await read_reward(sandbox, done, timeout)
    stdout, stderr = (output.decode(errors="replace") for output in (done.stdout, done.stderr))
    return VerifierResult(reward, done.exit_code, stdout, stderr)


async def read_reward(sandbox: Sandbox, done: Completed, timeout: float) -> Reward:
    """The reward that the tests wrote. Raises SandboxError if the sandbox ended by itself."""
    problem = find_abnormal_end(done, timeout)
    if problem is not None:
        return Reward.unknown(problem)
    contents: list[bytes | None] = []
    for path in REWARDS:
        try:
            contents.append(await sandbox.read(path, limit=LARGEST_JSON))
        except FileNotFoundError:
            contents.append(None)
        except SandboxError as error:
            return Reward.unknown(f"{path.name} cannot be trusted: {error.message}")
    return parse_reward(*contents)


def find_abnormal_end(done: Completed, timeout: float) -> str | None:
    """Why nothing that the tests wrote counts. Raises SandboxError if the sandbox ended by itself."""
    if done.timed_out:
        return f"the verifier did not finish within {timeout:g} s"
    if done.killed_for:
        return f"the verifier used more {done.killed_for} than allowed"
    if done.exit_code is None:
        raise SandboxError("the sandbox of the verifier ended by itself")
    if SIGNALLED < done.exit_code <= SIGNALLED + signal.NSIG:
        # The programs that tests run are the agent's: one of them could forge a reward and then kill the tests.
        return f"the verifier was killed by signal {done.exit_code - SIGNALLED}"
    if done.tampered:
        return done.tampered
    return None


# -- what the tests wrote -------------------------------------------------------------------------------


def parse_reward(text: bytes | None, json_text: bytes | None) -> Reward:
    """The reward in `reward.txt` and `reward.json`; None stands for a file that is not there.

    reward.txt holds one finite number. reward.json holds an object of named numbers. Its value is
    the number under `reward`, else `score`, else `total`; without any of them, its only number. The
    other numbers, and those in an object under `parts`, are parts. Several numbers and no `reward` is
    unknown, as it is in Harbor: how to weigh them is the task's business, and a guess would train on
    the wrong thing. Texts, lists, true and false are no numbers and are passed over.

    With both files, reward.txt decides the value and reward.json gives the parts; a broken
    reward.json then costs only the parts. A broken reward.txt is unknown, whatever reward.json says.
    Two different rewards are unknown: tests write one, so somebody else may have written the other.
    """
    if text is None and json_text is None:
        return Reward.unknown("the verifier wrote no reward")
    if text is None:
        assert json_text is not None
        return _from_json(json_text)
    value = _from_text(text)
    named, parts = None, {}
    if json_text is not None:
        beside = _from_json(json_text, named_only=True)
        named, parts = beside.value, beside.parts
    if isinstance(value, float) and named is not None and named != value:
        value = f"reward.txt says {value:g}, but reward.json says {named:g}"
    return Reward(None, value, parts) if isinstance(value, str) else Reward(value, None, parts)


def _from_text(text: bytes) -> float | str:
    """The number, or the reason why there is none."""
    if len(text) > LARGEST_TEXT:
        return f"reward.txt has {len(text)} bytes, not one number"
    content = text.decode("utf-8", "replace").strip()
    if not content:
        return "reward.txt is empty"
    if content.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return f"reward.txt says {content}, which is not finite"
    if not NUMBER.fullmatch(content):
        return f"reward.txt is not one number: {content[:80]!r}"
    value = float(content)
    return value if math.isfinite(value) else f"reward.txt says {content[:80]}, which is not finite"


def _from_json(text: bytes, *, named_only: bool = False) -> Reward:
    """With `named_only`, a single number is a part unless it is called the reward."""
    if len(text) > LARGEST_JSON:
        return Reward.unknown(f"reward.json has {len(text)} bytes, over {LARGEST_JSON}")
    try:
        data = json.loads(text, parse_int=float)
    except (ValueError, RecursionError) as error:
        return Reward.unknown(f"reward.json is not valid JSON: {error}")
    if not isinstance(data, dict):
        return Reward.unknown('reward.json is not an object such as {"reward": 1.0}')
    named = data.get(PARTS_KEY)
    inner = named if isinstance(named, dict) else {}
    bad = [
        str(key) for key, value in (*data.items(), *inner.items()) if _is_number(value) and not math.isfinite(value)
    ]
    if bad:
        return Reward.unknown(f"reward.json has numbers that are not finite: {', '.join(bad)[:200]}")
    numbers = {str(key): float(value) for key, value in data.items() if _is_number(value)}
    parts = {str(key): float(value) for key, value in inner.items() if _is_number(value)}
    for key in VALUE_KEYS:
        if key in numbers:
            value = numbers.pop(key)
            return Reward(value, None, {**numbers, **parts})
        if key in data:
            return Reward(None, f"reward.json has no number under {key!r}", {**numbers, **parts})
    every = {**numbers, **parts}
    if len(every) == 1 and not named_only:
        return Reward(next(iter(every.values())), None, every)
    if not every:
        return Reward.unknown("reward.json holds no number")
    return Reward(None, f"reward.json has several numbers and none is 'reward': {', '.join(every)[:200]}", every)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
