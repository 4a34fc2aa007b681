"""Proof that a task is sound: its solution scores 1.0, doing nothing scores less, and its tests use `paddock-run`."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paddock.errors import ImageError, RolloutError, TaskError
from paddock.rollouts.image_workspace import ImageWorkspace, WorkspaceOptions
from paddock.rollouts.judging import Ending
from paddock.rollouts.sandboxes import describe_end, seal, stage_task
from paddock.rollouts.steps import StepRecord, min_reward_failure, total_reward
from paddock.rollouts.verifier import VerifierResult, verify
from paddock.sandbox import find_backend, open_sandbox
from paddock.sandbox.base import Command, SandboxSpec
from paddock.sandbox.network.connections import describe_failures
from paddock.sandbox.network.policy import NO_NETWORK
from paddock.sandbox.user_namespace import find_identity
from paddock.shielded import run_shielded
from paddock.store.outcome import Outcome
from paddock.tasks.requirements import (
    MISSPELLED_TABLES,
    UNKNOWN_KEYS,
    UNREADABLE,
    check_can_run,
    find_warnings,
    uses_image,
)
from paddock.tasks.steps import plan_steps
from paddock.tasks.task import SOLUTION_ENTRY
from paddock.tasks.unprotected_runs import find_unprotected_runs
from paddock.tasks.variables import expand_defaults
from paddock.testing.checks import Result
from paddock.testing.task_faults import (
    ALWAYS_FULL_REWARD,
    BUILD_FAILS,
    HOST_DOES_NOT_ANSWER,
    IMAGE_UNAVAILABLE,
    NO_NETWORK_REASON,
    NO_REWARD,
    NO_SOLUTION,
    SOLUTION_BELOW_FULL_REWARD,
    UNKNOWN_KEY,
    UNSUPPORTED,
    TaskFault,
    diagnose_output,
    find_file_faults,
    find_line_end_fault,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.sandbox.network.policy import NetworkPolicy
    from paddock.sandbox.user_namespace import Identity
    from paddock.tasks.settings import Phase
    from paddock.tasks.task import Task

FULL_REWARD = 1.0
SHOWN_CHARACTERS = 400
RUNS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """Runs a task's own solution, and nothing at all, in the sandbox an agent would get."""

    task: Task
    backend: str = "bwrap"
    consent: bool = False
    _connections: list[ConnectionRecord] = field(default_factory=list, init=False, repr=False)
    """Those of the run that is being checked."""

    async def run(self) -> list[Result]:
        results = [] if UNREADABLE in self.task.metadata else [self._check_keys()]
        try:
            check_can_run(self.task, self.backend)
        except TaskError as error:
            name = "the task can be run here"
            return [*results, Result(name, "failed", error.message, error.hint, fault=self._refusal())]
        results.append(self._check_files())
        if self.task.image is None:
            # Only sandboxes without an image have paddock-run.
            results.append(self._check_runs())
        elif self.backend == "bwrap":
            results.append(_check_users(await asyncio.to_thread(find_identity)))
        for name, solved in (("doing nothing scores below 1.0", False), ("the solution scores 1.0", True)):
            self._connections.clear()
            try:
                results.append(await self._check(name, solved))
            except ImageError as error:
                # Without its image, nothing else of the task can be checked.
                return [*results, _image_failure(error, self.task)]
            except RolloutError as error:
                results.append(_failed(name, error.message, error.hint, self._diagnose(error.message)))
        return results

    def _refusal(self) -> str:
        """The name of the fault for which the task is not run."""
        if UNREADABLE in self.task.metadata:
            return UNREADABLE
        return UNKNOWN_KEY if MISSPELLED_TABLES in self.task.metadata else UNSUPPORTED

    def _diagnose(self, *outputs: str) -> TaskFault | None:
        fault = diagnose_output(*outputs, *describe_failures(self._connections))
        if fault is None or fault.name != HOST_DOES_NOT_ANSWER or self._connections:
            return fault
        # Without a proxy, a program learns only that a name cannot be resolved.
        phases: tuple[Phase, ...] = ("agent", "verifier")
        is_offline = any(self._network(phase).mode == "no-network" for phase in phases)
        return diagnose_output(NO_NETWORK_REASON) if is_offline else fault

    def _check_keys(self) -> Result:
        name = "every key of task.toml has an effect"
        warnings = "; ".join(find_warnings(self.task))
        if not warnings:
            return Result(name, "passed")
        fault = UNKNOWN_KEY if UNKNOWN_KEYS in self.task.metadata else None
        return Result(name, "warning", warnings, "correct or remove them", fault=fault)

    def _check_files(self) -> Result:
        name = "the files show no common fault"
        faults = find_file_faults(self.task)
        if not faults:
            return Result(name, "passed")
        detail = "; ".join(map(str, faults))
        return Result(name, "failed", detail, faults[0].hint, fault=faults[0].name)

    def _check_runs(self) -> Result:
        name = "the agent's programs run apart from the tests"
        if self.task.settings.verifier.grader is not None:
            # Written by the author of the rows, and nothing in the sandbox can write the reward.
            return Result(
                name, "info", "the log of the tests is graded outside; programs of the agent can print to it"
            )
        runs = find_unprotected_runs(self.task)
        if not runs:
            return Result(name, "passed")
        more = f", and {len(runs) - RUNS_SHOWN} more" if len(runs) > RUNS_SHOWN else ""
        detail = f"run without paddock-run: {'; '.join(map(str, runs[:RUNS_SHOWN]))}{more}"
        hint = "put paddock-run in front: such a program can read the tests, and stop or deceive them"
        return Result(name, "warning", detail, hint)

    async def _check(self, name: str, solved: bool) -> Result:
        if solved and (unsolved := self._unsolved_part()) is not None:
            hint = f"add solution/{SOLUTION_ENTRY}"
            return Result(name, "warning", f"{unsolved} has no solution", hint, fault=NO_SOLUTION)
        verdict, steps = await self._score(solved)
        reward = verdict.reward
        fault = self._diagnose(verdict.stdout, verdict.stderr, reward.reason or "")
        if reward.value is None:
            unknown = TaskFault(NO_REWARD, str(reward.reason), "see tests/test.sh")
            return _failed(
                name, f"no reward: {reward.reason}. {_output(verdict)}", "see tests/test.sh", fault or unknown
            )
        good = reward.value == FULL_REWARD if solved else reward.value < FULL_REWARD
        scores = _step_scores(steps) or verdict.mode
        score = f"reward {reward.value:g} ({scores})"
        idle = next((step.name for step in steps if step.reward == FULL_REWARD), None)
        if good and not solved and idle is not None:
            fault = TaskFault(ALWAYS_FULL_REWARD, f"step {idle} rewards an agent that did nothing", "see its tests")
            return Result(name, "warning", f"{fault}. {score}", fault.hint, fault=fault.name)
        if good:
            return Result(name, "passed", score)
        if not solved:
            fault = TaskFault(ALWAYS_FULL_REWARD, "the tests reward an agent that did nothing", "see tests/test.sh")
        elif fault is None:
            detail = f"the solution scores {reward.value:g}"
            fault = TaskFault(SOLUTION_BELOW_FULL_REWARD, detail, "see tests/test.sh and the solution")
        return _failed(name, f"{score}. {_output(verdict)}", "see tests/test.sh and the solution", fault)

    def _unsolved_part(self) -> str | None:
        """What has no solution: the task, or one of its steps. None if everything has one."""
        if not self.task.steps:
            return None if self.task.has_solution else "the task"
        plans = plan_steps(self.task)
        name = next((plan.name for plan in plans if SOLUTION_ENTRY not in plan.task.solution), None)
        return None if name is None else f"step {name}"

    async def _score(self, solved: bool) -> tuple[VerifierResult, Sequence[StepRecord]]:
        """How the task was scored, and its steps, if it has any."""
        if uses_image(self.task, self.backend):
            return await self._score_on_image(solved)
        timeouts = self.task.timeouts
        setup = self._network("setup") if self.task.setup else NO_NETWORK
        async with self._open(SandboxSpec(limits=self.task.sandbox, network=setup, phase="setup")) as sandbox:
            await stage_task(self.task, sandbox, timeout=timeouts.setup)
            if solved:
                await sandbox.set_network(self._network("agent"), phase="agent")
                await self._solve(sandbox)
            await sandbox.kill()
            sealed, _ = await seal(sandbox, self.task.sandbox)
        verdict = await verify(
            self.task.tests,
            sealed,
            open_sandbox=self._open,
            limits=self.task.sandbox,
            timeout=timeouts.verifier,
            network=self._network("verifier"),
        )
        return verdict, ()

    async def _score_on_image(self, solved: bool) -> tuple[VerifierResult, Sequence[StepRecord]]:
        workspace = ImageWorkspace(self.task, WorkspaceOptions(self._open, find_backend(self.backend)))
        try:
            await workspace.prepare_images()
            await workspace.open()
            await workspace.set_up()
            if not workspace.steps:
                return await _score_work(workspace, solved), ()
            return await self._score_steps(workspace, solved)
        finally:
            await run_shielded(workspace.close())

    async def _score_steps(
        self, workspace: ImageWorkspace, solved: bool
    ) -> tuple[VerifierResult, Sequence[StepRecord]]:
        """The reward of all steps, with the output of the first one that does not have the full reward."""
        results: list[StepRecord] = []
        worst: VerifierResult | None = None
        for plan in workspace.steps:
            result = StepRecord(plan.name)
            results.append(result)
            result.begin()
            await workspace.begin_step(plan)
            verdict = await _score_work(workspace, solved, keeps_running=plan is not workspace.steps[-1])
            result.end(Ending(Outcome.OK), verdict.reward)
            result.verifier = {"mode": verdict.mode}
            if worst is None or (worst.reward.value == FULL_REWARD and verdict.reward.value != FULL_REWARD):
                worst = verdict
            if verdict.reward.value is None or min_reward_failure(plan.step, verdict.reward) is not None:
                break
        assert worst is not None
        return replace(worst, reward=total_reward(results, self.task.settings.reward_strategy)), results

    def _network(self, phase: Phase) -> NetworkPolicy:
        return self.task.network.policy(phase, on_image=self.task.image is not None)

    async def _solve(self, sandbox: Sandbox) -> None:
        folder = sandbox.home / ".solution"
        for path, data in self.task.solution.items():
            await sandbox.write(folder / path, data, mode=0o755)
        env = expand_defaults(self.task.settings.solution_env, "solution.env")
        command = Command(["/bin/bash", str(folder / SOLUTION_ENTRY)], cwd=sandbox.workdir, env=env)
        done = await sandbox.exec(command, timeout=self.task.timeouts.agent)
        if done.exit_code != 0:
            output = (done.stderr or done.stdout)[-SHOWN_CHARACTERS:].decode(errors="replace")
            raise RolloutError(f"the solution ended with exit code {done.exit_code}: {output}")

    def _open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return self._opened(spec)

    @asynccontextmanager
    async def _opened(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        async with await open_sandbox(self.backend, spec, consent=self.consent) as sandbox:
            sandbox.on_connection(self._connections.append)
            yield sandbox


def _check_users(identity: Identity) -> Result:
    name = "the users of the image are real here"
    if identity.kind == "range":
        return Result(name, "passed")
    detail = "this machine gives a sandbox one user id: owners are pretended, and tests of owners mean nothing"
    return Result(name, "warning", detail, identity.reason)


async def _score_work(workspace: ImageWorkspace, solved: bool, *, keeps_running: bool = False) -> VerifierResult:
    done = await workspace.solve() if solved else None
    await workspace.end_work()
    notes = await workspace.collect()
    verdict = await workspace.verify(keeps_running=keeps_running)
    if done is None:
        return verdict
    if done.exit_code != 0:
        notes.append(f"the solution did not succeed: {describe_end(done)}")
    return replace(verdict, stderr="\n".join([verdict.stderr, *notes, ""])) if notes else verdict


def _step_scores(steps: Sequence[StepRecord]) -> str:
    """Such as `one: 1 sealed, two: unknown live`."""
    rewards = ["unknown" if step.reward is None else f"{step.reward:g}" for step in steps]
    rows = zip(steps, rewards, strict=True)
    return ", ".join(f"{step.name}: {reward} {step.verifier.get('mode', '')}" for step, reward in rows)


def _image_failure(error: ImageError, task: Task) -> Result:
    name = "the image can be pulled or built"
    if (named := error.data.get("fault")) is not None:
        return Result(name, "failed", f"{named}: {error.message}", error.hint, fault=named)
    fault = find_line_end_fault(task.files, error.message) or diagnose_output(error.message)
    if fault is None:
        other = IMAGE_UNAVAILABLE if error.data.get("line") is None else BUILD_FAILS
        return Result(name, "failed", f"{other}: {error.message}", error.hint, fault=other)
    return _failed(name, error.message, error.hint, fault)


def _failed(name: str, detail: str, hint: str | None, fault: TaskFault | None) -> Result:
    """A failure, with the fault that explains it in front."""
    if fault is None:
        return Result(name, "failed", detail, hint)
    return Result(name, "failed", f"{fault}. {detail}", fault.hint, fault=fault.name)


def _output(verdict: VerifierResult) -> str:
    """The ends of both: test programs report to either, and installers warn on standard error."""
    return "\n".join(filter(None, (text.strip()[-SHOWN_CHARACTERS:] for text in (verdict.stdout, verdict.stderr))))
