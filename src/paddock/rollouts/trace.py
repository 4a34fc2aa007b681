"""A model call as it is kept, and the trace of all calls of a rollout.

Nothing here knows HTTP, engines or the store. A call holds what was asked, what the engine sampled
token by token, and how it went; `link` finds where each call continues an earlier one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Role(StrEnum):
    """What a call was for."""

    AGENT = "agent"
    SUBAGENT = "subagent"
    TITLE = "title"
    COMPACTION = "compaction"
    RETRIED = "retried"
    """The answer did not reach the agent completely, and the agent asked the same again."""


class Caller(StrEnum):
    """Which process made a call."""

    AGENT = "agent"
    """The agent's own program: its launcher, its binary, and forks of it."""
    FOREIGN = "foreign"
    """Another process in the sandbox, such as one that the agent's shell started. Never trained on."""
    UNKNOWN = "unknown"
    """The sandbox backend cannot tell."""


class LogprobsKind(StrEnum):
    """Which distribution the logprobs of a call belong to. At temperature 1 both are the same."""

    RAW = "raw"
    """The model's own, before the temperature."""
    PROCESSED = "processed"
    """The one that was sampled from, after the temperature."""
    UNKNOWN = "unknown"
    """The endpoint does not say."""


class Level(StrEnum):
    """How much of a call an endpoint gives back, from best to least."""

    TOKENS = "tokens"
    """Prompt ids, sampled ids, and a logprob for each sampled id."""
    LOGPROBS = "logprobs"
    """Logprobs without the ids of prompt or completion: nothing to train on."""
    TEXT = "text"


@dataclass(slots=True)
class Call:
    """One model call."""

    id: str
    """Unique in its rollout: `c0`, `c1`, … in the order the calls began."""
    index: int
    dialect: str = "chat"
    """How the agent spoke to us."""
    role: Role = Role.AGENT
    session: str | None = None
    """The agent's own name for the conversation, where it sends one."""

    request: dict[str, Any] = field(default_factory=dict)
    """The body as the agent sent it, secrets masked."""
    forwarded: dict[str, Any] = field(default_factory=dict)
    """What was changed or added before it went to the engine (messages and tools left out)."""
    prompt_token_ids: list[int] = field(default_factory=list)
    completion_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    """The text of each sampled token, where the engine tells it."""
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    """The alternatives the engine told for each sampled token."""
    message: dict[str, Any] = field(default_factory=dict)
    """The assistant message: content, reasoning_content, tool_calls."""
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    status: int | None = None
    """HTTP status of the last attempt; None when there was no answer."""
    error: str | None = None
    aborted: bool = False
    """The agent or we hung up before the end."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Attempts before the last one: status, error, started, ended."""
    started: float = 0.0
    """Seconds since the epoch, as are `first_token` and `ended`."""
    first_token: float | None = None
    ended: float | None = None

    engine: str = "unknown"
    model: str = ""
    weight_version: str | None = None
    """Whose weights it was sampled from, as the engine told with the answer, or else as the trainer says."""
    admitted_version: str | None = None
    """The weights when the call began, where the trainer says. They changed under way if the two differ."""
    level: Level = Level.TEXT

    parent: str | None = None
    """The call that this one continues: this prompt begins with the parent's whole prompt and goes on behind it, by
    exact tokens. Of several such calls the one with the longest prompt. None if it continues none."""
    shared_tokens: int = 0
    """How many leading tokens of this prompt are the parent's prompt and completion."""

    caller: Caller = Caller.UNKNOWN
    caller_reason: str | None = None
    """Of a foreign caller, which process it was; of an unknown one, why it is unknown."""
    temperature: float | None = None
    """As it was sent to the endpoint. None left it to the endpoint."""
    logprobs_kind: LogprobsKind = LogprobsKind.UNKNOWN
    token_problem: str | None = None
    """Why the tokens that the endpoint returned cannot be used; None if they can, or if it returned none."""

    @property
    def ok(self) -> bool:
        return self.error is None and not self.aborted

    @property
    def trainable(self) -> bool:
        return self.untrainable_because is None

    @property
    def untrainable_because(self) -> str | None:
        """Why a trainer must not use this call; None if it may."""
        if self.caller is Caller.FOREIGN:
            return f"another process than the agent's program made it: {self.caller_reason or 'not known which'}"
        if self.role is Role.RETRIED:
            return "its answer did not reach the agent completely, and the agent asked again"
        if self.aborted:
            return "the call was aborted"
        if self.error is not None:
            return "the call failed"
        if self.token_problem is not None:
            return self.token_problem
        if not self.completion_token_ids or not self.prompt_token_ids:
            return "the endpoint returned no token ids"
        if len(self.completion_token_ids) != len(self.logprobs):
            return "token ids and logprobs differ in number"
        return None


def sent_temperature(call: Call) -> float | None:
    """What the endpoint was told. Stores of before version 3 kept it only with the fields that were sent."""
    told = call.temperature
    if told is None:
        told = (call.forwarded or call.request).get("temperature")
    return float(told) if isinstance(told, int | float) and not isinstance(told, bool) else None


@dataclass(slots=True)
class Event:
    """Something that happened in a rollout, in order: a stage, a line of the agent, a warning."""

    at: float
    kind: str
    data: dict[str, Any] = field(default_factory=dict)


def shared_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items two sequences have in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def link(call: Call, earlier: Sequence[Call]) -> None:
    """Set `parent` and `shared_tokens`: the call that this one continues."""
    best: Call | None = None
    longest = (0, 0)
    for other in earlier:
        size = len(other.prompt_token_ids)
        if other.id == call.id or not 0 < size < len(call.prompt_token_ids):
            continue
        if call.prompt_token_ids[:size] != other.prompt_token_ids:
            continue
        came = call.prompt_token_ids[size : size + len(other.completion_token_ids)]
        shared = (size, size + shared_prefix(other.completion_token_ids, came))
        if shared >= longest:
            best, longest = other, shared
    call.parent = best.id if best else None
    call.shared_tokens = longest[1]
