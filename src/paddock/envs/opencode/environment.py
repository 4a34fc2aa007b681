"""The environment: its tools, and the state of one session. The rollouts themselves are at the desk."""

from __future__ import annotations

import logging
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from paddock.env import ToolEnvironment, tool
from paddock.envs.opencode import arguments  # noqa: TC001 - tools are described by them
from paddock.envs.opencode.results import (
    EventPage,
    Messages,
    RolloutResult,
    RolloutState,
    state_of,
    status_of,
)
from paddock.errors import PaddockError, ToolFailure
from paddock.types import CallToolAction, CallToolObservation, Observation, State

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.envs.opencode.desk import Desk
    from paddock.rollouts.record import RolloutRecord

logger = logging.getLogger("paddock.opencode")

LONGEST_CALL = 2 * 24 * 3600.0
"""Seconds a tool may take. A rollout has deadlines of its own; this one only keeps a call from lasting for ever."""


class OpenCodeState(State):
    """What one session has seen of its rollouts."""

    rollouts_completed: int = 0
    last_reward: float | None = None
    last_task_id: str | None = None
    last_sandbox_id: str | None = None


class OpenCodeEnvironment(ToolEnvironment):
    """Runs the coding agent OpenCode on tasks, in sandboxes, with every token captured and a verified reward."""

    concurrent_sessions = True
    parallel_calls = True
    step_timeout: ClassVar[float | None] = LONGEST_CALL
    state_type: ClassVar[Any] = OpenCodeState

    def __init__(self) -> None:
        super().__init__()
        self._collected: set[str] = set()
        self._state = OpenCodeState(episode_id=str(uuid.uuid4()))

    @classmethod
    def http_routes(cls) -> list[Any]:
        from starlette.routing import Route

        from paddock.envs.opencode.stream import stream_events

        return [Route("/rollouts/{rollout_id}/events", stream_events, methods=["GET"])]

    @classmethod
    @asynccontextmanager
    async def lifespan(cls) -> AsyncIterator[None]:
        """What a killed server left behind is put right at once; what runs at the end is cancelled."""
        from paddock.envs.opencode.desk import close_desk_here, desk_here

        try:
            await desk_here()
        except PaddockError as error:
            logger.error("no rollout can run: %s (%s)", error, error.hint)
        try:
            yield
        finally:
            await close_desk_here()

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        """A new count. Rollouts that are under way go on."""
        self._collected = set()
        self._state = OpenCodeState(episode_id=episode_id or str(uuid.uuid4()))
        return Observation(metadata={"status": "ready", "tools": list(self.tools)})

    @property
    def state(self) -> OpenCodeState:
        return self._state

    def _bind(self, name: str, arguments: dict[str, Any]) -> Any:
        """A call counts as a step once its arguments have the right shape."""
        bound = super()._bind(name, arguments)
        self._state.step_count += 1
        return bound

    # -- tools ------------------------------------------------------------------------------------

    @tool
    async def run_rollout(
        self,
        instruction: arguments.Instruction,
        model_key: arguments.ModelKey = None,
        test_script: arguments.TestScript = None,
        vllm_url: arguments.VllmUrl = None,
        hf_token: arguments.HfToken = None,
        thinking: arguments.Thinking = False,
        task_id: arguments.TaskId = None,
        setup_shell: arguments.SetupShell = None,
        upload_files: arguments.UploadFiles = None,
        mode: arguments.Mode = "transparent_proxy",
        max_tokens_cap: arguments.MaxTokensCap = 4096,
        agent_timeout_s: arguments.AgentTimeout = 600,
        idempotency_key: arguments.IdempotencyKey = None,
    ) -> RolloutResult:
        """Run one rollout to its end and return the result.

        The rollout goes on if the caller leaves. Give an idempotency_key to find it again: the same call
        with the same key returns the same rollout. For rollouts of many minutes, start_rollout and
        finalize_rollout do not depend on one long answer.
        """
        desk, record = await _start(
            model_key=model_key, instruction=instruction, test_script=test_script, vllm_url=vllm_url,
            hf_token=hf_token, thinking=thinking, task_id=task_id, setup_shell=setup_shell,
            upload_files=upload_files, mode=mode, max_tokens_cap=max_tokens_cap,
            agent_timeout_s=agent_timeout_s, idempotency_key=idempotency_key,
        )  # fmt: skip
        return await self._collect(desk, record.rollout_id, LONGEST_CALL)

    @tool
    async def start_rollout(
        self,
        instruction: arguments.Instruction,
        model_key: arguments.ModelKey = None,
        test_script: arguments.TestScript = None,
        vllm_url: arguments.VllmUrl = None,
        hf_token: arguments.HfToken = None,
        thinking: arguments.Thinking = False,
        task_id: arguments.TaskId = None,
        setup_shell: arguments.SetupShell = None,
        upload_files: arguments.UploadFiles = None,
        mode: arguments.Mode = "transparent_proxy",
        max_tokens_cap: arguments.MaxTokensCap = 4096,
        agent_timeout_s: arguments.AgentTimeout = 600,
        idempotency_key: arguments.IdempotencyKey = None,
    ) -> RolloutState:
        """Start a rollout and return at once. Collect it with finalize_rollout."""
        _, record = await _start(
            model_key=model_key, instruction=instruction, test_script=test_script, vllm_url=vllm_url,
            hf_token=hf_token, thinking=thinking, task_id=task_id, setup_shell=setup_shell,
            upload_files=upload_files, mode=mode, max_tokens_cap=max_tokens_cap,
            agent_timeout_s=agent_timeout_s, idempotency_key=idempotency_key,
        )  # fmt: skip
        return state_of(record)

    @tool(read_only=True, idempotent=True)
    async def get_state(self, rollout_id: arguments.RolloutId) -> RolloutState:
        """Where a rollout stands: queued, running, finished, failed or aborted."""
        desk = await _desk()
        return state_of(await desk.record(rollout_id))

    @tool(read_only=True, idempotent=True)
    async def get_messages(self, rollout_id: arguments.RolloutId) -> Messages:
        """OpenCode's own transcript, as far as it has got."""
        desk = await _desk()
        record, messages = await desk.messages(rollout_id)
        return Messages(rollout_id=record.rollout_id, status=status_of(record), messages=messages)

    @tool(idempotent=True, destructive=True)
    async def abort_rollout(self, rollout_id: arguments.RolloutId) -> RolloutState:
        """Stop a rollout: the model's answer is cut off at once. One that has ended stays as it is."""
        desk = await _desk()
        return state_of(await desk.abort(rollout_id))

    @tool(idempotent=True)
    async def finalize_rollout(
        self, rollout_id: arguments.RolloutId, wait_s: arguments.EndWait = None
    ) -> RolloutResult:
        """The result of a rollout, once it has ended. Asking again gives the same result."""
        return await self._collect(await _desk(), rollout_id, LONGEST_CALL if wait_s is None else wait_s)

    @tool(read_only=True, idempotent=True)
    async def subscribe_events(
        self,
        rollout_id: arguments.RolloutId,
        after: arguments.After = 0,
        wait_s: arguments.EventWait = 20,
    ) -> EventPage:
        """Events of a rollout, as soon as there are any. `url` has them as a stream."""
        desk = await _desk()
        rollout_id = (await desk.record(rollout_id)).rollout_id
        events, done = await desk.events(rollout_id, after, wait_s)
        last = events[-1]["seq"] if events else after
        return EventPage(events=events, next=last, done=done, url=f"/rollouts/{rollout_id}/events")

    # -- the session's own count ------------------------------------------------------------------

    async def _collect(self, desk: Desk, rollout_id: str, seconds: float) -> RolloutResult:
        record = await desk.wait(rollout_id, seconds)
        if not record.finished:
            raise ToolFailure(
                f"rollout {record.rollout_id} is {status_of(record)} (stage {record.stage}) after {seconds:g} s: "
                "call finalize_rollout again, or abort_rollout"
            )
        result = await desk.result(record)
        self._state.last_reward = result.reward
        self._state.last_task_id = result.task_id
        self._state.last_sandbox_id = result.sandbox_id
        self._collected.add(result.rollout_id)
        self._state.rollouts_completed = len(self._collected)
        return result

    def _observe(self, action: CallToolAction, value: Any) -> CallToolObservation:
        observation = super()._observe(action, value)
        if isinstance(value, RolloutResult):
            observation.reward = value.reward
        return observation


async def _desk() -> Desk:
    from paddock.envs.opencode.desk import desk_here

    try:
        return await desk_here()
    except PaddockError as error:
        raise ToolFailure(f"no rollout can run here: {error.message} ({error.hint})") from error


async def _start(**given: Any) -> tuple[Desk, RolloutRecord]:
    from paddock.envs.opencode.request import check_request

    request = check_request(**given)
    desk = await _desk()
    return desk, await desk.start(request)
