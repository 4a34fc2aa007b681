"""A Fleet task as an environment: `reset`, `step`, `close`, and a reward at the end of the episode.

Every rollout that starts also completes, with one reason, and every instance that was made is ended, whatever breaks
in between. A reward that is not known is None, never 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from paddock.fleet import modality as modalities
from paddock.fleet.client import FleetEnvClient
from paddock.fleet.errors import EpisodeState, FleetError, FleetTimeout, InstanceGone
from paddock.fleet.grading import Grade, Question, grade
from paddock.fleet.results import NO_IMAGE, error_of
from paddock.fleet.retry import Budget, within
from paddock.fleet.rollout import Rollout
from paddock.fleet.settings import plane_address
from paddock.fleet.sync import LoopThread
from paddock.fleet.task import TaskView, find_task, read_tasks
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.fleet.handle import InstanceHandle
    from paddock.fleet.models import Instance
    from paddock.fleet.tools import FleetMCPTools

logger = logging.getLogger(__name__)

Step = tuple[dict[str, Any], float | None, bool, dict[str, Any]]
REUSE_SECONDS = 60.0
"""An instance with less time to live than this is not used for another episode."""
SCREENSHOT_FAILED = "The first screenshot could not be taken: take one yourself."
SUBMITTED = {"status": "submitted", "message": "Answer recorded. Ending session."}


class FleetTaskEnv(TaskView):
    """One task on instances of its own. Async methods end in `_async`; the others run on a loop thread."""

    def __init__(
        self,
        task_config: dict[str, Any],
        api_key: str | None = None,
        ttl_seconds: int | None = None,
        max_steps: int = 50,
        request_timeout_s: float = 60.0,
        reset_timeout_s: float = 10.0,
        partial_reward: bool = False,
        *,
        base_url: str | None = None,
        run_id: str | None = None,
        trajectory_timeout_s: float | None = None,
        verifier_timeout_s: float = 120.0,
        bus: Bus = process_bus,
        **client_options: Any,
    ) -> None:
        """Makes nothing yet. Raises ConfigError (a ValueError) without a key.

        `trajectory_timeout_s` is the time an episode may take, from its reset to its last step. Further options go
        to `FleetEnvClient.from_fleet_async`.
        """
        super().__init__(task_config)
        address = plane_address(api_key, base_url)
        self.api_key = address.api_key
        self.ttl_seconds = ttl_seconds if ttl_seconds is not None else modalities.time_to_live(self.modality)
        self.max_steps = max_steps
        self.request_timeout_s = request_timeout_s
        self.reset_timeout_s = reset_timeout_s
        self.partial_reward = partial_reward
        self.trajectory_timeout_s = trajectory_timeout_s
        self.verifier_timeout_s = verifier_timeout_s
        self.conversation_messages: list[dict[str, Any]] | None = None
        """What the verifier is shown of the conversation, if it asks for it."""
        self.final_reward: float | None = None
        self.provisioning_time_s: float | None = None
        self.verifier_stdout: str | None = None
        self.verifier_error: str | None = None
        self.reset_error: str | None = None
        """Why the environment could not be reset before this episode; None when it was."""
        self._options = {"base_url": address.base_url, "run_id": run_id, **client_options}
        self._bus = bus
        self._thread = LoopThread()
        self._orch: FleetEnvClient | None = None
        self._tools: FleetMCPTools | None = None
        self._tools_cache: list[dict[str, Any]] | None = None
        self._rollout: Rollout | None = None
        self._was_used = False
        self._deadline: Budget | None = None
        self._done = False
        self._submitted_answer: str | None = None
        self._last_verifier_execution_id: str | None = None

    @classmethod
    def from_json_file(cls, json_path: str | Path, task_key: str, **options: Any) -> Self:
        """The task of that key from a file with `{"tasks": […]}` or a list. Raises TaskError (a ValueError)."""
        return cls(find_task(json_path, task_key), **options)

    @classmethod
    def from_json_file_all(cls, json_path: str | Path, **options: Any) -> list[Self]:
        return [cls(task, **options) for task in read_tasks(json_path)]

    @property
    def instance(self) -> Instance | None:
        """What the plane made for this task, as it was when it came up."""
        handle = self._handle
        return handle.data if handle is not None else None

    @property
    def instance_id(self) -> str | None:
        return self.instance.instance_id if self.instance is not None else None

    @property
    def tool_errors_list(self) -> list[str]:
        """What went wrong with tools in this episode."""
        return self._rollout.tool_errors if self._rollout is not None else []

    # -- the episode ----------------------------------------------------------------------------------

    async def provision_async(self) -> None:
        """Make the instance, if there is none yet. `reset_async` does this too."""
        rollout = self._rollout if self._rollout is not None and self._rollout.is_open else self._begin()
        try:
            if self._orch is None:
                await self._provision()
        except BaseException as error:
            await self._give_up(rollout, "init_error", error)
            raise

    async def reset_async(self, seed: int | None = None) -> dict[str, Any]:
        """Begin an episode and return the first observation. What cannot be begun is completed and cleaned up.

        An episode that was under way counts as abandoned. Raises ProvisioningFailed, ToolsUnavailable, InstanceGone.
        """
        if self._was_used and self._rollout is not None:
            self._rollout.complete("abandoned", failure_reason="abandoned")
        await self.provision_async()
        rollout = self._rollout
        assert rollout is not None
        stage = "init_error"
        try:
            await self._reset_instance(rollout, seed)
            stage = "tools_error"
            assert self._tools is not None
            listed = await self._tools.list_tools(partial(modalities.is_wanted, self.modality))
            self._tools_cache = modalities.fitting(self.modality, self.prompt, listed.tools)
            observation = self._observation({})
            if modalities.has_screen(self.modality):
                observation["initial_screenshot"] = await self._screenshot(rollout, self._tools)
        except BaseException as error:
            await self._give_up(rollout, stage, error)
            raise
        if self.trajectory_timeout_s is not None:
            self._deadline = Budget(self.trajectory_timeout_s)
        return observation

    async def step_async(self, action: dict[str, Any]) -> Step:
        """Call a tool, or say that the agent is done: observation, reward, done, info.

        The reward is 0.0 until the episode is done, and None if it cannot be told then.
        """
        if self._done:
            raise EpisodeState("Episode is done. Call reset() to start a new episode.")
        if self._tools is None or self._orch is None or self._rollout is None or self._tools_cache is None:
            raise EpisodeState("Environment not initialized. Call reset() first.")
        self._rollout.step_count += 1
        self._orch.keep_alive()
        info: dict[str, Any] = {"step": self._step_count}
        if self.reset_error is not None:
            info["env_reset_failed"] = self.reset_error
        result, done_reason, failure = await self._act(self._rollout, self._tools, action, info)
        if done_reason is None and self._step_count >= self.max_steps:
            done_reason = "max_steps"
        info["done_reason"] = done_reason
        reward: float | None = 0.0
        if done_reason is not None:
            self._done = True
            reward = await self._finish(self._rollout, done_reason, failure, info)
        return self._observation(result), reward, self._done, info

    async def close_async(self) -> None:
        """End the episode and the instance. An episode that nobody finished is graded first (`final_reward`)."""
        await self._close(graded=True)

    async def _close(self, *, graded: bool) -> None:
        rollout = self._rollout
        try:
            if rollout is not None and rollout.is_open and graded and self._was_used:
                self._done = True
                await self._finish(rollout, "closed", None, {})
        except asyncio.CancelledError:
            if rollout is not None:
                rollout.complete("cancelled", failure_reason="cancelled")
            raise
        finally:
            if rollout is not None:
                rollout.complete("abandoned", failure_reason="abandoned")
            self._done = True
            await self._release()
            if not self._thread.is_current:
                self._thread.close()

    # -- the same, for code that is not async ---------------------------------------------------------

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        return self._thread.call(self.reset_async, seed)

    def step(self, action: dict[str, Any]) -> Step:
        return self._thread.call(self.step_async, action)

    def close(self) -> None:
        try:
            self._thread.call(self.close_async)
        finally:
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Whoever is cancelled does not wait for a verifier.
        await self._close(graded=kind is None or issubclass(kind, Exception))

    # -- making and ending ----------------------------------------------------------------------------

    @property
    def _handle(self) -> InstanceHandle | None:
        return self._orch._fleet_env if self._orch is not None else None

    @property
    def _step_count(self) -> int:
        return self._rollout.step_count if self._rollout is not None else 0

    def _begin(self) -> Rollout:
        self._rollout = Rollout(self, self.context, self.max_steps, self._bus)
        self._done = False
        self._deadline = None
        self._submitted_answer = None
        self._tools_cache = None
        self._last_verifier_execution_id = None
        self.final_reward = self.verifier_stdout = self.verifier_error = self.reset_error = None
        return self._rollout

    async def _provision(self) -> None:
        began = time.monotonic()
        self._orch, self._tools = await FleetEnvClient.from_fleet_async(
            self.api_key,
            self.env_spec,
            self.task.get("data_key"),
            self.task.get("data_version"),
            "mcp" if modalities.has_screen(self.modality) else None,
            ttl_seconds=self.ttl_seconds,
            env_variables=self.task.get("env_variables"),
            request_timeout_s=self.request_timeout_s,
            context=self.context,
            bus=self._bus,
            **self._options,
        )
        self.provisioning_time_s = time.monotonic() - began
        self._was_used = False

    async def _reset_instance(self, rollout: Rollout, seed: int | None) -> None:
        """Put the instance back to its first state. A used one that cannot be is replaced."""
        handle = self._handle
        left = handle.seconds_left if handle is not None else None
        if self._was_used and left is not None and left < REUSE_SECONDS:
            await self._replace()
        assert self._orch is not None
        was_used, self._was_used = self._was_used, True
        try:
            await self._orch.reset_async(seed, timeout=self.reset_timeout_s)
        except FleetError as error:
            rollout.reset_failed(error)
            if was_used:
                await self._replace()
                self._was_used = True
            else:
                self.reset_error = str(error)

    async def _replace(self) -> None:
        await self._release()
        await self._provision()

    async def _release(self) -> None:
        orchestrator, self._orch, self._tools, self._tools_cache = self._orch, None, None, None
        self._was_used = False
        if orchestrator is not None:
            await orchestrator.close_async()

    async def _give_up(self, rollout: Rollout, stage: str, error: BaseException) -> None:
        """Complete a rollout that could not begin, and end its instance."""
        reason = stage
        if isinstance(error, asyncio.CancelledError):
            reason = "cancelled"
        elif isinstance(error, InstanceGone):
            reason = "instance_expired"
        elif isinstance(error, modalities.ComputerToolMissing):
            reason = "computer_tool_missing"
        logger.error("%s %s: %s", rollout.where, reason, error)
        rollout.complete(reason, failure_reason=reason, error=str(error))
        await self._release()

    # -- acting and grading ---------------------------------------------------------------------------

    async def _act(
        self, rollout: Rollout, tools: FleetMCPTools, action: dict[str, Any], info: dict[str, Any]
    ) -> tuple[Any, str | None, str | None]:
        """The result of the action, why the episode is done if it is, and what broke if something did."""
        name, params = action.get("tool"), action.get("params")
        done = "agent_done" if action.get("done") else None
        if not name:
            return None, done or self._overdue(), None
        if name == modalities.SUBMIT:
            answer = params.get("answer", "") if isinstance(params, dict) else ""
            self._submitted_answer = info["submitted_answer"] = str(answer)
            result = info["tool_result"] = dict(SUBMITTED)
            return result, "agent_done", None
        if params is not None and not isinstance(params, dict):
            said = info["tool_error"] = "params must be an object"
            rollout.tool_said_error(name, said)
            return {"error": said}, done, None
        try:
            work = tools.call_tool(name, params or {})
            result = await (work if self._deadline is None else within(self._deadline.left, work, f"calling {name}"))
        except FleetError as error:
            rollout.call_failed(name, error)
            info["tool_error"] = str(error)
            if isinstance(error, InstanceGone):
                return {"error": str(error)}, "instance_expired", "instance_expired"
            overdue = self._overdue() if isinstance(error, FleetTimeout) else None
            return {"error": str(error)}, overdue or done, overdue
        info["tool_result"] = result
        if (failed := error_of(result)) is not None:
            info["tool_error"] = failed
            rollout.tool_said_error(name, failed)
        overdue = self._overdue()
        return result, done or overdue, None if done else overdue

    def _overdue(self) -> str | None:
        return "trajectory_timeout" if self._deadline is not None and self._deadline.left <= 0 else None

    async def _finish(
        self, rollout: Rollout, done_reason: str, failure: str | None, info: dict[str, Any]
    ) -> float | None:
        """Grade the episode and complete its rollout."""
        if failure == "instance_expired":
            given = Grade(failure_reason=failure, error="the instance ended during the episode")
        else:
            question = Question(
                self.task, self._submitted_answer, self.conversation_messages, partial=self.partial_reward
            )
            given = await grade(question, self._handle, seconds=self.verifier_timeout_s)
        self.verifier_stdout, self.verifier_error = given.stdout, given.error
        self._last_verifier_execution_id = given.execution_id
        self.final_reward = given.reward
        reason = failure or given.failure_reason
        info.update(
            failure_reason=reason, reward_computed=True, verifier_stdout=given.stdout, verifier_error=given.error
        )
        rollout.complete_graded(done_reason, reason, given)
        return given.reward

    async def _screenshot(self, rollout: Rollout, tools: FleetMCPTools) -> list[dict[str, Any]]:
        """What the screen shows; a text that says so if that cannot be had."""
        try:
            taken = await tools.call_tool(modalities.COMPUTER, {"action": "screenshot"})
        except InstanceGone:
            raise
        except FleetError as error:
            rollout.screenshot_failed(type(error).__name__, str(error))
        else:
            if isinstance(taken, list):
                return taken
            rollout.screenshot_failed("ToolError", error_of(taken) or NO_IMAGE)
        return [{"type": "text", "text": SCREENSHOT_FAILED}]

    def _observation(self, result: Any) -> dict[str, Any]:
        observation = {
            "prompt": self.prompt,
            "observation": {} if result is None else result,
            "step": self._step_count,
            "task_key": self.task_key,
            "modality": self.modality,
        }
        if self._tools_cache:
            observation["tools"] = self._tools_cache
        return observation


def make_fleet_task_env(task_config: dict[str, Any], **options: Any) -> FleetTaskEnv:
    return FleetTaskEnv(task_config, **options)
