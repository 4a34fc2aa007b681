"""The record of a model call: the request, the sampled tokens, the times, and how it ended.

Nothing here knows HTTP, engines or the store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Role(StrEnum):
    """The purpose of a call."""

    AGENT = "agent"
    SUBAGENT = "subagent"
    TITLE = "title"
    COMPACTION = "compaction"
    RETRIED = "retried"
    """The response did not reach the agent completely, and the agent repeated the call."""


class Caller(StrEnum):
    """Which process made a call."""

    AGENT = "agent"
    """The agent's own program: its launcher, its binary, and forks of it."""
    FOREIGN = "foreign"
    """Another process in the sandbox, such as one that the agent's shell started. Never trained on."""
    UNKNOWN = "unknown"
    """The sandbox backend cannot find out."""


class LogprobsKind(StrEnum):
    """Which distribution the logprobs of a call belong to. At temperature 1 both are the same."""

    RAW = "raw"
    """The model's own, before the temperature."""
    PROCESSED = "processed"
    """The one that was sampled from, after the temperature."""
    UNKNOWN = "unknown"
    """The endpoint does not say."""


class Level(StrEnum):
    """How much of a call an endpoint returns, from best to least."""

    TOKENS = "tokens"
    """Prompt ids, sampled ids, and a logprob for each sampled id."""
    LOGPROBS = "logprobs"
    """Logprobs without the ids of prompt or completion: nothing to train on."""
    TEXT = "text"


@dataclass(slots=True, repr=False)
class Call:
    """One model call."""

    id: str
    """Unique in its rollout: `c0`, `c1`, … in the order the calls began."""
    index: int
    """Its place among the calls, from 0."""
    dialect: str = "chat"
    """The API that the agent used."""
    role: Role = Role.AGENT
    """The purpose of the call."""
    session: str | None = None
    """The agent's own id of the conversation, if it sends one."""

    request: dict[str, Any] = field(default_factory=dict)
    """The body as the agent sent it, secrets masked."""
    forwarded: dict[str, Any] = field(default_factory=dict)
    """The fields of the request to the engine, without messages and tools. Secrets are masked."""
    prompt_token_ids: list[int] = field(default_factory=list)
    """The prompt, as the engine tokenized it."""
    completion_token_ids: list[int] = field(default_factory=list)
    """The sampled tokens."""
    logprobs: list[float] = field(default_factory=list)
    """One for each sampled token."""
    tokens: list[str] = field(default_factory=list)
    """The text of each sampled token, if the engine returns it."""
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    """The alternatives that the engine returned for each sampled token."""
    message: dict[str, Any] = field(default_factory=dict)
    """The assistant message: content, reasoning_content, tool_calls."""
    finish_reason: str | None = None
    """Why sampling ended: stop, length or tool_calls."""
    usage: dict[str, Any] = field(default_factory=dict)
    """The token counts that the endpoint reported."""

    status: int | None = None
    """HTTP status of the last attempt; None without a response."""
    error: str | None = None
    """What broke; None if nothing did."""
    aborted: bool = False
    """The agent or the proxy ended it early."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Attempts before the last one: status, error, started, ended."""
    started: float = 0.0
    """Seconds since the epoch, as are `first_token` and `ended`."""
    first_token: float | None = None
    """When the first token came; None without one."""
    ended: float | None = None
    """When it ended; None while it runs."""
    paused_seconds: float = 0.0
    """How long it waited for pauses to end, with the attempts that pauses cut off."""

    engine: str = "unknown"
    """The inference engine."""
    model: str = ""
    """The name of the model."""
    weight_version: str | None = None
    """The weights that it was sampled from, as the engine reported them, or else the trainer."""
    admitted_version: str | None = None
    """The weights when the call began, if the trainer reports them. They changed during the call if the two
    differ."""
    level: Level = Level.TEXT
    """How much the endpoint returned."""

    parent: str | None = None
    """The call that this one continues: this prompt starts with the parent's whole prompt and is longer, by exact
    tokens. Of several such calls, the one with the longest prompt. None if there is none."""
    shared_tokens: int = 0
    """How many leading tokens of this prompt are the parent's prompt and completion."""

    caller: Caller = Caller.UNKNOWN
    """Which process made the call."""
    caller_reason: str | None = None
    """Of a foreign caller, which process it was; of an unknown one, why it is unknown."""
    temperature: float | None = None
    """As it was sent to the endpoint; None if it was not."""
    logprobs_kind: LogprobsKind = LogprobsKind.UNKNOWN
    """Which distribution the logprobs belong to."""
    token_problem: str | None = None
    """Why the tokens that the endpoint returned cannot be used; None if they can, or if it returned none."""
    step: str = ""
    """The step of the task in which it was made; empty for a task without steps."""
    replayed_from: str | None = None
    """The recorded call, ROLLOUT/CALL, whose answer was sent again. None: it was sampled for this rollout."""
    is_copy: bool = False
    """Another rollout trains on the same answer, so this one must not. Exports of several rollouts decide it anew."""
    snapshot: dict[str, Any] = field(default_factory=dict)
    """The work folder when it began: see `store.snapshots.CallSnapshot`. Empty if none was asked for."""
    tool_results: dict[str, str] = field(default_factory=dict)
    """Results of tools that the model got in place of those in the request (see `recorded.tool_results`)."""

    token_mode: dict[str, Any] | None = None
    """How the prompt ids were made in token mode; None outside of it. `render` is `first`, `bridge` (extends the call
    `continues`), `full` or `engine`; `renderer` is the model family; `reason` says why it is no extension; `branch`
    is set if the history was edited or continued a second time; `malformed_tool_calls` lists those of the answer."""

    @property
    def ok(self) -> bool:
        """Whether the agent got a complete answer."""
        return self.error is None and not self.aborted

    def __repr__(self) -> str:
        ending = (
            "aborted" if self.aborted else self.finish_reason if self.error is None else f"error={self.error[:80]!r}"
        )
        tokens = f"{len(self.prompt_token_ids)}+{len(self.completion_token_ids)} tokens"
        return f"<Call {self.id} {self.role} {self.level} {tokens} {ending}>"

    @property
    def trainable(self) -> bool:
        """Whether the call can be trained on; `untrainable_because` has the reason if not."""
        return self.untrainable_because is None

    @property
    def untrainable_because(self) -> str | None:
        """Why a trainer must not use this call; None if it may."""
        if self.caller is Caller.FOREIGN:
            return f"another process than the agent's program made it: {self.caller_reason or 'not known which'}"
        if self.role is Role.RETRIED:
            return "its answer did not reach the agent completely, and the agent asked again"
        if self.is_copy:
            origin = f", which was replayed from {self.replayed_from}" if self.replayed_from else ""
            return f"another rollout trains on its answer{origin}"
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
    """The temperature that was sent. Stores before version 3 have it only among the fields of the request."""
    value = call.temperature
    if value is None:
        value = (call.forwarded or call.request).get("temperature")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


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
