"""Proof that a task is sound: its solution scores 1.0, doing nothing scores less, and its tests use `paddock-run`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.errors import RolloutError, TaskError
from paddock.rollouts.sandbox import open_sandbox
from paddock.rollouts.sandbox.base import Command, SandboxSpec
from paddock.rollouts.staging import seal, stage
from paddock.rollouts.task import SOLUTION_ENTRY
from paddock.rollouts.task_needs import check_can_run
from paddock.rollouts.unprotected_runs import find_unprotected_runs
from paddock.rollouts.verifier import Verdict, verify
from paddock.testing.checks import Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from paddock.rollouts.sandbox.base import Sandbox
    from paddock.rollouts.task import Task

FULL = 1.0
SHOWN = 400
RUNS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Runs a task's own solution, and nothing at all, in the sandbox an agent would get."""

    task: Task
    backend: str = "bwrap"
    consent: bool = False

    async def run(self) -> list[Result]:
        try:
            check_can_run(self.task, self.backend)
        except TaskError as error:
            return [Result("the task can be run here", "failed", error.message, error.hint)]
        results = [self._check_runs()]
        for name, solved in (("doing nothing scores below 1.0", False), ("the solution scores 1.0", True)):
            try:
                results.append(await self._check(name, solved))
            except RolloutError as error:
                results.append(Result(name, "failed", error.message, error.hint))
        return results

    def _check_runs(self) -> Result:
        name = "the agent's programs run apart from the tests"
        runs = find_unprotected_runs(self.task)
        if not runs:
            return Result(name, "passed")
        more = f", and {len(runs) - RUNS_SHOWN} more" if len(runs) > RUNS_SHOWN else ""
        detail = f"run without paddock-run: {'; '.join(map(str, runs[:RUNS_SHOWN]))}{more}"
        hint = "put paddock-run in front: such a program can read the tests, and stop or deceive them"
        return Result(name, "warning", detail, hint)

    async def _check(self, name: str, solved: bool) -> Result:
        if solved and not self.task.has_solution:
            return Result(name, "warning", "the task has no solution", f"add solution/{SOLUTION_ENTRY}")
        verdict = await self._score(solved)
        reward = verdict.reward
        if reward.value is None:
            return Result(name, "failed", f"no reward: {reward.reason}. {_words(verdict)}", "see tests/test.sh")
        good = reward.value == FULL if solved else reward.value < FULL
        told = f"reward {reward.value:g}"
        if good:
            return Result(name, "passed", told)
        return Result(name, "failed", f"{told}. {_words(verdict)}", "see tests/test.sh and the solution")

    async def _score(self, solved: bool) -> Verdict:
        timeouts = self.task.timeouts
        async with self._open(SandboxSpec(limits=self.task.sandbox)) as sandbox:
            await stage(self.task, sandbox, timeout=timeouts.setup)
            if solved:
                await self._solve(sandbox)
            await sandbox.kill()
            sealed, _ = await seal(sandbox, self.task.sandbox)
        return await verify(
            self.task.tests, sealed, open_sandbox=self._open, limits=self.task.sandbox, timeout=timeouts.verifier
        )

    async def _solve(self, sandbox: Sandbox) -> None:
        folder = sandbox.home / ".solution"
        for path, data in self.task.solution.items():
            await sandbox.write(folder / path, data, mode=0o755)
        command = Command(["/bin/bash", str(folder / SOLUTION_ENTRY)], cwd=sandbox.workdir)
        done = await sandbox.exec(command, timeout=self.task.timeouts.agent)
        if done.exit_code != 0:
            words = (done.stderr or done.stdout)[-SHOWN:].decode(errors="replace")
            raise RolloutError(f"the solution ended with exit code {done.exit_code}: {words}")

    def _open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return _opened(self.backend, spec, self.consent)


@asynccontextmanager
async def _opened(backend: str, spec: SandboxSpec, consent: bool) -> AsyncIterator[Sandbox]:
    async with await open_sandbox(backend, spec, consent=consent) as sandbox:
        yield sandbox


def _words(verdict: Verdict) -> str:
    return (verdict.stderr or verdict.stdout).strip()[-SHOWN:]
