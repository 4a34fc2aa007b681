"""A Fleet task as an environment: `reset`, `step`, `close`, and a reward at the end of the episode.

Every rollout that starts also completes, with one reason, and every instance that was made is ended, whatever breaks
in between. A reward that is not known is None, never 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from paddock.errors import TaskError
from paddock.fleet import modality as modalities
from paddock.fleet.client import FleetEnvClient
from paddock.fleet.errors import EpisodeState, FleetError, FleetTimeout, InstanceGone
from paddock.fleet.events import EnvResetFailed, McpToolError, ScreenshotFailed, TaskContext, ToolCallFailedEvent
from paddock.fleet.events import VerifierFailed as VerifierFailedEvent
from paddock.fleet.grading import Grade, Question, grade
from paddock.fleet.results import NO_IMAGE, error_of
from paddock.fleet.retry import Budget, within
from paddock.fleet.rollout import Rollout
from paddock.fleet.settings import plane_address
from paddock.fleet.sync import LoopThread
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from paddock.fleet.client import InstanceHandle
    from paddock.fleet.models import Instance
    from paddock.fleet.tools import FleetMCPTools

logger = logging.getLogger(__name__)

Step = tuple[dict[str, Any], float | None, bool, dict[str, Any]]
SHOWN = 500
REUSE_SECONDS = 60.0
"""An instance with less time to live than this is not used for another episode."""
SCREENSHOT_FAILED = "The first screenshot could not be taken: take one yourself."


class FleetTaskEnv:
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
        self.task = task_config
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
        self.tool_errors_list: list[str] = []
        self.reset_error: str | None = None
        """Why the environment could not be reset before this episode; None when it was."""
        self._options = {"base_url": address.base_url, "run_id": run_id, **client_options}
        self._bus = bus
        self._context = TaskContext(self.env_key, self.env_version, self.task_key, self.modality)
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

    # -- the task -------------------------------------------------------------------------------------

    @property
    def task_key(self) -> str:
        return str(self.task.get("task_key") or self.task.get("key") or "unknown")

    @property
    def prompt(self) -> str:
        return str(self.task.get("prompt") or "")

    @property
    def modality(self) -> str:
        return str(self.task.get("task_modality") or "tool_use")

    @property
    def env_key(self) -> str:
        return str(self.task.get("env_key") or self.task.get("env_id") or "unknown")

    @property
    def env_version(self) -> str | None:
        return self.task.get("env_version") or self.task.get("version")

    @property
    def instance(self) -> Instance | None:
        """What the plane made for this task, as it was when it came up."""
        handle = self._handle
        return handle.data if handle is not None else None

    @property
    def instance_id(self) -> str | None:
        return self.instance.instance_id if self.instance is not None else None

    @classmethod
    def from_json_file(cls, json_path: str | Path, task_key: str, **options: Any) -> Self:
        """The task of that key from a file with `{"tasks": […]}` or a list. Raises TaskError (a ValueError)."""
        for task in _read_tasks(json_path):
            if task_key in (task.get("task_key"), task.get("key")):
                return cls(task, **options)
        raise TaskError(f"Task '{task_key}' not found in {json_path}")

    @classmethod
    def from_json_file_all(cls, json_path: str | Path, **options: Any) -> list[Self]:
        return [cls(task, **options) for task in _read_tasks(json_path)]

    # -- the episode ----------------------------------------------------------------------------------

    async def provision_async(self) -> None:
        """Make the instance, if there is none yet. `reset_async` does this too."""
        if self._rollout is None or not self._rollout.is_open:
            self._begin()
        try:
            if self._orch is None:
                await self._provision()
        except BaseException as error:
            await self._give_up("init_error", error)
            raise

    async def reset_async(self, seed: int | None = None) -> dict[str, Any]:
        """Begin an episode and return the first observation. What cannot be begun is completed and cleaned up.

        An episode that was under way counts as abandoned. Raises ProvisioningFailed, ToolsUnavailable, InstanceGone.
        """
        if self._was_used and self._rollout is not None:
            self._rollout.complete("abandoned", failure_reason="abandoned")
        await self.provision_async()
        stage = "init_error"
        try:
            await self._reset_instance(seed)
            stage = "tools_error"
            assert self._tools is not None
            listed = await self._tools.list_tools(partial(modalities.is_wanted, self.modality))
            self._tools_cache = modalities.fitting(self.modality, self.prompt, listed.tools)
            observation = self._observation({})
            if modalities.has_screen(self.modality):
                observation["initial_screenshot"] = await self._screenshot(self._tools)
        except BaseException as error:
            await self._give_up(stage, error)
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
        result, done_reason, failure = await self._act(self._tools, action, info)
        if done_reason is None and self._step_count >= self.max_steps:
            done_reason = "max_steps"
        info["done_reason"] = done_reason
        reward: float | None = 0.0
        if done_reason is not None:
            self._done = True
            reward = await self._finish(done_reason, failure, info)
        return self._observation(result), reward, self._done, info

    async def close_async(self) -> None:
        """End the episode and the instance. An episode that nobody finished is graded first (`final_reward`)."""
        await self._close(graded=True)

    async def _close(self, *, graded: bool) -> None:
        try:
            rollout = self._rollout
            if rollout is not None and rollout.is_open and graded and self._was_used:
                self._done = True
                await self._finish("closed", None, {})
        except asyncio.CancelledError:
            self._complete("cancelled", failure_reason="cancelled")
            raise
        finally:
            self._complete("abandoned", failure_reason="abandoned")
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

    @property
    def _where(self) -> str:
        return f"[{self._context.label}] step {self._step_count}/{self.max_steps}"

    def _begin(self) -> None:
        self._rollout = Rollout(self, self._context, self.max_steps, self._bus)
        self._done = False
        self._deadline = None
        self._submitted_answer = None
        self._tools_cache = None
        self._last_verifier_execution_id = None
        self.final_reward = self.verifier_stdout = self.verifier_error = self.reset_error = None
        self.tool_errors_list = []

    async def _provision(self) -> None:
        if self.env_key == "unknown":
            raise TaskError("Task config missing env_key", hint="name the environment of the task")
        began = time.monotonic()
        self._orch, self._tools = await FleetEnvClient.from_fleet_async(
            self.api_key,
            f"{self.env_key}:{self.env_version}" if self.env_version else self.env_key,
            self.task.get("data_key"),
            self.task.get("data_version"),
            "mcp" if modalities.has_screen(self.modality) else None,
            ttl_seconds=self.ttl_seconds,
            env_variables=self.task.get("env_variables"),
            request_timeout_s=self.request_timeout_s,
            context=self._context,
            bus=self._bus,
            **self._options,
        )
        self.provisioning_time_s = time.monotonic() - began
        self._was_used = False

    async def _reset_instance(self, seed: int | None) -> None:
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
            logger.warning("%s reset failed: %s", self._where, error)
            self._bus.emit(
                EnvResetFailed(context=self._context, error_type=type(error).__name__, error_message=str(error))
            )
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

    async def _give_up(self, stage: str, error: BaseException) -> None:
        reason = stage
        if isinstance(error, asyncio.CancelledError):
            reason = "cancelled"
        elif isinstance(error, InstanceGone):
            reason = "instance_expired"
        elif isinstance(error, modalities.ComputerToolMissing):
            reason = "computer_tool_missing"
        logger.error("%s %s: %s", self._where, reason, error)
        self._complete(reason, failure_reason=reason, error=str(error)[:SHOWN])
        await self._release()

    def _complete(self, reason: str, *, failure_reason: str | None = None, error: str | None = None) -> None:
        if self._rollout is not None:
            self._rollout.complete(reason, failure_reason=failure_reason, error=error)

    # -- acting and grading ---------------------------------------------------------------------------

    async def _act(
        self, tools: FleetMCPTools, action: dict[str, Any], info: dict[str, Any]
    ) -> tuple[Any, str | None, str | None]:
        """The result of the action, why the episode is done if it is, and what broke if something did."""
        name = action.get("tool")
        done = "agent_done" if action.get("done") else None
        if not name:
            return None, done or self._overdue(), None
        params = action.get("params")
        if name == modalities.SUBMIT:
            answer = params.get("answer", "") if isinstance(params, dict) else ""
            self._submitted_answer = info["submitted_answer"] = str(answer)
            result = info["tool_result"] = {"status": "submitted", "message": "Answer recorded. Ending session."}
            return result, "agent_done", None
        if params is not None and not isinstance(params, dict):
            return self._tool_error(name, "params must be an object", info), done, None
        try:
            work = tools.call_tool(name, params or {})
            result = await (work if self._deadline is None else within(self._deadline.left, work, f"calling {name}"))
        except (FleetError, TimeoutError) as error:
            failed = self._call_failed(name, error, info)
            if isinstance(error, InstanceGone):
                return failed, "instance_expired", "instance_expired"
            overdue = self._overdue() if isinstance(error, FleetTimeout) else None
            return failed, overdue or done, overdue
        info["tool_result"] = result
        said = error_of(result)
        if said is not None:
            self._tool_error(name, said, info)
        overdue = self._overdue()
        return result, done or overdue, None if done else overdue

    def _overdue(self) -> str | None:
        return "trajectory_timeout" if self._deadline is not None and self._deadline.left <= 0 else None

    def _tool_error(self, name: str, said: str, info: dict[str, Any]) -> dict[str, Any]:
        info["tool_error"] = said
        self.tool_errors_list.append(f"{name}(): {said[:SHOWN]}")
        logger.warning("%s tool_error: %s() -> %s", self._where, name, said[:SHOWN])
        self._bus.emit(
            McpToolError(
                context=self._context,
                step_count=self._step_count,
                max_steps=self.max_steps,
                tool_name=name,
                error_message=said[:SHOWN],
            )
        )
        return {"error": said}

    def _call_failed(self, name: str, error: Exception, info: dict[str, Any]) -> dict[str, Any]:
        said = info["tool_error"] = str(error)
        self.tool_errors_list.append(f"{name}(): {said[:SHOWN]}")
        logger.warning("%s tool_call_failed: %s() -> %s: %s", self._where, name, type(error).__name__, said[:SHOWN])
        self._bus.emit(
            ToolCallFailedEvent(
                context=self._context,
                error_type=type(error).__name__,
                error_message=said[:SHOWN],
                step_count=self._step_count,
                max_steps=self.max_steps,
                tool_name=name,
            )
        )
        return {"error": said}

    async def _finish(self, done_reason: str, failure: str | None, info: dict[str, Any]) -> float | None:
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
        logger.info("%s %s: reward %s%s", self._where, done_reason, given.reward, f" ({reason})" if reason else "")
        if given.failure_reason is not None:
            self._bus.emit(
                VerifierFailedEvent(
                    context=self._context,
                    error_type=given.failure_reason,
                    error_message=(given.error or "")[:SHOWN],
                    step_count=self._step_count,
                    failure_reason=given.failure_reason,
                )
            )
        if self._rollout is not None:
            self._rollout.complete(
                done_reason,
                failure_reason=reason,
                reward=given.reward,
                verifier_success=given.verifier_success,
                error=given.error,
            )
        return given.reward

    async def _screenshot(self, tools: FleetMCPTools) -> list[dict[str, Any]]:
        """What the screen shows; a text that says so if that cannot be had."""
        try:
            taken = await tools.call_tool(modalities.COMPUTER, {"action": "screenshot"})
        except InstanceGone:
            raise
        except FleetError as error:
            return self._no_screenshot(type(error).__name__, str(error))
        if isinstance(taken, list):
            return taken
        return self._no_screenshot("ToolError", error_of(taken) or NO_IMAGE)

    def _no_screenshot(self, kind: str, said: str) -> list[dict[str, Any]]:
        logger.warning("%s no screenshot: %s", self._where, said)
        self._bus.emit(
            ScreenshotFailed(
                context=self._context, error_type=kind, error_message=said[:SHOWN], step_count=self._step_count
            )
        )
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


def _read_tasks(path: str | Path) -> list[dict[str, Any]]:
    document = json.loads(Path(path).read_text())
    tasks = document.get("tasks") if isinstance(document, dict) else document
    if not isinstance(tasks, list):
        raise TaskError(f"{path} holds no tasks", hint='write {"tasks": […]} or a list')
    return tasks
