"""The verifier: a new sandbox, the agent's work as data, the tests read-only, and a reward nobody else wrote.

The agent's sandbox is dead before the tests exist anywhere. Of its files only the sealed work folder
comes along: not its home, not its environment, not its processes.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.rollouts.outcome import Reward
from paddock.rollouts.reward import parse_reward
from paddock.rollouts.sandbox.base import LOGS, Command, SandboxSpec
from paddock.rollouts.staging import EMPTY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from paddock.rollouts.limits import SandboxLimits
    from paddock.rollouts.sandbox.base import Completed, Sandbox

REWARDS = (LOGS / "verifier" / "reward.txt", LOGS / "verifier" / "reward.json")
ENTRY = "test.sh"
LONGEST_REWARD = 64 * 1024
SIGNALLED = 128
"""Exit codes do not decide, but these say that the tests did not come to their end."""
CLEAN_HOME = PurePosixPath("/tmp/verifier-home")


@dataclass(frozen=True, slots=True)
class Verdict:
    reward: Reward
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""


class Unusable(SandboxError):
    """The sealed folder does not fit into a sandbox."""


async def verify(
    tests: Mapping[str, bytes],
    sealed: bytes,
    *,
    open_sandbox: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]],
    limits: SandboxLimits,
    timeout: float,
) -> Verdict:
    """Score a sealed work folder. Raises SandboxError if there is no sandbox to do it in.

    A folder that cannot be laid out again scores like an empty one: no agent gains by making it so.
    """
    try:
        return await _verify(tests, sealed, open_sandbox=open_sandbox, limits=limits, timeout=timeout)
    except Unusable:
        return await _verify(tests, EMPTY, open_sandbox=open_sandbox, limits=limits, timeout=timeout)


async def _verify(
    tests: Mapping[str, bytes],
    sealed: bytes,
    *,
    open_sandbox: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]],
    limits: SandboxLimits,
    timeout: float,
) -> Verdict:
    if ENTRY not in tests:
        return Verdict(Reward.unknown("the task has no tests/test.sh"))
    spec = SandboxSpec(limits=limits, readonly_tests=tests)
    async with open_sandbox(spec) as sandbox:
        try:
            await sandbox.unpack(sandbox.workdir, sealed)
        except SandboxError as error:
            raise Unusable(error.message) from error
        script = f"mkdir -p {CLEAN_HOME} && exec /bin/bash /tests/{ENTRY}"
        env = {"HOME": str(CLEAN_HOME), "PYTHONDONTWRITEBYTECODE": "1"}
        # Whatever the agent's programs left running ends with the tests: it could still write a reward.
        command = Command(script, cwd=sandbox.workdir, env=env, last=True, guarded=REWARDS)
        done = await sandbox.exec(command, timeout=timeout)
        await sandbox.kill()
        reward = await _read_reward(sandbox, done, timeout)
    return Verdict(reward, done.exit_code, _text(done.stdout), _text(done.stderr))


async def _read_reward(sandbox: Sandbox, done: Completed, timeout: float) -> Reward:
    if done.timed_out:
        return Reward.unknown(f"the verifier did not finish within {timeout:g} s")
    if done.killed_for:
        return Reward.unknown(f"the verifier used more {done.killed_for} than allowed")
    if done.exit_code is None:
        raise SandboxError("the sandbox of the verifier ended by itself")
    if SIGNALLED < done.exit_code <= SIGNALLED + signal.NSIG:
        # The programs that tests run are the agent's: one of them could forge a reward and then kill the tests.
        return Reward.unknown(f"the verifier was killed by signal {done.exit_code - SIGNALLED}")
    if done.tampered:
        return Reward.unknown(done.tampered)
    found: list[bytes | None] = []
    for path in REWARDS:
        try:
            found.append(await sandbox.read(path, limit=LONGEST_REWARD))
        except FileNotFoundError:
            found.append(None)
        except SandboxError as error:
            return Reward.unknown(f"{path.name} cannot be trusted: {error.message}")
    return parse_reward(*found)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
