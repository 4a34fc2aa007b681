"""The shapes that the tools answer with, made from what the store keeps. Knows nothing of live rollouts.

A rollout is in one of five states:

    queued    it waits until fewer rollouts are running
    running   any stage from connecting to the model to verifying
    finished  the work of the agent was scored: outcome ok, timeout or budget
    failed    something broke before there was anything to score: `outcome` says who
    aborted   it was stopped: outcome cancelled
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from paddock.store.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.capture.trace import Call
    from paddock.store.record import RolloutRecord

TAIL = 8 * 1024
"""Characters kept of each log."""


class Status(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


class Turn(BaseModel):
    """One model call that was captured."""

    turn: int
    role: str = "agent"
    """agent, subagent, title, compaction or retried."""
    finish_reason: str | None = None
    prompt_token_ids: list[int] = Field(default_factory=list)
    completion_token_ids: list[int] = Field(default_factory=list)
    per_token_logps: list[float] = Field(default_factory=list)
    completion_tokens: list[str] = Field(default_factory=list)
    """The text of each sampled token, where the engine tells it."""
    prompt_token_count: int = 0
    completion_token_count: int = 0
    latency_s: float | None = None
    error: str | None = None
    parent: int | None = None
    """The turn whose prompt and completion this prompt continues, token by token."""
    trainable: bool = False


class RolloutState(BaseModel):
    """Where a rollout stands."""

    rollout_id: str
    task_id: str
    status: Status
    """queued, running, finished, failed or aborted."""
    stage: str = "queued"
    """queued, model (connecting to it), install, sandbox, setup, agent, verifier or done."""
    outcome: str | None = None
    serve_session_id: str | None = None
    """OpenCode's own session."""
    proxy_turns_so_far: int = 0
    error: str | None = None
    started_at: float | None = None
    """Seconds since the epoch, as is `finished_at`; None until it has begun."""
    finished_at: float | None = None


class RolloutResult(BaseModel):
    """How a rollout ended, and all that it left behind."""

    rollout_id: str
    task_id: str
    sandbox_id: str | None = None
    status: Status
    outcome: str | None = None
    """ok, or who broke: task, agent, model, sandbox, environment, verifier, timeout, budget, cancelled."""
    reward: float | None = None
    """None means that nobody knows, which is not 0."""
    reward_reason: str | None = None
    """Why there is no reward."""
    exit_code: int | None = None
    wall_s: float | None = None
    mode: str = "transparent_proxy"
    proxy_turns: list[Turn] = Field(default_factory=list)
    workdir_files: list[str] = Field(default_factory=list)
    agent_log_tail: str = ""
    verifier_stdout: str = ""
    verifier_stderr: str = ""
    test_exit_code: int | None = None
    error: str | None = None
    proxy_log_tail: str = ""
    install_log_tail: str = ""


class Messages(BaseModel):
    """OpenCode's own transcript."""

    rollout_id: str
    status: Status
    messages: list[dict[str, Any]] = Field(default_factory=list)


class EventPage(BaseModel):
    """Events of a rollout, in order."""

    events: list[dict[str, Any]] = Field(default_factory=list)
    """Each has its number `seq`, its time `at`, its `kind` and its `data`."""
    next: int = 0
    """Ask for events after this one to go on."""
    done: bool = False
    """Nothing follows."""
    url: str = ""
    """The same events as a server-sent stream."""


def status_of(record: RolloutRecord) -> Status:
    outcome = record.outcome
    if outcome is None:
        return Status.QUEUED if record.stage == "queued" else Status.RUNNING
    if outcome is Outcome.CANCELLED:
        return Status.ABORTED
    return Status.FINISHED if outcome.keeps_reward else Status.FAILED


def state_of(record: RolloutRecord) -> RolloutState:
    status = status_of(record)
    own = {
        "status": status,
        "serve_session_id": record.agent_session,
        "proxy_turns_so_far": record.call_count,
        "started_at": None if status is Status.QUEUED else record.started_at,
    }
    return RolloutState(**{**_same_fields(RolloutState, record), **own})


def result_of(record: RolloutRecord, calls: Iterable[Call]) -> RolloutResult:
    own = {
        "status": status_of(record),
        "proxy_turns": turns_of(calls),
        "agent_log_tail": record.agent_log[-TAIL:],
        "verifier_stdout": record.verifier_stdout[-TAIL:],
        "verifier_stderr": record.verifier_stderr[-TAIL:],
        "proxy_log_tail": record.proxy_log[-TAIL:],
        "install_log_tail": record.install_log[-TAIL:],
    }
    return RolloutResult(**{**_same_fields(RolloutResult, record), **own})


def _same_fields(model: type[BaseModel], record: RolloutRecord) -> dict[str, Any]:
    """The fields of an answer that the record has under the same name."""
    return {name: getattr(record, name) for name in model.model_fields if hasattr(record, name)}


def turns_of(calls: Iterable[Call]) -> list[Turn]:
    """The calls as turns, in the order they began. A parent is named by the number of its turn."""
    ordered = sorted(calls, key=lambda call: call.index)
    numbers = {call.id: turn for turn, call in enumerate(ordered)}
    return [_turn(call, turn, numbers) for turn, call in enumerate(ordered)]


def _turn(call: Call, turn: int, numbers: dict[str, int]) -> Turn:
    return Turn(
        turn=turn,
        role=call.role,
        finish_reason=call.finish_reason,
        prompt_token_ids=call.prompt_token_ids,
        completion_token_ids=call.completion_token_ids,
        per_token_logps=call.logprobs,
        completion_tokens=call.tokens,
        prompt_token_count=_count(call.usage.get("prompt_tokens"), call.prompt_token_ids),
        completion_token_count=_count(call.usage.get("completion_tokens"), call.completion_token_ids),
        latency_s=None if call.ended is None else call.ended - call.started,
        error=call.error or ("aborted" if call.aborted else None),
        parent=None if call.parent is None else numbers.get(call.parent),
        trainable=call.trainable,
    )


def _count(reported: Any, ids: list[int]) -> int:
    """The number of ids, or what the engine reports where there are none."""
    return len(ids) or (reported if isinstance(reported, int) else 0)
