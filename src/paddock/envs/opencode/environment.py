"""The environment: its tools, and the state of one session. The rollouts are run by the rollout service."""

from __future__ import annotations

import logging
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from paddock.env import ToolEnvironment, tool
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

    from paddock.envs.opencode.rollout_service import OpenCodeRolloutService
    from paddock.store.record import RolloutRecord

logger = logging.getLogger("paddock.opencode")

LONGEST_CALL_SECONDS = 2 * 24 * 3600.0
"""Seconds a tool may take. A rollout has deadlines of its own; this one only keeps a call from lasting for ever."""

LONGEST_POLL_SECONDS = 300.0

# The types of the tools' arguments, and what an agent reads about each.
Instruction = Annotated[str, Field(description="What the agent has to do.")]
ModelKey = Annotated[
    str | None,
    Field(
        description="vllm://repo (with vllm_url), hf-router://repo:provider (with hf_token), replay:FILE, local, "
        "a URL, or the name of a model at vllm_url. Empty: the first model at vllm_url."
    ),
]
TestScript = Annotated[
    str | None,
    Field(
        description="Shell that scores the work: it writes a number to /logs/verifier/reward.txt. Empty: no reward."
    ),
]
VllmUrl = Annotated[str | None, Field(description="The URL of an OpenAI-compatible server such as vLLM.")]
HfToken = Annotated[str | None, Field(description="Token for hf-router. It is kept nowhere.")]
Thinking = Annotated[
    bool | None, Field(description="Whether the model may think before it answers, where it can be told.")
]
TaskId = Annotated[
    str | None, Field(description="The task's name in the result. Empty: made from the task's content.")
]
SetupShell = Annotated[str | None, Field(description="Shell that is run in the sandbox before the agent starts.")]
UploadFiles = Annotated[
    dict[str, str] | None,
    Field(description="Texts by path, relative to the work folder or absolute below /home/user/workdir."),
]
Mode = Annotated[
    Literal["transparent_proxy", "black_box"] | None,
    Field(description="transparent_proxy captures tokens and logprobs; black_box hands calls through as they are."),
]
MaxTokensCap = Annotated[int, Field(description="The most tokens that one model call may sample.")]
AgentTimeout = Annotated[float, Field(description="Seconds that the agent may work.")]
IdempotencyKey = Annotated[str | None, Field(description="The same key gives the same rollout, never a second one.")]

RolloutId = Annotated[str, Field(description="As start_rollout gave it.")]
EndWait = Annotated[
    float | None,
    Field(
        ge=0, description="Seconds to wait for its end; an error if it is still running then. Empty: until it ends."
    ),
]
After = Annotated[int, Field(ge=0, description="The next of the page before; 0 begins with the first event.")]
EventWait = Annotated[
    float, Field(ge=0, le=LONGEST_POLL_SECONDS, description="Seconds to wait while there is nothing new.")
]


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
    step_timeout: ClassVar[float | None] = LONGEST_CALL_SECONDS
    state_type: ClassVar[Any] = OpenCodeState

    def __init__(self) -> None:
        super().__init__()
        self._collected: set[str] = set()
        self._state = OpenCodeState(episode_id=str(uuid.uuid4()))

    @classmethod
    def http_routes(cls) -> list[Any]:
        from starlette.routing import Route

        from paddock.envs.opencode.event_stream import stream_events

        return [Route("/rollouts/{rollout_id}/events", stream_events, methods=["GET"])]

    @classmethod
    @asynccontextmanager
    async def lifespan(cls) -> AsyncIterator[None]:
        """What a killed server left behind is put right at once; what runs at the end is cancelled."""
        from paddock.envs.opencode.rollout_service import close_service, get_service

        try:
            await get_service()
        except PaddockError as error:
            logger.error("no rollout can run: %s (%s)", error, error.hint)
        try:
            yield
        finally:
            await close_service()

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
        instruction: Instruction,
        model_key: ModelKey = None,
        test_script: TestScript = None,
        vllm_url: VllmUrl = None,
        hf_token: HfToken = None,
        thinking: Thinking = False,
        task_id: TaskId = None,
        setup_shell: SetupShell = None,
        upload_files: UploadFiles = None,
        mode: Mode = "transparent_proxy",
        max_tokens_cap: MaxTokensCap = 4096,
        agent_timeout_s: AgentTimeout = 600,
        idempotency_key: IdempotencyKey = None,
    ) -> RolloutResult:
        """Run one rollout to its end and return the result.

        The rollout goes on if the caller leaves. Give an idempotency_key to find it again: the same call
        with the same key returns the same rollout. For rollouts of many minutes, start_rollout and
        finalize_rollout do not depend on one long answer.
        """
        service, record = await _start(
            model_key=model_key, instruction=instruction, test_script=test_script, vllm_url=vllm_url,
            hf_token=hf_token, thinking=thinking, task_id=task_id, setup_shell=setup_shell,
            upload_files=upload_files, mode=mode, max_tokens_cap=max_tokens_cap,
            agent_timeout_s=agent_timeout_s, idempotency_key=idempotency_key,
        )  # fmt: skip
        return await self._collect(service, record.rollout_id, LONGEST_CALL_SECONDS)

    @tool
    async def start_rollout(
        self,
        instruction: Instruction,
        model_key: ModelKey = None,
        test_script: TestScript = None,
        vllm_url: VllmUrl = None,
        hf_token: HfToken = None,
        thinking: Thinking = False,
        task_id: TaskId = None,
        setup_shell: SetupShell = None,
        upload_files: UploadFiles = None,
        mode: Mode = "transparent_proxy",
        max_tokens_cap: MaxTokensCap = 4096,
        agent_timeout_s: AgentTimeout = 600,
        idempotency_key: IdempotencyKey = None,
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
    async def get_state(self, rollout_id: RolloutId) -> RolloutState:
        """Where a rollout stands: queued, running, finished, failed or aborted."""
        service = await _service()
        return state_of(await service.record(rollout_id))

    @tool(read_only=True, idempotent=True)
    async def get_messages(self, rollout_id: RolloutId) -> Messages:
        """OpenCode's own transcript, as far as it has got."""
        service = await _service()
        record, messages = await service.messages(rollout_id)
        return Messages(rollout_id=record.rollout_id, status=status_of(record), messages=messages)

    @tool(idempotent=True, destructive=True)
    async def abort_rollout(self, rollout_id: RolloutId) -> RolloutState:
        """Stop a rollout: the model's answer is cut off at once. One that has ended stays as it is."""
        service = await _service()
        return state_of(await service.abort(rollout_id))

    @tool(idempotent=True)
    async def finalize_rollout(self, rollout_id: RolloutId, wait_s: EndWait = None) -> RolloutResult:
        """The result of a rollout, once it has ended. Asking again gives the same result."""
        return await self._collect(await _service(), rollout_id, LONGEST_CALL_SECONDS if wait_s is None else wait_s)

    @tool(read_only=True, idempotent=True)
    async def subscribe_events(
        self,
        rollout_id: RolloutId,
        after: After = 0,
        wait_s: EventWait = 20,
    ) -> EventPage:
        """Events of a rollout, as soon as there are any. `url` has them as a stream."""
        service = await _service()
        rollout_id = (await service.record(rollout_id)).rollout_id
        events, done = await service.events(rollout_id, after, wait_s)
        last = events[-1]["seq"] if events else after
        return EventPage(events=events, next=last, done=done, url=f"/rollouts/{rollout_id}/events")

    # -- the session's own count ----------------------------------------------------------------

    async def _collect(self, service: OpenCodeRolloutService, rollout_id: str, seconds: float) -> RolloutResult:
        record = await service.wait(rollout_id, seconds)
        if not record.finished:
            raise ToolFailure(
                f"rollout {record.rollout_id} is {status_of(record)} (stage {record.stage}) after {seconds:g} s: "
                "call finalize_rollout again, or abort_rollout"
            )
        result = await service.result(record)
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


async def _service() -> OpenCodeRolloutService:
    from paddock.envs.opencode.rollout_service import get_service

    try:
        return await get_service()
    except PaddockError as error:
        raise ToolFailure(f"no rollout can run here: {error.message} ({error.hint})") from error


async def _start(**arguments: Any) -> tuple[OpenCodeRolloutService, RolloutRecord]:
    from paddock.envs.opencode.request import check_request

    request = check_request(**arguments)
    service = await _service()
    return service, await service.start(request)
