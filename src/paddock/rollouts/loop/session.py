"""The interface of tool sessions: where the tool-calling loop works.

`rollouts/loop/environment.py` implements it for environments, `fleet/run.py` for fleet instances. Any object with
these methods can be used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.store.outcome import Reward
    from paddock.tasks.task import Task

Part = dict[str, Any]
"""A part of a chat message: `{"type": "text", "text": …}` or `{"type": "image_url", "image_url": {"url": …}}`."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool, as parts of a message."""

    parts: tuple[Part, ...]
    is_error: bool = False
    done: bool = False
    """The episode is over; the model is not asked again."""

    @classmethod
    def of_text(cls, text: str, *, is_error: bool = False, done: bool = False) -> ToolResult:
        return cls(({"type": "text", "text": text},), is_error, done)

    @classmethod
    def of_value(cls, value: Any, *, is_error: bool = False, done: bool = False) -> ToolResult:
        """A text as it is, a list of message parts as they are, anything else as JSON."""
        if isinstance(value, str):
            return cls.of_text(value, is_error=is_error, done=done)
        if isinstance(value, list) and value and all(is_part(item) for item in value):
            return cls(tuple(value), is_error, done)
        text = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        return cls.of_text(text, is_error=is_error, done=done)

    @property
    def text(self) -> str:
        return "\n".join(str(part.get("text", "")) for part in self.parts if part.get("type") == "text")

    @property
    def images(self) -> list[Part]:
        return [part for part in self.parts if part.get("type") == "image_url"]


def is_part(value: Any) -> bool:
    """Whether it is a text part or an image part of a chat message."""
    if not isinstance(value, dict):
        return False
    if value.get("type") == "text":
        return isinstance(value.get("text"), str)
    return value.get("type") == "image_url" and isinstance(value.get("image_url"), dict)


class Tools(Protocol):
    """A task and the tools to do it with."""

    @property
    def prompt(self) -> str | list[Part]:
        """What the model is asked to do: a text, or parts of a message."""

    async def list_tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI form: `{"type": "function", "function": {name, description, parameters}}`."""

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Carry out a call. An error that the model can correct (an unknown tool, wrong arguments, a failure of the
        tool) is a result with `is_error`. Raises PaddockError only if the session itself is broken or gone."""


class ToolSession(Protocol):
    """Made for one rollout. All but `close` may raise PaddockError: a broken session is outcome `environment`."""

    is_scored: bool
    """Whether the session gives a reward. If so, an unknown reward is outcome `verifier`."""

    @property
    def is_repeatable(self) -> bool:
        """Whether the same actions lead to the same results in a new session. Known once it is open."""

    async def open(self) -> None:
        """Prepare the session: create an instance, open a session, reset it."""

    async def tools(self) -> Tools:
        """The task and the tools, once the session is ready."""

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        """The reward, given the whole conversation. Called at most once, after the last tool call."""

    async def close(self) -> None:
        """Release everything, also after `open` was cancelled. Called once, and always runs to its end."""

    @property
    def evidence(self) -> dict[str, Any]:
        """Facts for the record's metadata, such as rewards, seed and state; as far as they are known now."""

    @property
    def verifier_log(self) -> str:
        """What the verifier printed."""


@dataclass(frozen=True, slots=True)
class ToolSessions:
    """How the sessions of a run are made."""

    make: Callable[[Task], ToolSession]
    kind: str
    """What a record has in its field `sandbox`: `environment` or `fleet`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Their settings: stored with each rollout, and compared when a batch is resumed."""
    use_task_tests: bool = False
    """Whether a task's own tests, if it has any, score the work in place of the session."""
