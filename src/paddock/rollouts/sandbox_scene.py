"""The scene of agent programs: a sandbox with the task's files, the program, and a verifier in a sandbox of its own.

install → sandbox → setup → agent → verifier
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paddock.agents.base import Agent, AgentExit, AgentRun, Assignment, Installed
from paddock.capture.trace import Caller
from paddock.errors import AgentError, RolloutError, SandboxError, TaskError, VerifierError
from paddock.limits import LONGEST_PAUSE_SECONDS
from paddock.rollouts.judging import Ending, judge_model, judge_sandbox
from paddock.rollouts.recorder import LOG_BYTES
from paddock.rollouts.sandboxes import EMPTY, archive, seal, stage_task
from paddock.rollouts.scene import AGENT_STAGE, INSTALL_STAGE, ModelPort
from paddock.rollouts.verifier import VerifierResult, verify
from paddock.sandbox.base import SandboxSpec
from paddock.sandbox.network.policy import NO_NETWORK
from paddock.store.outcome import Outcome
from paddock.tasks.requirements import find_warnings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.capture.paused_time import AgentDeadline
    from paddock.capture.trace import Call
    from paddock.limits import RolloutTimeouts
    from paddock.rollouts.context import RunContext
    from paddock.rollouts.judging import ModelUse
    from paddock.rollouts.recorder import RolloutRecorder
    from paddock.rollouts.scene import ModelAccess
    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.network.policy import NetworkPolicy
    from paddock.tasks.settings import McpServer, Phase
    from paddock.tasks.steps import StepPlan
    from paddock.tasks.task import Task

MODEL_PORT = 7000
"""The port of the model inside every sandbox."""
KEPT_BYTES = 512 * 1024 * 1024
KEPT_TASK_BYTES = 32 * 1024 * 1024
"""Larger work folders, and larger files of a task, are not kept in the store."""
NO_IMAGE_MODE = "a task without an image has no other mode"
NOT_FOUND = (126, 127)
"""Exit codes of a shell, and of the guest, for a program that could not be run."""
ABORT_GRACE_SECONDS = 0.5
"""For an agent to write its last messages when a rollout is aborted."""
LAST_MESSAGES_SECONDS = 10.0
"""For an agent to end when its time is up."""
SPARE_SECONDS = 5.0
"""Added to the deadline of the stage. So the sandbox's own deadline expires first, with a more exact error."""


class SandboxScene:
    """The scene of an agent program in a sandbox without an image."""

    capture_deadline = False
    steps: Sequence[StepPlan] = ()
    is_repeatable = True

    def __init__(self, task: Task, context: RunContext, timeouts: RolloutTimeouts, recorder: RolloutRecorder) -> None:
        assert isinstance(context.agent, Agent)
        self.is_scored = task.is_scored
        self._task = task
        self._agent = context.agent
        self._config = context.config
        self._timeouts = timeouts
        self._recorder = recorder
        self._record = recorder.record
        self._open_sandbox = partial(
            context.open_sandbox,
            rollout_id=self._record.rollout_id,
            timeout=timeouts.sandbox,
            on_connection=recorder.record_connection,
        )
        self._stack = AsyncExitStack()
        self.agent_sandbox: Sandbox | None = None
        self._program: AgentRun | None = None
        self._exit = AgentExit(None)
        self._work = EMPTY
        """The sealed work folder."""

    async def open(self) -> None:
        recorder, timeouts = self._recorder, self._timeouts
        self._warn()
        installed = await self._install()
        setup_network, agent_network = self._network("setup"), self._network("agent")
        if not self._task.setup:
            setup_network = NO_NETWORK
        # A sandbox that gets a network later is opened with it: certificates can only be mounted then.
        first = setup_network if setup_network.mode != "no-network" else agent_network
        spec = SandboxSpec(limits=self._task.sandbox, mounts=installed.mounts, network=first, phase="setup")
        async with recorder.stage("sandbox", timeouts.sandbox + SPARE_SECONDS, SandboxError):
            sandbox = self.agent_sandbox = await self._stack.enter_async_context(self._open_sandbox(spec))
        self._record.sandbox_id = sandbox.id
        async with recorder.stage("setup", timeouts.setup, TaskError):
            await sandbox.set_network(setup_network, phase="setup")
            await stage_task(self._task, sandbox, timeout=timeouts.setup)
            if sum(map(len, self._task.files.values())) <= KEPT_TASK_BYTES:
                # What the agent started from, so that its changes can be shown later. Rollouts of a task share it.
                self._record.task_blob = await recorder.put_blob(archive(self._task))
            await sandbox.set_network(agent_network, phase="agent")

    def _warn(self) -> None:
        for warning in find_warnings(self._task):
            self._recorder.emit("warning", {"warning": f"task.toml has {warning}"})

    async def _install(self) -> Installed:
        seconds = self._timeouts.install
        async with self._recorder.stage(INSTALL_STAGE, seconds, AgentError):
            installed = await self._agent.install(self._recorder.log_install, timeout=seconds)
            self._record.install_log = installed.log
        return installed

    def _network(self, phase: Phase) -> NetworkPolicy:
        """What may be connected to in a phase. The run's setting is for the agent only."""
        chosen = self._config.agent_network if phase == "agent" else None
        return chosen or self._task.network.policy(phase, on_image=self._task.image is not None)

    async def begin_step(self, plan: StepPlan) -> None:
        raise AssertionError(f"this scene has no steps, and none is called {plan.name}")

    async def open_model_port(self) -> ModelPort:
        caller_finder = await self._opened.socket_owner_finder()
        # Nothing is awaited after this call: a cancellation would leave the listener open.
        listener, port = await self._opened.expose(MODEL_PORT)
        return ModelPort(
            listener,
            f"http://127.0.0.1:{port}/v1",
            caller_finder,
            f"the {self._config.sandbox} backend does not tell which process calls",
        )

    async def run_agent(self, access: ModelAccess, deadline: AgentDeadline) -> bool:
        assignment = Assignment(
            instruction=self._opened.localize(self._task.instruction),
            base_url=access.base_url,
            api_key=access.api_key,
            max_tokens=self._config.budget.max_tokens_per_call,
            context_tokens=self._config.context_tokens,
            mcp_servers=tuple(map(self._localize, self._task.settings.environment.mcp_servers)),
            skills_dir=self._opened.localize(self._task.settings.environment.skills_dir),
        )
        async with self._recorder.stage(AGENT_STAGE, None, AgentError):
            try:
                async with deadline.limit():
                    report = self._recorder.emit_agent_event
                    self._program = await self._agent.start(self._opened, assignment, report)
            except TimeoutError:
                self._exit = AgentExit(None, timed_out=True)
                return True
            self._record.agent_session = self._program.session
            self._exit = await wait_for_agent(self._program, deadline)
        return self._exit.timed_out

    def _localize(self, server: McpServer) -> McpServer:
        localize = self._opened.localize
        return replace(server, command=localize(server.command), args=tuple(map(localize, server.args)))

    async def stop_agent(self, exhausted: str | None) -> None:
        await self._read_agent()
        await self._opened.kill()
        self._record.usage = self._opened.usage()

    async def _read_agent(self) -> None:
        """Record what the program says about its run."""
        record, mask = self._record, self._recorder.mask
        record.exit_code = self._exit.exit_code
        if self._program is not None:
            record.agent_session = self._program.session
            record.agent_log = mask.text(self._program.log_tail(LOG_BYTES))
            with suppress(RolloutError):
                record.transcript = mask.value(await self._program.messages())

    async def seal(self) -> None:
        """The work folder as it was when the last process of the agent had ended. Then the sandbox is closed."""
        self._work, problem = await seal(self._opened, self._task.sandbox)
        if problem is None:
            with suppress(SandboxError, OSError):
                entries = await self._opened.list(self._opened.workdir)
                files = sorted(entry.path for entry in entries if entry.kind != "folder")
                self._record.workdir_files = self._recorder.mask.value(files)
        if problem is None and len(self._work) > KEPT_BYTES:
            problem = f"the sealed work folder of {len(self._work)} bytes is too large to be kept"
        else:
            self._record.workdir_blob = await self._recorder.put_blob(self._work)
        if problem is not None:
            self._recorder.emit("warning", {"warning": problem})
        await self._stack.aclose()

    def judge(self, use: ModelUse, calls: Sequence[Call]) -> Ending:
        """Exit codes do not decide, unless the program could not be started."""
        return (
            judge_sandbox(self._exit.exit_code, self._record.usage.get("killed_for"))
            or judge_model(use)
            or self._judge_start(calls)
            or Ending(Outcome.OK, use.blame.error)
        )

    def _judge_start(self, calls: Sequence[Call]) -> Ending | None:
        """The ending of an agent that must make model calls, or could not be started, and made no good one."""
        if any(call.ok and call.caller is not Caller.FOREIGN for call in calls):
            return None
        code = self._exit.exit_code
        if not self._agent.requires_model_call and code not in NOT_FOUND:
            return None
        message = self._exit.error or self._record.agent_log.strip()[-500:]
        return Ending(Outcome.AGENT, f"the agent made no model call (exit code {code}): {message}")

    async def verify(self) -> VerifierResult:
        seconds = self._timeouts.verifier + self._timeouts.sandbox
        self._record.verifier = {"mode": "sealed", "reason": NO_IMAGE_MODE}
        async with self._recorder.stage("verifier", seconds, VerifierError):
            return await verify(
                self._task.tests,
                self._work,
                open_sandbox=self._open_sandbox,
                limits=self._task.sandbox,
                timeout=self._timeouts.verifier,
                network=self._network("verifier"),
            )

    async def close(self) -> None:
        await self._stack.aclose()

    async def abort(self) -> None:
        if self._program is not None:
            with suppress(TimeoutError, RolloutError):
                await asyncio.wait_for(self._program.abort(), ABORT_GRACE_SECONDS)

    async def messages(self) -> list[dict[str, Any]]:
        return self._record.transcript if self._program is None else await self._program.messages()

    @property
    def _opened(self) -> Sandbox:
        assert self.agent_sandbox is not None, "open comes first"
        return self.agent_sandbox


async def wait_for_agent(program: AgentRun, deadline: AgentDeadline) -> AgentExit:
    """How the program ended. When its time is up, it is asked to stop. A driver counts its timeout without pauses, so
    it gets one that comes later."""
    ending = asyncio.ensure_future(program.wait(deadline.seconds_left + LONGEST_PAUSE_SECONDS))
    expiring = asyncio.ensure_future(deadline.wait())
    try:
        await asyncio.wait((ending, expiring), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return ending.result()
        with suppress(TimeoutError, RolloutError):
            async with asyncio.timeout(LAST_MESSAGES_SECONDS):
                await program.abort()
                return replace(await asyncio.shield(ending), exit_code=None, timed_out=True)
        return AgentExit(None, timed_out=True)
    finally:
        ending.cancel()
        expiring.cancel()
        await asyncio.gather(ending, expiring, return_exceptions=True)
