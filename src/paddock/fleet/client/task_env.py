"""A Fleet task as an environment: `reset`, `step`, `close`, and a reward at the end of the episode.

Every episode that starts completes once, with a reason, and every instance that was created is ended, whatever fails
in between. A reward that is not known is None, never 0. A step goes `FleetMCPTools.call_tool` → MCP client →
instance; the reward comes from `grading.grade`, which runs the verifier at the plane.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from paddock.fleet.client.env_client import FleetEnvClient
from paddock.fleet.client.episode_reporter import EpisodeReporter
from paddock.fleet.client.errors import EpisodeState, FleetError, FleetTimeout, InstanceGone
from paddock.fleet.client.grading import Grade, GradingRequest, grade
from paddock.fleet.client.http import within
from paddock.fleet.client.settings import plane_address
from paddock.fleet.client.tasks import (
    COMPUTER_TOOL,
    SUBMIT_TOOL_NAME,
    ComputerToolMissing,
    TaskView,
    find_task,
    has_screen,
    is_wanted,
    read_tasks,
    select_tools,
    time_to_live,
)
from paddock.fleet.client.tool_format import NO_IMAGE, find_error
from paddock.loop_thread import LoopThread
from paddock.retry import Deadline
from paddock.telemetry.bus import Bus
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.fleet.client.instance_handle import InstanceHandle
    from paddock.fleet.client.models import Instance
    from paddock.fleet.client.tools import FleetMCPTools

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
        """Creates no instance yet. Raises ConfigError (a ValueError) without a key.

        `trajectory_timeout_s` is the time an episode may take, from its reset to its last step. Further options go
        to `FleetEnvClient.from_fleet_async`.
        """
        super().__init__(task_config)
        address = plane_address(api_key, base_url)
        self.api_key = address.api_key
        self.ttl_seconds = ttl_seconds if ttl_seconds is not None else time_to_live(self.modality)
        self.max_steps = max_steps
        self.request_timeout_s = request_timeout_s
        self.reset_timeout_s = reset_timeout_s
        self.partial_reward = partial_reward
        self.trajectory_timeout_s = trajectory_timeout_s
        self.verifier_timeout_s = verifier_timeout_s
        self.conversation_messages: list[dict[str, Any]] | None = None
        """The conversation for the verifier, if it has a parameter for it."""
        self.final_reward: float | None = None
        self.provisioning_time_s: float | None = None
        self.verifier_stdout: str | None = None
        self.verifier_error: str | None = None
        self.reset_error: str | None = None
        """Why the reset before this episode failed; None when it succeeded."""
        self._options = {"base_url": address.base_url, "run_id": run_id, **client_options}
        self._bus = bus
        self._thread = LoopThread("paddock-fleet")
        self._orch: FleetEnvClient | None = None
        """Named as in OpenEnv's class: trainers read `_orch._fleet_env`."""
        self._tools: FleetMCPTools | None = None
        self._tools_cache: list[dict[str, Any]] | None = None
        self._reporter: EpisodeReporter | None = None
        self._was_used = False
        self._deadline: Deadline | None = None
        self._done = False
        self._submitted_answer: str | None = None
        self._last_verifier_execution_id: str | None = None

    @classmethod
    def from_json_file(cls, json_path: str | Path, task_key: str, **options: Any) -> Self:
        """The task of that key from a file with `{"tasks": […]}` or a list. Raises TaskError (a ValueError)."""
        return cls(find_task(json_path, task_key), **options)

    @classmethod
    def from_json_file_all(cls, json_path: str | Path, **options: Any) -> list[Self]:
        """One environment for each task of a file."""
        return [cls(task, **options) for task in read_tasks(json_path)]

    @property
    def instance(self) -> Instance | None:
        """The instance of this task, as it was when it was created."""
        handle = self._handle
        return handle.data if handle is not None else None

    @property
    def instance_id(self) -> str | None:
        """The id of the instance; None without one."""
        return self.instance.instance_id if self.instance is not None else None

    @property
    def tool_errors_list(self) -> list[str]:
        """The tool errors of this episode."""
        return self._reporter.tool_errors if self._reporter is not None else []

    # -- the episode ----------------------------------------------------------------------------------

    async def provision_async(self) -> None:
        """Create the instance, if there is none yet. `reset_async` calls this."""
        reporter = self._reporter if self._reporter is not None and self._reporter.is_open else self._begin()
        try:
            if self._orch is None:
                await self._provision()
        except BaseException as error:
            await self._abort(reporter, "init_error", error)
            raise

    async def reset_async(self, seed: int | None = None) -> dict[str, Any]:
        """Begin an episode and return the first observation. If that fails, the instance is ended.

        An unfinished earlier episode counts as abandoned. Raises ProvisioningFailed, ToolsUnavailable, InstanceGone.
        """
        if self._was_used and self._reporter is not None:
            self._reporter.complete("abandoned", failure_reason="abandoned")
        await self.provision_async()
        reporter = self._reporter
        assert reporter is not None
        stage = "init_error"
        try:
            await self._reset_instance(reporter, seed)
            stage = "tools_error"
            assert self._tools is not None
            listed = await self._tools.list_tools(partial(is_wanted, self.modality))
            self._tools_cache = select_tools(self.modality, self.prompt, listed.tools)
            observation = self._observation({})
            if has_screen(self.modality):
                observation["initial_screenshot"] = await self._screenshot(reporter, self._tools)
        except BaseException as error:
            await self._abort(reporter, stage, error)
            raise
        if self.trajectory_timeout_s is not None:
            self._deadline = Deadline(self.trajectory_timeout_s)
        return observation

    async def step_async(self, action: dict[str, Any]) -> Step:
        """Call a tool, or end the episode: observation, reward, done, info.

        The reward is 0.0 until the episode is done, and None if it is not known then.
        """
        if self._done:
            raise EpisodeState("Episode is done. Call reset() to start a new episode.")
        if self._tools is None or self._orch is None or self._reporter is None or self._tools_cache is None:
            raise EpisodeState("Environment not initialized. Call reset() first.")
        self._reporter.step_count += 1
        self._orch.keep_alive()
        info: dict[str, Any] = {"step": self._step_count}
        if self.reset_error is not None:
            info["env_reset_failed"] = self.reset_error
        result, done_reason, failure = await self._act(self._reporter, self._tools, action, info)
        if done_reason is None and self._step_count >= self.max_steps:
            done_reason = "max_steps"
        info["done_reason"] = done_reason
        reward: float | None = 0.0
        if done_reason is not None:
            self._done = True
            reward = await self._finish(self._reporter, done_reason, failure, info)
        return self._observation(result), reward, self._done, info

    async def close_async(self) -> None:
        """End the episode and the instance. An unfinished episode is graded first (`final_reward`)."""
        await self._close(graded=True)

    async def _close(self, *, graded: bool) -> None:
        reporter = self._reporter
        try:
            if reporter is not None and reporter.is_open and graded and self._was_used:
                self._done = True
                await self._finish(reporter, "closed", None, {})
        except asyncio.CancelledError:
            if reporter is not None:
                reporter.complete("cancelled", failure_reason="cancelled")
            raise
        finally:
            if reporter is not None:
                reporter.complete("abandoned", failure_reason="abandoned")
            self._done = True
            await self._release()
            if not self._thread.is_current:
                self._thread.close()

    # -- the same, for code that is not async ---------------------------------------------------------

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        """The same as `reset_async`, for code that is not async."""
        return self._thread.call(self.reset_async, seed)

    def step(self, action: dict[str, Any]) -> Step:
        """The same as `step_async`, for code that is not async."""
        return self._thread.call(self.step_async, action)

    def close(self) -> None:
        """The same as `close_async`, for code that is not async."""
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
        # A cancelled caller does not wait for a verifier.
        await self._close(graded=kind is None or issubclass(kind, Exception))

    # -- creating and ending ----------------------------------------------------------------------------

    @property
    def _handle(self) -> InstanceHandle | None:
        return self._orch._fleet_env if self._orch is not None else None

    @property
    def _step_count(self) -> int:
        return self._reporter.step_count if self._reporter is not None else 0

    def _begin(self) -> EpisodeReporter:
        self._reporter = EpisodeReporter(self, self.context, self.max_steps, self._bus)
        self._done = False
        self._deadline = None
        self._submitted_answer = None
        self._tools_cache = None
        self._last_verifier_execution_id = None
        self.final_reward = self.verifier_stdout = self.verifier_error = self.reset_error = None
        return self._reporter

    async def _provision(self) -> None:
        began = time.monotonic()
        self._orch, self._tools = await FleetEnvClient.from_fleet_async(
            self.api_key,
            self.env_spec,
            self.task.get("data_key"),
            self.task.get("data_version"),
            "mcp" if has_screen(self.modality) else None,
            ttl_seconds=self.ttl_seconds,
            env_variables=self.task.get("env_variables"),
            request_timeout_s=self.request_timeout_s,
            context=self.context,
            bus=self._bus,
            **self._options,
        )
        self.provisioning_time_s = time.monotonic() - began
        self._was_used = False

    async def _reset_instance(self, reporter: EpisodeReporter, seed: int | None) -> None:
        """Reset the instance. A used one that cannot be reset is replaced."""
        handle = self._handle
        seconds_left = handle.seconds_left if handle is not None else None
        if self._was_used and seconds_left is not None and seconds_left < REUSE_SECONDS:
            await self._replace()
        assert self._orch is not None
        was_used, self._was_used = self._was_used, True
        try:
            await self._orch.reset_async(seed, timeout=self.reset_timeout_s)
        except FleetError as error:
            reporter.report_failed_reset(error)
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

    async def _abort(self, reporter: EpisodeReporter, stage: str, error: BaseException) -> None:
        """Complete an episode that could not begin, and end its instance."""
        reason = stage
        if isinstance(error, asyncio.CancelledError):
            reason = "cancelled"
        elif isinstance(error, InstanceGone):
            reason = "instance_expired"
        elif isinstance(error, ComputerToolMissing):
            reason = "computer_tool_missing"
        logger.error("%s %s: %s", reporter.label, reason, error)
        reporter.complete(reason, failure_reason=reason, error=str(error))
        await self._release()

    # -- acting and grading ---------------------------------------------------------------------------

    async def _act(
        self, reporter: EpisodeReporter, tools: FleetMCPTools, action: dict[str, Any], info: dict[str, Any]
    ) -> tuple[Any, str | None, str | None]:
        """The result of the action; the reason if the episode is done; the failure if something broke."""
        name, params = action.get("tool"), action.get("params")
        done = "agent_done" if action.get("done") else None
        if not name:
            return None, done or self._timeout_reason(), None
        if name == SUBMIT_TOOL_NAME:
            answer = params.get("answer", "") if isinstance(params, dict) else ""
            self._submitted_answer = info["submitted_answer"] = str(answer)
            result = info["tool_result"] = dict(SUBMITTED)
            return result, "agent_done", None
        if params is not None and not isinstance(params, dict):
            message = info["tool_error"] = "params must be an object"
            reporter.report_tool_error(name, message)
            return {"error": message}, done, None
        try:
            work = tools.call_tool(name, params or {})
            result = await (
                work if self._deadline is None else within(self._deadline.seconds_left, work, f"calling {name}")
            )
        except FleetError as error:
            reporter.report_failed_call(name, error)
            info["tool_error"] = str(error)
            if isinstance(error, InstanceGone):
                return {"error": str(error)}, "instance_expired", "instance_expired"
            timeout = self._timeout_reason() if isinstance(error, FleetTimeout) else None
            return {"error": str(error)}, timeout or done, timeout
        info["tool_result"] = result
        if (tool_error := find_error(result)) is not None:
            info["tool_error"] = tool_error
            reporter.report_tool_error(name, tool_error)
        timeout = self._timeout_reason()
        return result, done or timeout, None if done else timeout

    def _timeout_reason(self) -> str | None:
        return "trajectory_timeout" if self._deadline is not None and self._deadline.seconds_left <= 0 else None

    async def _finish(
        self, reporter: EpisodeReporter, done_reason: str, failure: str | None, info: dict[str, Any]
    ) -> float | None:
        """Grade the episode and complete it."""
        if failure == "instance_expired":
            result = Grade(failure_reason=failure, error="the instance ended during the episode")
        else:
            request = GradingRequest(
                self.task, self._submitted_answer, self.conversation_messages, partial=self.partial_reward
            )
            result = await grade(request, self._handle, seconds=self.verifier_timeout_s)
        self.verifier_stdout, self.verifier_error = result.stdout, result.error
        self._last_verifier_execution_id = result.execution_id
        self.final_reward = result.reward
        reason = failure or result.failure_reason
        info.update(
            failure_reason=reason, reward_computed=True, verifier_stdout=result.stdout, verifier_error=result.error
        )
        reporter.complete_graded(done_reason, reason, result)
        return result.reward

    async def _screenshot(self, reporter: EpisodeReporter, tools: FleetMCPTools) -> list[dict[str, Any]]:
        """A screenshot; a text if there is none."""
        try:
            screenshot = await tools.call_tool(COMPUTER_TOOL, {"action": "screenshot"})
        except InstanceGone:
            raise
        except FleetError as error:
            reporter.report_failed_screenshot(type(error).__name__, str(error))
        else:
            if isinstance(screenshot, list):
                return screenshot
            reporter.report_failed_screenshot("ToolError", find_error(screenshot) or NO_IMAGE)
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
    """The same as `FleetTaskEnv(task_config, **options)`."""
    return FleetTaskEnv(task_config, **options)
