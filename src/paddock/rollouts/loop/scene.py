"""The scene of the tool-calling loop: a session with tools, and the loop in this process.

    provision → tools → agent → verifier

The stage `provision` has the timeout `install`, and the stage `tools` has the timeout `setup`.
"""

from __future__ import annotations

import json
import socket
from functools import partial
from typing import TYPE_CHECKING, Any

from paddock.errors import ModelError, RolloutError, VerifierError
from paddock.rollouts.judging import CONTEXT, Ending, judge_model
from paddock.rollouts.loop.agent import LoopAgent, LoopEnd, ToolLoop
from paddock.rollouts.loop.chat import ChatClient
from paddock.rollouts.sandboxes import pack_files
from paddock.rollouts.scene import AGENT_STAGE, ModelPort
from paddock.rollouts.verifier import VerifierResult, verify
from paddock.store.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.capture.paused_time import AgentDeadline
    from paddock.capture.trace import Call
    from paddock.limits import RolloutTimeouts
    from paddock.rollouts.context import RunContext
    from paddock.rollouts.judging import ModelUse
    from paddock.rollouts.loop.session import Tools, ToolSessions
    from paddock.rollouts.recorder import RolloutRecorder
    from paddock.rollouts.scene import ModelAccess
    from paddock.sandbox.base import Sandbox
    from paddock.tasks.steps import StepPlan
    from paddock.tasks.task import Task

USED_UP = {"steps": "all steps were used up", "context": CONTEXT}


class LoopScene:
    """The scene of our own loop: it works in a tool session."""

    capture_deadline = True
    agent_sandbox: Sandbox | None = None
    steps: Sequence[StepPlan] = ()

    def __init__(
        self,
        task: Task,
        context: RunContext,
        sessions: ToolSessions,
        timeouts: RolloutTimeouts,
        recorder: RolloutRecorder,
    ) -> None:
        assert isinstance(context.agent, LoopAgent)
        self._use_task_tests = task.is_scored and sessions.use_task_tests
        self._session = sessions.make(task)
        self.is_scored = self._use_task_tests or self._session.is_scored
        self._task = task
        self._context = context
        self._agent = context.agent
        self._timeouts = timeouts
        self._recorder = recorder
        self._record = recorder.record
        self._tools: Tools | None = None
        self._schemas: list[dict[str, Any]] = []
        """The tools as the model is offered them."""
        self._loop: ToolLoop | None = None
        self._end: LoopEnd | ModelError = LoopEnd("answer")
        """How the loop ended by itself, or how the model failed it."""

    @property
    def is_repeatable(self) -> bool:
        return self._session.is_repeatable

    async def open(self) -> None:
        recorder = self._recorder
        async with recorder.stage("provision", self._timeouts.install, RolloutError):
            await self._session.open()
        self._keep_evidence()
        async with recorder.stage("tools", self._timeouts.setup, RolloutError):
            self._tools = await self._session.tools()
            self._schemas = await self._tools.list_tools()
        recorder.emit("tools", {"tools": [tool["function"]["name"] for tool in self._schemas]})

    async def begin_step(self, plan: StepPlan) -> None:
        raise AssertionError(f"this scene has no steps, and none is called {plan.name}")

    async def open_model_port(self) -> ModelPort:
        listener = socket.create_server(("127.0.0.1", 0))
        return ModelPort(listener, f"http://127.0.0.1:{listener.getsockname()[1]}/v1")

    async def run_agent(self, access: ModelAccess, deadline: AgentDeadline) -> bool:
        assert self._tools is not None, "open comes first"
        chat = ChatClient(access.base_url, access.api_key)
        async with self._recorder.stage(AGENT_STAGE, None, RolloutError), chat:
            loop = self._loop = ToolLoop(
                chat,
                self._tools,
                self._agent.limits,
                max_tokens=self._context.config.budget.max_tokens_per_call,
                system=self._agent.system,
                report=self._recorder.emit_agent_event,
            )
            try:
                self._end = await loop.run(self._schemas, deadline=deadline)
            except ModelError as error:
                self._end = error
        return isinstance(self._end, LoopEnd) and self._end.reason == "time"

    async def stop_agent(self, exhausted: str | None) -> None:
        if self._loop is None:
            return
        messages = self._loop.messages
        if exhausted and messages and messages[-1]["role"] == "assistant":
            # The capture wrote this answer, not the model.
            messages.pop()
        self._record.transcript = self._recorder.mask.value(messages)
        self._record.usage = {**self._record.usage, "steps": self._loop.steps}

    async def seal(self) -> None:
        """The work is what the session holds: nobody but the loop acts on it."""

    def judge(self, use: ModelUse, calls: Sequence[Call]) -> Ending:
        return judge_model(use) or judge_end(self._end, use.blame.error)

    async def verify(self) -> VerifierResult:
        async with self._recorder.stage("verifier", self._timeouts.verifier, VerifierError):
            if self._use_task_tests:
                return await self._run_tests()
            return VerifierResult(await self._session.score(self._record.transcript))

    async def _run_tests(self) -> VerifierResult:
        """Score the work with the task's tests, in a sandbox of their own. Its work folder holds `transcript.json`,
        the whole conversation, and `evidence.json`, the session's evidence: rewards, seed, state."""
        documents = {"transcript.json": self._record.transcript, "evidence.json": self._session.evidence}
        files = {name: json.dumps(document, default=str).encode() for name, document in documents.items()}
        open_sandbox = partial(
            self._context.open_sandbox,
            rollout_id=self._record.rollout_id,
            timeout=self._timeouts.sandbox,
            on_connection=self._recorder.record_connection,
        )
        try:
            verdict = await verify(
                self._task.tests,
                pack_files(files),
                open_sandbox=open_sandbox,
                limits=self._task.sandbox,
                timeout=self._task.timeouts.verifier,
                network=self._task.network.policy("verifier", on_image=False),
            )
        except RolloutError as error:
            raise VerifierError(error.message, hint=error.hint) from error
        return VerifierResult(verdict.reward, stdout=f"{verdict.stdout}{verdict.stderr}")

    async def close(self) -> None:
        self._keep_evidence()
        if self._session.verifier_log:
            self._record.verifier_stdout = self._recorder.mask.text(self._session.verifier_log)
        await self._session.close()

    async def abort(self) -> None:
        """The loop ends with its rollout's task."""

    async def messages(self) -> list[dict[str, Any]]:
        return self._record.transcript if self._loop is None else list(self._loop.messages)

    def _keep_evidence(self) -> None:
        self._record.metadata.update(self._recorder.mask.value(self._session.evidence))


def judge_end(end: LoopEnd | ModelError, refusal: str | None) -> Ending:
    """The ending of a loop that neither the endpoint nor a budget ended; `refusal` is what the endpoint refused."""
    if isinstance(end, ModelError):
        return Ending(Outcome.AGENT, refusal or f"the endpoint refused a request: {end.message}")
    if end.reason in USED_UP:
        return Ending(Outcome.BUDGET, USED_UP[end.reason])
    return Ending(Outcome.OK)
