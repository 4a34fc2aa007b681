"""One rollout: a task, an agent and a model in a scene, from its start to exactly one outcome.

    open the scene → capture → agent → seal → judge → verify → record

The stages from capture to verify are one turn of the agent. A task with steps has a turn for each of them (`steps`).
The scene is a sandbox with an agent program, or a session with tools and our loop (see `scene`). Each stage has a
deadline of its own. Whatever happens in a stage, the end is the same: the scene is closed, every call is in the
store, and one outcome is written. `recorder` writes the record and the events; `judging` decides who is to
blame.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from paddock.capture.paused_time import AgentDeadline, PausedTime
from paddock.capture.proxy import Capture
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
from paddock.limits import WHOLE_ANSWER_FACTOR, stall_seconds
from paddock.rollouts.folder_fidelity import compare_later, compare_with_source
from paddock.rollouts.fork import make_replay, read_calls, write_task
from paddock.rollouts.judging import AgentTime, Ending, ModelUse, StallLimits, judge_calls, judge_stop
from paddock.rollouts.recorder import LOG_BYTES, RolloutRecorder
from paddock.rollouts.scene import AGENT_STAGE, INSTALL_STAGE, OPENING_STAGES, PAUSED_STAGE, ModelAccess
from paddock.rollouts.snapshots import WorkFolderSnapshots
from paddock.rollouts.step_log import StepLog
from paddock.rollouts.steps import total_reward, whole_ending
from paddock.shielded import run_shielded
from paddock.store.outcome import Outcome, Reward
from paddock.store.record import RolloutRecord
from paddock.tasks.steps import join_instructions

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.recorded.replay import Replay
    from paddock.capture.trace import Call
    from paddock.rollouts.context import RunContext
    from paddock.rollouts.fork import ForkPoint, RecordedCalls
    from paddock.rollouts.scene import RemoteRun, Scene
    from paddock.tasks.task import Task

logger = logging.getLogger("paddock.rollout")

OUTCOMES_BY_ERROR: dict[type[RolloutError], Outcome] = {
    TaskError: Outcome.TASK,
    AgentError: Outcome.AGENT,
    ModelError: Outcome.MODEL,
    SandboxError: Outcome.SANDBOX,
    VerifierError: Outcome.VERIFIER,
}


class Rollout:
    """One rollout. Call `run` once. `record` has its current state, and `on_change` is called when that changes."""

    def __init__(
        self,
        task: Task,
        context: RunContext,
        *,
        record: RolloutRecord | None = None,
        on_change: Callable[[Rollout], None] | None = None,
        remote: RemoteRun | None = None,
        fork: ForkPoint | None = None,
        recorded: RecordedCalls | None = None,
    ) -> None:
        """`fork` names the recorded rollout to replay, in place of the config's. `recorded` are its calls if they are
        not in the store. `remote` runs the stages on another machine; this object is then its record and its
        handle."""
        self.task = task
        self.context = context
        self.record = record or RolloutRecord(rollout_id=new_rollout_id(), task_id=task.id)
        self.abort_reason: str | None = None
        """Why `abort` was called; None if it was not."""
        self.cancel_reason = "cancelled"
        """What is recorded when the caller cancels it. A remote run replaces it, for example if the cluster fails."""
        self.is_dependency_down = False
        """Whether it ended because a dependency of the whole batch could not be reached (see `circuit_breaker`)."""
        self.recorder = RolloutRecorder(context.store, self.record, context.mask(), self.notify)
        self._on_change = on_change
        self._remote = remote
        self._timeouts = context.config.timeouts or task.timeouts
        self._agent_seconds = context.config.agent_timeout or self._timeouts.agent
        self._agent_began = 0.0
        """When the agent began to work, on the clock of `time.monotonic`."""
        self._agent_ended = 0.0
        self._scene: Scene | None = None
        self._capture: Capture | None = None
        self.fork = fork or context.config.fork
        self._recorded = recorded
        self._replay: Replay | None = None
        self._paused = PausedTime(self._report_pause)
        self._snapshots: WorkFolderSnapshots | None = None
        self._run_task: asyncio.Task[Any] | None = None
        """The asyncio task that runs `run`; None before it begins and while the outcome is written."""

    @property
    def id(self) -> str:
        """The rollout's id."""
        return self.record.rollout_id

    @property
    def calls(self) -> list[Call]:
        """All model calls so far, in the order they began."""
        return [] if self._capture is None else self._capture.calls

    # -- the stages, and one outcome ----------------------------------------------------------------

    async def run(self) -> RolloutRecord:
        """Run all stages and return the record with its outcome.

        Raises CancelledError if the caller cancels it, and StoreError if the record cannot be created."""
        run_task = self._run_task = asyncio.current_task()
        self._describe()
        try:
            await self._keep_task()
            await self.recorder.begin()
            async with self.context.store.aborts.watch(self.id, self.abort):
                ending = await (self._run_stages() if self._remote is None else self._remote.run(self))
            self.recorder.end(*ending)
        except asyncio.CancelledError:
            self.recorder.end(Outcome.CANCELLED, self.abort_reason or self.cancel_reason)
            if self.abort_reason is None:
                raise
            if run_task is not None:
                run_task.uncancel()
        except PaddockError as error:
            self._record_failure(error)
        except Exception as error:
            logger.exception("rollout %s broke", self.id)
            self.recorder.end(Outcome.ENVIRONMENT, f"{type(error).__name__}: {error}")
        finally:
            self._run_task = None  # `abort` has no effect while the outcome is written
            await run_shielded(self._finish())
        return self.record

    async def _keep_task(self) -> None:
        """Keep the whole task with the record, so that it can be run again from there. One with a secret is not."""
        data = write_task(self.task)
        if data is not None and not self.recorder.mask.is_in(data):
            self.record.task_json_blob = await self.recorder.put_blob(data)

    async def _run_stages(self) -> Ending:
        scene = self._scene = self.context.make_scene(self.task, self._timeouts, self.recorder)
        try:
            await scene.open()
            if scene.steps:
                return await self._run_steps(scene)
            ending, reward = await self._run_turn(scene)
            if reward is not None:
                self.recorder.take_reward(reward)
            return ending
        finally:
            await run_shielded(scene.close())

    async def _run_steps(self, scene: Scene) -> Ending:
        """Run the steps of the task until the last one, or until one of them ends the rollout."""
        log = StepLog(self.recorder, [plan.name for plan in scene.steps])
        for plan in scene.steps:
            self._timeouts = self.context.config.timeouts or plan.task.timeouts
            self._agent_seconds = self.context.config.agent_timeout or self._timeouts.agent
            with log.record_step(plan) as result:
                await scene.begin_step(plan)
                ending, reward = await self._run_turn(scene, plan.name)
                result.calls = len(self._opened_capture.step_calls)
                result.end(ending, reward or Reward.unknown(f"not verified: outcome {ending.outcome}"))
            if not log.goes_on(plan, is_scored=scene.is_scored):
                break
        self.recorder.take_reward(total_reward(log.results, self.task.settings.reward_strategy))
        return whole_ending(log.results)

    async def _run_turn(self, scene: Scene, step: str = "") -> tuple[Ending, Reward | None]:
        """Let the agent work once, and score it. The reward is None where the ending keeps none."""
        timed_out = await self._run_agent(scene, step)
        await scene.seal()
        ending = self._judge(scene, timed_out=timed_out)
        return await self._verify(scene, ending) if ending.outcome.keeps_reward else (ending, None)

    async def _run_agent(self, scene: Scene, step: str) -> bool:
        """Run the agent, with the capture proxy between it and the model. True if its time was up."""
        replay = self._replay
        if self.fork is not None and replay is None:
            replay = self._replay = await self._load_replay(self.fork, scene)
        port = await scene.open_model_port()
        self._agent_began = time.monotonic()
        with port.listener:
            if self._capture is None:
                self._capture = self._make_capture(scene, replay)
            capture = self._capture
            capture.begin_step(step, port.caller_finder, port.no_finder_reason)
            try:
                await capture.serve(port.listener)
                deadline = AgentDeadline(self._agent_began, self._agent_seconds, self._paused)
                timed_out = await scene.run_agent(ModelAccess(port.base_url, capture.secret), deadline)
            finally:
                self._agent_ended = time.monotonic()
                await run_shielded(self._stop_agent(scene, capture, step))
        return timed_out or capture.exhausted == "time"

    def _make_capture(self, scene: Scene, replay: Replay | None) -> Capture:
        context = self.context
        settings = context.config.capture_settings(
            weights=context.weights,
            call_timeout=self._timeouts.model_call,
            answer_timeout=context.agent.answer_timeout,
            deadline=self._agent_began + self._agent_seconds if scene.capture_deadline else None,
        )
        if context.config.snapshots:
            self._snapshots = WorkFolderSnapshots(
                lambda: scene.agent_sandbox, self.recorder, context.config.snapshot_limits
            )
        capture = Capture(
            context.endpoint,
            context.upstream,
            settings,
            on_call=self._save_call,
            classify=context.agent.classify,
            secrets=context.secrets,
            replay=replay,
            gate=context.gate,
            paused=self._paused,
            on_begin=None if self._snapshots is None else self._snapshots.begin,
        )
        # From here on the agent's key is masked too.
        self.recorder.mask = context.mask(capture.secret)
        return capture

    async def _load_replay(self, point: ForkPoint, scene: Scene) -> Replay:
        if not scene.is_repeatable:
            raise TaskError(
                "recorded calls cannot be replayed: the environment does not declare itself deterministic",
                hint="set `deterministic = True` on its class; a batch can begin again: --resume BATCH --from-start",
            )
        recorded, agent = await self.read_recorded(point), self.context.agent
        if recorded.agent_version not in (None, agent.version):
            versions = f"{agent.name} {recorded.agent_version}, and this one is {agent.version}"
            self.recorder.emit("warning", {"warning": f"the recorded rollout is of {versions}"})
        return await asyncio.to_thread(make_replay, point, recorded)

    async def read_recorded(self, point: ForkPoint) -> RecordedCalls:
        """The calls to replay."""
        if self._recorded is not None:
            return self._recorded
        store = self.context.store
        return await store.run(read_calls, store, point.source)

    async def _stop_agent(self, scene: Scene, capture: Capture, step: str) -> None:
        """Stop the capture, then the agent. Afterwards nothing is sampled and no process of the agent runs."""
        await capture.stop()
        await scene.stop_agent(capture.exhausted)
        self.record.proxy_log = capture.log_tail(LOG_BYTES)
        if self._snapshots is not None:
            await self._snapshots.finish(step)
            self.record.snapshots = self._snapshots.to_json()
        if self._replay is not None:
            self.record.fork["fidelity"] = self.recorder.mask.value(await self._report_fidelity(self._replay))

    async def _report_fidelity(self, replay: Replay) -> dict[str, Any]:
        report = replay.report.to_json()
        if self._snapshots is None:
            return report
        store, pairs = self.context.store, replay.report.pairs
        if self._recorded is None:
            report["files"] = await store.run(compare_with_source, store, replay.source, self.calls, pairs)
        else:
            report["files"] = compare_later(pairs)
        return report

    def _judge(self, scene: Scene, *, timed_out: bool) -> Ending:
        use = self._model_use(timed_out=timed_out)
        capture = self._opened_capture
        divergence = capture.divergence
        stop = judge_stop(use, abort_reason=self.abort_reason, timed_out=timed_out, divergence=divergence)
        return stop or scene.judge(use, capture.step_calls)

    def _model_use(self, *, timed_out: bool) -> ModelUse:
        """What the model calls say about the end. Called after the capture has stopped, so no call is in flight."""
        capture = self._opened_capture
        began = self._paused.working_time(self._agent_began)
        ended = began + self._agent_seconds if timed_out else self._paused.working_time(self._agent_ended)
        streamed = stall_seconds(self.context.config.stall_timeout, self._agent_seconds)
        limits = StallLimits(streamed, streamed * WHOLE_ANSWER_FACTOR)
        blame = judge_calls(capture.summaries(), AgentTime(began, ended, timed_out), limits)
        return ModelUse(blame, exhausted=capture.exhausted, storage_error=capture.storage_error)

    async def _verify(self, scene: Scene, ending: Ending) -> tuple[Ending, Reward]:
        """Score the work. An unknown reward of scored work is the verifier's fault."""
        verdict = await scene.verify()
        record, mask = self.record, self.recorder.mask
        record.test_exit_code = verdict.exit_code
        record.verifier_stdout = mask.text(verdict.stdout)
        record.verifier_stderr = mask.text(verdict.stderr)
        if verdict.reward.value is None and ending.outcome is Outcome.OK and scene.is_scored:
            return Ending(Outcome.VERIFIER, verdict.reward.reason), verdict.reward
        return ending, verdict.reward

    @property
    def _opened_capture(self) -> Capture:
        assert self._capture is not None, "the agent has not been started"
        return self._capture

    def _record_failure(self, error: PaddockError) -> None:
        stage = self.record.stage
        self.is_dependency_down = stage == INSTALL_STAGE or (stage in OPENING_STAGES and fails_for_all(error))
        outcome = next(
            (outcome for kind, outcome in OUTCOMES_BY_ERROR.items() if isinstance(error, kind)), Outcome.ENVIRONMENT
        )
        hint = f" ({error.hint})" if error.hint else ""
        self.recorder.end(outcome, f"{error}{hint}")

    async def _finish(self) -> None:
        if self._capture is not None:
            self.recorder.count_calls(self.calls)
        await self.recorder.finish()

    # -- other callers ------------------------------------------------------------------------------

    async def abort(self, reason: str = "aborted") -> None:
        """Stop the rollout: running model calls are cancelled, and `run` returns with outcome `cancelled`."""
        if self._run_task is None or self.abort_reason is not None:
            return
        self.abort_reason = reason
        if self._remote is not None and await self._remote.abort(reason):
            return
        if self._capture is not None:
            await self._capture.stop()
        if self._scene is not None:
            await self._scene.abort()
        if self._run_task is not None:
            self._run_task.cancel()

    async def end_like(self, other: RolloutRecord) -> RolloutRecord:
        """Instead of `run`: record the outcome of `other`, because the circuit breaker is open. Raises StoreError."""
        assert other.outcome is not None
        self._describe()
        await self.recorder.begin()
        self.recorder.end(other.outcome, other.error)
        await run_shielded(self._finish())
        return self.record

    async def messages(self) -> list[dict[str, Any]]:
        """The agent's own transcript, as far as it has got."""
        if self._scene is None or self.record.finished:
            return self.record.transcript
        return await self._scene.messages()

    # -- the record ---------------------------------------------------------------------------------

    def _describe(self) -> None:
        record, context = self.record, self.context
        record.task_hash, record.instruction = self.task.hash, join_instructions(self.task)
        record.agent, record.driver = context.agent.name, context.agent.driver
        record.model, record.mode, record.sandbox = (
            context.endpoint.display_name,
            context.config.mode,
            context.scene_kind,
        )
        record.config = {**context.describe(), **record.config}
        record.run_config = context.config.to_json()
        if self.fork is not None:
            record.fork = self.recorder.mask.value(self.fork.describe())
        record.metadata = {**self.task.metadata, **record.metadata}
        record.started_at = time.time()

    def _report_pause(self) -> None:
        record, is_paused = self.record, self._paused.is_paused
        record.pauses = self._paused.to_json()
        record.stage = PAUSED_STAGE if is_paused else AGENT_STAGE
        self.recorder.emit("pause", {**record.pauses, "is_paused": is_paused})

    async def _save_call(self, call: Call) -> None:
        if self._snapshots is not None:
            await self._snapshots.wait_saved(call)
        await self.recorder.save_call(call, self.calls)

    def notify(self) -> None:
        """Call `on_change`."""
        if self._on_change is not None:
            self._on_change(self)


def fails_for_all(error: PaddockError) -> bool:
    """Whether every rollout of the batch would fail with this error, because a shared server does not answer."""
    return isinstance(error, ConnectFailed) or bool(error.data.get("fails_for_all"))


def new_rollout_id() -> str:
    """An id that sorts by time and is unique across machines."""
    return f"r{int(time.time()):08x}{secrets.token_hex(6)}"
