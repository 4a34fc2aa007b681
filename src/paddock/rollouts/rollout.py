"""One rollout: a task, an agent and a model in a sandbox, from its start to exactly one outcome.

    install → sandbox → setup → agent → verifier → done

Each stage has a deadline of its own. Whatever happens in a stage, the end is the same: sandboxes are
closed, every call is in the store, and one outcome is written.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from paddock.errors import (
    AgentError,
    ConnectFailed,
    ModelError,
    PaddockError,
    RolloutError,
    SandboxError,
    TaskError,
    VerifierError,
)
from paddock.rollouts.agents.base import AgentExit, AgentRun, Assignment
from paddock.rollouts.blame import AgentTime, StallLimits, judge_calls
from paddock.rollouts.capture import Capture
from paddock.rollouts.event_writer import EventWriter
from paddock.rollouts.judging import Ending, ModelUse, judge_model, judge_sandbox, judge_stop
from paddock.rollouts.ledger import owned_sandbox
from paddock.rollouts.limits import WHOLE_ANSWER_FACTOR, stall_seconds
from paddock.rollouts.masking import Mask
from paddock.rollouts.outcome import Outcome, Reward
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.sandbox.base import SandboxSpec
from paddock.rollouts.staging import archive, seal, stage
from paddock.rollouts.task_needs import check_can_run
from paddock.rollouts.trace import Call, Caller, Level, Role
from paddock.rollouts.unhurried import unhurried
from paddock.rollouts.verifier import Verdict, verify

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from paddock.rollouts.capture import Upstream
    from paddock.rollouts.plan import Plan
    from paddock.rollouts.sandbox.base import Sandbox
    from paddock.rollouts.sandbox.callers import CallerFinder
    from paddock.rollouts.store import Store
    from paddock.rollouts.task import Task

logger = logging.getLogger("paddock.rollout")

PORT = 7000
"""Where the model is, inside every sandbox."""
LOG_BYTES = 16 * 1024
MOST_TOLD = 20_000
"""So many events of an agent are kept."""
KEPT_BYTES = 512 * 1024 * 1024
KEPT_TASK_BYTES = 32 * 1024 * 1024
"""Larger work folders, and larger files of a task, are not kept in the store."""
NOT_FOUND = (126, 127)
"""How a shell, and our supervisor, say that a program could not be run."""
ABORT_GRACE = 0.5
"""Seconds an agent is given to say its last words when a rollout is aborted."""
BLAME: dict[type[RolloutError], Outcome] = {
    TaskError: Outcome.TASK,
    AgentError: Outcome.AGENT,
    ModelError: Outcome.MODEL,
    SandboxError: Outcome.SANDBOX,
    VerifierError: Outcome.VERIFIER,
}
WORKING = "agent"
"""The stage of a rollout that has all it needs."""
INSTALLING = "install"
"""All rollouts of a batch have the same agent: where it cannot be installed, none of them can work."""
ENTERING = ("sandbox", "provision")
"""Stages in which a rollout gets the place that it works in."""
LEVELS = (Level.TEXT, Level.LOGPROBS, Level.TOKENS)


class Rollout:
    """One rollout. Call `run` once; `record` tells where it stands, and `on_change` is called when it moves."""

    def __init__(
        self,
        task: Task,
        plan: Plan,
        *,
        store: Store,
        upstream: Upstream,
        record: RolloutRecord | None = None,
        on_change: Callable[[Rollout], None] | None = None,
    ) -> None:
        self.task = task
        self.plan = plan
        self.record = record or RolloutRecord(rollout_id=new_rollout_id(), task_id=task.id)
        self._timeouts = plan.timeouts or task.timeouts
        self._store = store
        self._upstream = upstream
        self._on_change = on_change
        self._mask = Mask.of_endpoint(plan.endpoint, plan.secrets)
        self._capture: Capture | None = None
        self._agent: AgentRun | None = None
        self._worker: asyncio.Task[Any] | None = None
        self._aborted: str | None = None
        self.kept_out = False
        """Whether it ended because what it was to work in could not be reached."""
        self._agent_began = 0.0
        """When the agent began to work, on the clock of `time.monotonic`."""
        self._told = 0
        self._events = EventWriter(store, self.record)

    @property
    def id(self) -> str:
        return self.record.rollout_id

    async def run(self) -> RolloutRecord:
        """Everything, to the one outcome. Raises only if the caller cancels it, or if the store cannot begin."""
        worker = self._worker = asyncio.current_task()
        self._describe()
        try:
            await self._store.run(self._store.begin, self.record)
            self._check_task()
            async with self._store.aborts.heeded(self.id, self.abort):
                await self._stages()
        except asyncio.CancelledError:
            self._end(Outcome.CANCELLED, self._aborted or "cancelled")
            if self._aborted is None:
                raise
            if worker is not None:
                worker.uncancel()
        except PaddockError as error:
            entering = self.record.stage in ENTERING and keeps_all_out(error)
            self.kept_out = entering or self.record.stage == INSTALLING
            blamed = (outcome for kind, outcome in BLAME.items() if isinstance(error, kind))
            hint = f" ({error.hint})" if error.hint else ""
            self._end(next(blamed, Outcome.ENVIRONMENT), f"{error}{hint}")
        except Exception as error:
            logger.exception("rollout %s broke", self.id)
            self._end(Outcome.ENVIRONMENT, f"{type(error).__name__}: {error}")
        finally:
            self._worker = None  # from here on there is nothing left to abort
            await unhurried(self._finish())
        return self.record

    async def end_like(self, other: RolloutRecord) -> RolloutRecord:
        """Instead of `run`: record the outcome of `other`, which would be this one's too. Raises StoreError."""
        assert other.outcome is not None
        self._describe()
        await self._store.run(self._store.begin, self.record)
        self._end(other.outcome, other.error)
        await unhurried(self._finish())
        return self.record

    async def abort(self, reason: str = "aborted") -> None:
        """Stop it: the model's answer is cut off at once, and `run` returns with outcome `cancelled`."""
        if self._worker is None or self._aborted is not None:
            return
        self._aborted = reason
        if self._capture is not None:
            await self._capture.stop()
        if self._agent is not None:
            with suppress(TimeoutError, RolloutError):
                await asyncio.wait_for(self._agent.abort(), ABORT_GRACE)
        if self._worker is not None:
            self._worker.cancel()

    async def messages(self) -> list[dict[str, Any]]:
        """The agent's own transcript, as far as it has got."""
        if self._agent is not None and not self.record.finished:
            return await self._agent.messages()
        return self.record.transcript

    @property
    def calls(self) -> list[Call]:
        return [] if self._capture is None else self._capture.calls

    # -- the stages ---------------------------------------------------------------------------------

    def _check_task(self) -> None:
        """Raises TaskError for a task that would be run, or scored, without what it needs."""
        check_can_run(self.task, self.plan.sandbox)

    async def _stages(self) -> None:
        async with self._stage(INSTALLING, self._timeouts.install, AgentError):
            installed = await self.plan.agent.install(self._say_install, timeout=self._timeouts.install)
            self.record.install_log = installed.log
        spec = SandboxSpec(limits=self.task.sandbox, mounts=installed.mounts)
        async with self._agent_sandbox(spec) as sandbox:
            async with self._stage("setup", self._timeouts.setup, TaskError):
                await stage(self.task, sandbox, timeout=self._timeouts.setup)
                await self._keep_task()
            ended = await self._run_agent(sandbox)
            sealed = await self._seal(sandbox)
        outcome, error = self._judge(ended, self.record.usage.get("killed_for"))
        if not outcome.keeps_reward:
            self._end(outcome, error)
            return
        async with self._stage("verifier", self._timeouts.verifier + self._timeouts.sandbox, VerifierError):
            verdict = await self._verify(sealed)
        self._score(verdict)
        if verdict.reward.value is None and outcome is Outcome.OK and self.task.is_scored:
            outcome, error = Outcome.VERIFIER, self.record.reward_reason
        self._end(outcome, error)

    async def _keep_task(self) -> None:
        """What the agent found, so that what it changed can be told later. Rollouts of a task share it."""
        if sum(map(len, self.task.files.values())) <= KEPT_TASK_BYTES:
            self.record.task_blob = await self._store.run(self._store.put_blob, archive(self.task))

    @asynccontextmanager
    async def _agent_sandbox(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        """The sandbox of the agent; its stage is only the time until it is there."""
        opened = self._sandbox(spec)
        async with self._stage("sandbox", self._timeouts.sandbox + 5, SandboxError):
            sandbox = await opened.__aenter__()
        self.record.sandbox_id = sandbox.id
        try:
            yield sandbox
        finally:
            await opened.__aexit__(None, None, None)

    def _sandbox(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        return owned_sandbox(
            self._store,
            self.plan.sandbox,
            spec,
            rollout_id=self.id,
            consent=self.plan.consent,
            timeout=self._timeouts.sandbox,
        )

    def _make_capture(self, *, deadline: float | None = None, callers: CallerFinder | None = None) -> Capture:
        """What stands between the agent and the model; from here on its key is masked too."""
        plan = self.plan
        settings = plan.capture_settings(call_timeout=self._timeouts.model_call, deadline=deadline)
        self._capture = capture = Capture(
            plan.endpoint,
            self._upstream,
            settings,
            on_call=self._keep_call,
            classify=plan.agent.classify,
            secrets=plan.secrets,
            callers=callers,
            callers_unknown=f"the {plan.sandbox} backend does not tell which process calls",
        )
        self._mask = Mask.of_endpoint(plan.endpoint, (capture.secret, *plan.secrets))
        return capture

    async def _run_agent(self, sandbox: Sandbox) -> AgentExit:
        capture = self._make_capture(callers=await sandbox.caller_finder())
        listener, port = await sandbox.expose(PORT)
        assignment = Assignment(
            instruction=sandbox.localize(self.task.instruction),
            base_url=f"http://127.0.0.1:{port}/v1",
            api_key=capture.secret,
            max_tokens=self.plan.budget.max_tokens_per_call,
            context_tokens=self.plan.context_tokens,
        )
        with listener:
            try:
                await capture.serve(listener)
                async with self._stage(WORKING, None, AgentError):
                    return await self._follow_agent(sandbox, assignment)
            finally:
                await unhurried(self._stop_agent(capture, sandbox))

    async def _follow_agent(self, sandbox: Sandbox, assignment: Assignment) -> AgentExit:
        limit = self._agent_seconds
        self._agent_began = time.monotonic()
        deadline = self._agent_began + limit
        try:
            async with asyncio.timeout(limit):
                self._agent = await self.plan.agent.begin(sandbox, assignment, self._report)
        except TimeoutError:
            return AgentExit(None, timed_out=True)
        self.record.agent_session = self._agent.session
        return await self._agent.wait(max(0.1, deadline - time.monotonic()))

    async def _stop_agent(self, capture: Capture, sandbox: Sandbox) -> None:
        """Nothing is generated and nothing runs in the sandbox after this; its last words are kept."""
        await capture.stop()
        if self._agent is not None:
            self.record.agent_session = self._agent.session
            self.record.agent_log = self._mask.text(self._agent.log_tail(LOG_BYTES))
            with suppress(RolloutError):
                self.record.transcript = self._mask.value(await self._agent.messages())
        await sandbox.kill()
        self.record.usage = sandbox.usage()
        self.record.proxy_log = capture.log_tail(LOG_BYTES)

    async def _seal(self, sandbox: Sandbox) -> bytes:
        """The work folder as it was when the last process of the agent had ended."""
        sealed, problem = await seal(sandbox, self.task.sandbox)
        if problem is None:
            with suppress(SandboxError, OSError):
                entries = await sandbox.list(sandbox.workdir)
                files = sorted(entry.path for entry in entries if entry.kind != "folder")
                self.record.workdir_files = self._mask.value(files)
        if problem is None and len(sealed) > KEPT_BYTES:
            problem = f"the sealed work folder of {len(sealed)} bytes is too large to be kept"
        else:
            self.record.workdir_blob = await self._store.run(self._store.put_blob, sealed)
        if problem is not None:
            self._changed("warning", {"warning": problem})
        return sealed

    def _judge(self, ended: AgentExit, killed_for: str | None) -> Ending:
        self.record.exit_code = ended.exit_code
        use = self._model_use(timed_out=ended.timed_out)
        return (
            judge_stop(use, aborted=self._aborted, timed_out=ended.timed_out)
            or judge_sandbox(ended.exit_code, killed_for)
            or judge_model(use)
            or self._judge_start(ended)
            or Ending(Outcome.OK, use.blame.error)
        )

    def _judge_start(self, ended: AgentExit) -> Ending | None:
        """The ending of an agent that must make model calls, or could not be started, and made no good one."""
        if any(call.ok and call.caller is not Caller.FOREIGN for call in self.calls):
            return None
        if not self.plan.agent.must_call and ended.exit_code not in NOT_FOUND:
            return None
        message = ended.error or self.record.agent_log.strip()[-500:]
        return Ending(Outcome.AGENT, f"the agent made no model call (exit code {ended.exit_code}): {message}")

    @property
    def _agent_seconds(self) -> float:
        return self.plan.agent_timeout or self._timeouts.agent

    def _model_use(self, *, timed_out: bool) -> ModelUse:
        """A call that was in flight when the time was up has ended by now."""
        capture = self._capture
        assert capture is not None
        ended = self._agent_began + (self._agent_seconds if timed_out else self.record.stages[WORKING])
        streamed = stall_seconds(self.plan.stall_timeout, self._agent_seconds)
        limits = StallLimits(streamed, streamed * WHOLE_ANSWER_FACTOR)
        blame = judge_calls(capture.summaries(), AgentTime(self._agent_began, ended, timed_out), limits)
        return ModelUse(blame, exhausted=capture.exhausted, lost=capture.lost)

    async def _verify(self, sealed: bytes) -> Verdict:
        return await verify(
            self.task.tests,
            sealed,
            open_sandbox=self._sandbox,
            limits=self.task.sandbox,
            timeout=self._timeouts.verifier,
        )

    def _score(self, verdict: Verdict) -> None:
        record = self.record
        self._take_reward(verdict.reward)
        record.test_exit_code = verdict.exit_code
        record.verifier_stdout = self._mask.text(verdict.stdout)
        record.verifier_stderr = self._mask.text(verdict.stderr)

    def _take_reward(self, reward: Reward) -> None:
        record = self.record
        record.reward, record.reward_parts = reward.value, self._mask.value(reward.parts)
        record.reward_reason = None if reward.reason is None else self._mask.text(reward.reason)

    # -- keeping track ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _stage(self, name: str, seconds: float | None, blame: type[RolloutError]) -> AsyncIterator[None]:
        began = time.monotonic()
        self.record.stage = name
        self._changed("stage", {"stage": name})
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            limit = "in time" if seconds is None else f"within {seconds:g} s"
            raise blame(f"{name} did not finish {limit}") from error
        finally:
            self.record.stages[name] = time.monotonic() - began

    def _describe(self) -> None:
        record, plan = self.record, self.plan
        record.task_hash, record.instruction = self.task.hash, self.task.instruction
        record.agent, record.driver = plan.agent.name, getattr(plan.agent, "driver", "run")
        record.model, record.mode, record.sandbox = plan.endpoint.shown, plan.mode, plan.sandbox
        record.config = {**plan.describe(), **record.config}
        record.metadata = {**self.task.metadata, **record.metadata}
        record.started_at = time.time()

    async def _keep_call(self, call: Call) -> None:
        self._count_calls()
        await self._store.run(self._store.save_call, self.id, call)
        self._changed("call", {"call": call.id, "role": call.role, "error": call.error})

    def _count_calls(self) -> None:
        calls = [call for call in self.calls if call.ended is not None]
        policy = [call for call in calls if call.caller is not Caller.FOREIGN]
        sampled = [call for call in policy if call.role in (Role.AGENT, Role.SUBAGENT) and call.ok]
        record = self.record
        record.calls = len(calls)
        record.trainable_calls = sum(call.trainable for call in calls)
        record.prompt_tokens = sum(len(call.prompt_token_ids) for call in calls)
        record.completion_tokens = sum(len(call.completion_token_ids) for call in calls)
        record.level = min((call.level for call in sampled), key=LEVELS.index, default=Level.TEXT)

    def _end(self, outcome: Outcome, error: str | None) -> None:
        record = self.record
        record.outcome = outcome
        record.error = None if error is None else self._mask.text(error)
        if not outcome.keeps_reward and record.reward is None and record.reward_reason is None:
            record.reward_reason = Reward.unknown(f"not verified: outcome {outcome}").reason

    async def _finish(self) -> None:
        self._count_calls()
        self.record.stage = "done"
        self.record.finished_at = self.record.finished_at or time.time()
        await self._events.wait_written()
        await self._store.run(self._store.finish, self.record)
        self._store.aborts.settle(self.id)
        self._changed("outcome", {"outcome": self.record.outcome, "reward": self.record.reward})
        # That event is written after the record is final.
        await self._events.wait_written()

    def _say_install(self, line: str) -> None:
        """Called from the thread that installs, which goes on even if the rollout has ended meanwhile."""
        logger.info("%s", line)
        worker = self._worker
        if worker is not None:
            with suppress(RuntimeError):  # its loop is closed: nobody is left to be told
                worker.get_loop().call_soon_threadsafe(self._told_install, line)

    def _told_install(self, line: str) -> None:
        if self._worker is not None:
            self._changed("install", {"line": line})

    def _report(self, kind: str, data: dict[str, Any]) -> None:
        """What the agent tells. It may tell without end: the rest is dropped, and said to be."""
        self._told += 1
        if self._told < MOST_TOLD:
            short = {key: text[:LOG_BYTES] if isinstance(text, str) else text for key, text in data.items()}
            self._changed(kind, self._mask.value(short))
        elif self._told == MOST_TOLD:
            self._changed("warning", {"warning": f"the agent told more than {MOST_TOLD} events; the rest is dropped"})

    def _changed(self, kind: str, data: dict[str, Any]) -> None:
        """Write an event, and call the one who watches."""
        self._events.write(kind, data)
        if self._on_change is not None:
            self._on_change(self)


def keeps_all_out(error: PaddockError) -> bool:
    """Whether every rollout would meet it: nothing answers there. One failure, or a full place, does not count."""
    return isinstance(error, ConnectFailed) or bool(error.data.get("keeps_all_out"))


def new_rollout_id() -> str:
    """Sorts by time, and is unique across machines."""
    return f"r{int(time.time()):08x}{secrets.token_hex(6)}"
