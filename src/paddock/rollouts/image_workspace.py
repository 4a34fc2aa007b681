"""Where a task with an image is worked on and scored. A rollout and `paddock check` use the same one.

    prepare_images → open → set_up → (the agent, or `solve`) → end_work → collect → verify → close

A task with steps goes through `begin_step`, the agent, `end_work` and `verify` for each of its steps. A step begins
with the files of the one before. What sealed tests wrote is gone, as they write to a layer of their own. After live
tests the next step has the same sandbox, otherwise a new one on the same layer.

What is written goes to a layer on disk. The verifier's mode decides where the tests run: `sealed` in a new sandbox on
top of that layer, `live` in the same sandbox beside the processes that are left, `separate` on an image of their own.

A backend without layers (`Sandbox.supports_layers`) runs `sealed` tests in the sandbox of the agent too, after every
process in it has ended.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import AgentError, SandboxError, TaskError
from paddock.rollouts.artifacts import Artifacts, collect_artifacts, run_collect_commands
from paddock.rollouts.entrypoint import is_waiting, start_entrypoint
from paddock.rollouts.health import wait_until_healthy
from paddock.rollouts.image_tests import (
    NONINTERACTIVE,
    reset_folders,
    run_image_tests,
    script_command,
    unpack_scripts,
)
from paddock.rollouts.image_users import check_users
from paddock.rollouts.sandboxes import describe_end
from paddock.rollouts.separate_verifier import SeparateVerifier
from paddock.rollouts.task_image import prepare_image
from paddock.rollouts.verifier import VerifierResult
from paddock.sandbox.base import TESTS, Command, SandboxSpec
from paddock.sandbox.images.dockerfiles.events import BuildLog
from paddock.sandbox.images.provider import BuildRequest
from paddock.sandbox.images.store import default_store
from paddock.shielded import run_shielded
from paddock.store.outcome import Reward
from paddock.tasks.steps import SETUP_ENTRY, plan_steps
from paddock.tasks.task import SOLUTION_ENTRY, TEST_ENTRY
from paddock.tasks.variables import expand_defaults

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from paddock.limits import RolloutTimeouts
    from paddock.sandbox.base import Completed, Mount, Sandbox
    from paddock.sandbox.guest_sandbox import GuestSandbox
    from paddock.sandbox.images.dockerfiles.events import BuildEvent
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.network.policy import NetworkPolicy
    from paddock.tasks.settings import Phase, VerifierMode
    from paddock.tasks.steps import StepPlan
    from paddock.tasks.task import Task

SOLUTION = PurePosixPath("/solution")
SETTLE_SECONDS = 0.5
"""For processes that end just after the agent did."""
SETTLE_POLL_SECONDS = 0.05
SHOWN_PROCESSES = 5


@dataclass(frozen=True, slots=True)
class WorkspaceOptions:
    """What a workspace needs beside its task."""

    open_sandbox: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]
    backend: type[GuestSandbox]
    """The class of the sandboxes that `open_sandbox` opens."""
    timeouts: RolloutTimeouts | None = None
    """Replaces those of the task."""
    verifier_mode: VerifierMode | None = None
    """Replaces what the task says."""
    agent_network: NetworkPolicy | None = None
    """Replaces what the task says."""

    def network(self, task: Task, phase: Phase) -> NetworkPolicy:
        chosen = self.agent_network if phase == "agent" else None
        return chosen or task.network.policy(phase, on_image=True)


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """Where the tests of a rollout are run, and why there."""

    mode: VerifierMode
    reason: str


class ImageWorkspace:
    """The sandboxes of a rollout on an image: the agent's, and those of the tests."""

    def __init__(self, task: Task, options: WorkspaceOptions) -> None:
        assert task.image is not None
        self.task = task
        """As it is in the current step, if it has steps."""
        self.steps = plan_steps(task)
        self.build_log = BuildLog()
        self.choice: ModeChoice | None = None
        """How the tests are run; None before `end_work`."""
        self.artifacts = Artifacts()
        """What the task keeps; none before `collect`."""
        self._source = task.image
        self._options = options
        self._image: Image | None = None
        self._sandbox: Sandbox | None = None
        self._opened = AsyncExitStack()
        """The sandbox of the agent."""
        self._layers = AsyncExitStack()
        """The layer below, which the verifier still reads after that sandbox."""
        self._layer: Path | None = None
        self._mounts: tuple[Mount, ...] = ()
        self._is_open = False
        """Whether the agent's sandbox is open."""
        self._earlier_usage: dict[str, Any] = {}
        """Of the sandboxes of earlier steps."""
        self._step = ""
        """The name of the current step."""
        self.separate_verifiers = {
            name: SeparateVerifier(each, options)
            for name, each in ({plan.name: plan.task for plan in self.steps} or {"": task}).items()
            if (options.verifier_mode or each.settings.verifier.mode) == "separate"
        }
        """By the name of the step; without steps, the name is empty."""

    @property
    def build_seconds(self) -> float:
        """The time that all images may take."""
        own = sum(verifier.build_seconds for verifier in self.separate_verifiers.values())
        return self.task.settings.environment.build_timeout + own

    @property
    def separate_verifier(self) -> SeparateVerifier | None:
        """That of the current step."""
        return self.separate_verifiers.get(self._step)

    @property
    def image(self) -> Image:
        assert self._image is not None, "prepare_images comes first"
        return self._image

    @property
    def sandbox(self) -> Sandbox:
        assert self._sandbox is not None, "open comes first"
        return self._sandbox

    # -- before the agent ---------------------------------------------------------------------------

    async def prepare_images(self, on_progress: Callable[[BuildEvent], None] | None = None) -> None:
        """Pull or build the image, and that of a separate verifier. Raises ImageError."""
        task = self.task
        request = BuildRequest(
            dockerfile=self._source.dockerfile,
            files=task.files,
            modes={path: task.mode(path) for path in task.files},
            network=self._network("build"),
            timeout=task.settings.environment.build_timeout,
            on_progress=self.build_log.recorder(on_progress),
        )
        self._image = await prepare_image(self._source.name, request, self._options.backend.image_provider())
        for verifier in self.separate_verifiers.values():
            await verifier.prepare_image(self._image, on_progress)

    async def open(self, mounts: tuple[Mount, ...] = ()) -> Sandbox:
        """The sandbox for the agent. Raises SandboxError."""
        self._mounts = mounts
        if self._options.backend.supports_layers:
            self._layer = await self._new_layer(self._layers)
        return await self._open_sandbox()

    async def _open_sandbox(self) -> Sandbox:
        """The first sandbox of the agent, or a new one on the same layer."""
        phases: tuple[Phase, ...] = ("setup", "agent", "verifier")
        tasks = [plan.task for plan in self.steps] or [self.task]
        policies = [self._options.network(task, phase) for task in tasks for phase in phases]
        # A sandbox that gets a network later is opened with it: certificates can only be mounted then.
        network = next((policy for policy in policies if policy.mode != "no-network"), policies[0])
        spec = replace(
            self._spec(user=self.task.settings.agent.user), mounts=self._mounts, writable_layer=self._layer
        )
        spec = replace(spec, network=network, phase="setup")
        self._sandbox = await self._opened.enter_async_context(self._options.open_sandbox(spec))
        self._is_open = True
        return self._sandbox

    async def set_up(self) -> None:
        """Run the entry point of the image and the set-up shell, and wait for the health check. Raises TaskError."""
        sandbox, seconds = self.sandbox, self._timeouts.setup
        await sandbox.set_network(self._network("setup"), phase="setup")
        await check_users(sandbox, self.image.config.user)
        if self.image.config.entrypoint:
            await start_entrypoint(sandbox, self.image.config.entrypoint)
        if self.task.setup:
            done = await sandbox.exec(Command(self.task.setup, cwd=sandbox.workdir), timeout=seconds)
            if done.exit_code != 0:
                raise TaskError(f"the task's set-up failed: {describe_end(done)}")
        check = self.task.settings.environment.health_check
        if check is not None:
            await wait_until_healthy(sandbox, check)
        if not self.steps:
            await self._check_users()
        await sandbox.set_network(self._network("agent"), phase="agent")

    async def _check_users(self) -> None:
        """After the set-up, which may make users."""
        settings = self.task.settings
        # The users of a separate verifier are those of its own image.
        await check_users(
            self.sandbox, settings.agent.user, settings.verifier.user if self.separate_verifier is None else ""
        )

    # -- steps --------------------------------------------------------------------------------------

    async def begin_step(self, plan: StepPlan) -> Sandbox:
        """Prepare a step of the task: its files, its `setup.sh` and its health check.

        Raises TaskError, or AgentError if an earlier step made it impossible to put its files into place."""
        assert self._layer is not None, "a backend without layers runs no steps"
        self.task, self.choice, self._step = plan.task, None, plan.name
        if self._is_open and plan.number > 1:
            # The tests of the step before ran here: the agent must see neither them nor what they wrote.
            await reset_folders(self.sandbox, "/logs/verifier", str(TESTS))
        is_new = not self._is_open
        sandbox = await self._open_sandbox() if is_new else self.sandbox
        await sandbox.set_network(self._network("setup"), phase="setup")
        if is_new and self.image.config.entrypoint:
            await start_entrypoint(sandbox, self.image.config.entrypoint)
        sandbox.set_user(plan.task.settings.agent.user or self.image.config.user)
        try:
            await unpack_scripts(sandbox, sandbox.workdir, plan.step.files, plan.step.modes)
        except SandboxError as error:
            blame = TaskError if plan.number == 1 else AgentError
            raise blame(f"the files of step {plan.name} cannot be put into the work folder: {error}") from error
        if SETUP_ENTRY in plan.step.files:
            command = Command(script_command(str(sandbox.workdir / SETUP_ENTRY)), cwd=sandbox.workdir)
            done = await sandbox.exec(command, timeout=self._timeouts.setup)
            if done.exit_code != 0:
                raise TaskError(f"{SETUP_ENTRY} of step {plan.name} failed: {describe_end(done)}")
        if plan.step.health_check is not None:
            await wait_until_healthy(sandbox, plan.step.health_check)
        await self._check_users()
        await sandbox.set_network(self._network("agent"), phase="agent")
        return sandbox

    def usage(self) -> dict[str, Any]:
        """What the agent's sandboxes have used: `cpu_seconds`, `peak_memory_bytes` and `killed_for`."""
        if not self._is_open:
            return dict(self._earlier_usage)
        return add_usage(self._earlier_usage, self.sandbox.usage())

    # -- in place of an agent -----------------------------------------------------------------------

    async def solve(self) -> Completed:
        """Run the reference solution. How it ends does not decide: the tests do."""
        sandbox = self.sandbox
        await reset_folders(sandbox, str(SOLUTION))
        await unpack_scripts(sandbox, SOLUTION, self.task.solution)
        env = {**NONINTERACTIVE, **expand_defaults(self.task.settings.solution_env, "solution.env")}
        command = Command(script_command(str(SOLUTION / SOLUTION_ENTRY)), cwd=sandbox.workdir, env=env)
        return await sandbox.exec(command, timeout=self._timeouts.agent)

    # -- after the agent ----------------------------------------------------------------------------

    async def end_work(self) -> ModeChoice:
        """Decide how the tests are run. Unless they run live, every process in the sandbox is dead afterwards, or
        after `collect` if the task has collect commands."""
        self.choice = await self._choose_mode()
        if not self.task.settings.verifier.collect:
            await self._end_agent()
        return self.choice

    @property
    def _uses_one_sandbox(self) -> bool:
        """Whether the tests run in the sandbox of the agent."""
        assert self.choice is not None, "end_work comes first"
        return self.choice.mode == "live" or (
            self.choice.mode == "sealed" and not self._options.backend.supports_layers
        )

    async def _end_agent(self) -> None:
        """End every process of the agent, unless the tests need them."""
        assert self.choice is not None, "end_work comes first"
        if self.choice.mode != "live":
            await (self.sandbox.end_processes() if self._uses_one_sandbox else self.sandbox.kill())

    async def collect(self) -> list[str]:
        """Run the collect commands and read the artifacts. Returns what went wrong: it does not stop the tests."""
        assert self.choice is not None, "end_work comes first"
        commands, problems = self.task.settings.verifier.collect, []
        if commands:
            await self.sandbox.set_network(self._network("verifier"), phase="verifier")
            user = self.image.config.user or "root"
            problems += await run_collect_commands(self.sandbox, commands, user=user)
            await self._end_agent()
        self.artifacts = await collect_artifacts(self.sandbox, self.task.settings.artifacts)
        problems += self.artifacts.problems
        return problems if self.choice.mode != "separate" else [*problems, *self.artifacts.withheld()]

    async def _choose_mode(self) -> ModeChoice:
        if self._options.verifier_mode is not None:
            return ModeChoice(self._options.verifier_mode, "chosen for this run")
        if self.task.settings.verifier.mode is not None:
            return ModeChoice(self.task.settings.verifier.mode, "the task says so")
        processes = await self._left_processes()
        if not processes:
            return ModeChoice("sealed", "no process was running when the agent ended")
        names = ", ".join(processes[:SHOWN_PROCESSES])
        more = f" and {len(processes) - SHOWN_PROCESSES} more" if len(processes) > SHOWN_PROCESSES else ""
        return ModeChoice("live", f"processes were running when the agent ended: {names}{more}")

    async def _left_processes(self) -> Sequence[str]:
        """The commands that still run. A sandbox that was ended for its limits has none."""
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        try:
            while processes := [line for line in await self.sandbox.list_processes() if not is_waiting(line)]:
                if asyncio.get_running_loop().time() > deadline:
                    return processes
                await asyncio.sleep(SETTLE_POLL_SECONDS)
        except SandboxError:
            return []
        return []

    async def leave(self) -> None:
        """Close the agent's sandbox, unless the tests run in it."""
        if self.choice is None or not self._uses_one_sandbox:
            await self._close_sandbox()

    async def _close_sandbox(self) -> None:
        if self._is_open:
            self._earlier_usage = self.usage()
            self._is_open = False
        await self._opened.aclose()

    async def verify(self, *, keeps_running: bool = False) -> VerifierResult:
        """Run the tests. `keeps_running`: of live tests, more steps follow, so other processes go on.

        Raises SandboxError if there is no sandbox to do it in."""
        assert self.choice is not None, "end_work comes first"
        mode = self.choice.mode
        return replace(await self._run_verifier(mode, keeps_running=keeps_running), mode=mode)

    async def _run_verifier(self, mode: VerifierMode, *, keeps_running: bool) -> VerifierResult:
        if TEST_ENTRY not in self.task.tests and mode != "separate":
            # A `/tests` that the agent made must not be run in its place.
            return VerifierResult(Reward.unknown(f"there is no tests/{TEST_ENTRY}"))
        if self._uses_one_sandbox:
            return await self._run_tests(self.sandbox, keeps_running=keeps_running)
        await self._close_sandbox()
        if mode == "separate":
            assert self.separate_verifier is not None, "the mode is separate from the start"
            async with AsyncExitStack() as stack:
                layer = await self._new_layer(stack) if self._options.backend.supports_layers else None
                return await self.separate_verifier.run(self.artifacts, layer)
        assert self._layer is not None
        async with AsyncExitStack() as stack:
            own_layer = await self._new_layer(stack)
            spec = replace(self._spec(), extra_layers=(self._layer,), writable_layer=own_layer)
            spec = replace(spec, network=self._network("verifier"), phase="verifier")
            sandbox = await stack.enter_async_context(self._options.open_sandbox(spec))
            return await self._run_tests(sandbox)

    async def _run_tests(self, sandbox: Sandbox, *, keeps_running: bool = False) -> VerifierResult:
        verifier = self.task.settings.verifier
        await sandbox.set_network(self._network("verifier"), phase="verifier")
        return await run_image_tests(
            sandbox,
            self.task.tests,
            env={**NONINTERACTIVE, **expand_defaults(verifier.env, "verifier.env")},
            user=verifier.user or self.image.config.user or "root",
            timeout=self._timeouts.verifier,
            keeps_running=keeps_running,
            grader=verifier.grader,
        )

    async def close(self) -> None:
        """End all that is left. Always runs to its end."""
        try:
            await self._opened.aclose()
        finally:
            await self._layers.aclose()

    # -- parts --------------------------------------------------------------------------------------

    @property
    def _timeouts(self) -> RolloutTimeouts:
        return self._options.timeouts or self.task.timeouts

    def _network(self, phase: Phase) -> NetworkPolicy:
        return self._options.network(self.task, phase)

    def _spec(self, *, user: str = "") -> SandboxSpec:
        environment, config = self.task.settings.environment, self.image.config
        workdir = PurePosixPath(environment.workdir) if environment.workdir else config.workdir
        image = replace(self.image, config=replace(config, workdir=workdir, user=user or config.user))
        env = expand_defaults(environment.env, "environment.env")
        return SandboxSpec(limits=self.task.sandbox, env=env, image=image)

    async def _new_layer(self, stack: AsyncExitStack) -> Path:
        """An empty folder that is removed when `stack` is closed."""
        store = default_store()
        making = asyncio.ensure_future(asyncio.to_thread(store.stage_layer))

        async def remove() -> None:
            await run_shielded(asyncio.to_thread(store.discard_layer, await making))

        stack.push_async_callback(remove)
        return await asyncio.shield(making)


def add_usage(earlier: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
    """Of two sandboxes that were used one after the other. What is unknown of one is unknown in all."""
    if not earlier:
        return dict(usage)
    seconds, other_seconds = earlier["cpu_seconds"], usage["cpu_seconds"]
    peak, other_peak = earlier["peak_memory_bytes"], usage["peak_memory_bytes"]
    return {
        "cpu_seconds": None if seconds is None or other_seconds is None else seconds + other_seconds,
        "peak_memory_bytes": None if peak is None or other_peak is None else max(peak, other_peak),
        "killed_for": usage["killed_for"],
    }
