"""The loop: ask the model, do what it calls for, tell it what came of it, until it is done.

Knows a `Chat` and `Tools`. What a rollout is, who captures tokens and who keeps them is not its business.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson

from paddock.distribution import VERSION
from paddock.errors import AgentError, ConfigError
from paddock.rollouts.agents.base import Agent, Installed
from paddock.rollouts.loop.chat import ContextFull
from paddock.rollouts.loop.tools import ToolResult
from paddock.rollouts.trace import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.agents.base import AgentRun, Assignment, Report
    from paddock.rollouts.loop.chat import Chat
    from paddock.rollouts.loop.tools import Part, Tools
    from paddock.rollouts.sandbox.base import Sandbox

SYSTEM = (
    "You work in an environment that you act on only through the given tools. Do the task by calling them. "
    "When it is done, answer without calling a tool."
)
SHOWN = 500

Reason = Literal["answer", "done", "steps", "time", "context"]


@dataclass(frozen=True, slots=True)
class LoopLimits:
    steps: int = 50
    """Tool calls that are carried out."""
    output_chars: int = 20_000
    """The text of one tool result; the middle of a longer one is left out."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.output_chars < 100:
            raise ConfigError(
                f"steps is {self.steps}, output_chars is {self.output_chars}",
                hint="steps start at 1, output_chars at 100",
            )


class LoopAgent(Agent):
    """The loop as a plan names it. It is run by `LoopRollout`, in no sandbox."""

    name: ClassVar[str] = "loop"
    version: ClassVar[str] = VERSION
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True

    def __init__(self, limits: LoopLimits | None = None, *, system: str | None = SYSTEM, driver: str = "run") -> None:
        self.limits = limits or LoopLimits()
        self.system = system
        self.driver = driver

    async def install(self, log: Callable[[str], None], *, timeout: float) -> Installed:
        return Installed(version=self.version)

    async def begin(self, sandbox: Sandbox, assignment: Assignment, report: Report) -> AgentRun:
        raise AgentError(
            "the loop works with tools, not in a sandbox", hint="give it an environment: --env TARGET or --env URL"
        )

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role:
        return Role.AGENT

    def describe(self) -> dict[str, Any]:
        return {"agent": self.name, **asdict(self.limits), "system": self.system}


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """Why a loop ended by itself."""

    reason: Reason
    """`answer`: the model called no tool. `done`: the place said so. Else what was used up."""
    answer: str = ""
    """The last text of the model."""


@dataclass(slots=True)
class Loop:
    """One conversation. `messages` grows while it runs, and stays when it breaks."""

    chat: Chat
    tools: Tools
    limits: LoopLimits = field(default_factory=LoopLimits)
    max_tokens: int = 4096
    system: str | None = SYSTEM
    report: Report | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0

    async def run(self, offered: list[dict[str, Any]], *, seconds: float) -> LoopEnd:
        """Until the model answers without a call, the place says done, or a limit is reached.

        Raises ModelError when the model gives no answer, and what `call_tool` raises.
        """
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": self.tools.prompt})
        try:
            async with asyncio.timeout(seconds) as limit:
                return await self._converse(offered)
        except TimeoutError:
            if not limit.expired():
                raise
            return LoopEnd("time", self._last_text())

    async def _converse(self, offered: list[dict[str, Any]]) -> LoopEnd:
        names = {str(tool["function"]["name"]) for tool in offered}
        while True:
            try:
                said = await self.chat.ask(self.messages, offered, self.max_tokens)
            except ContextFull:
                return LoopEnd("context", self._last_text())
            wanted = [Wanted.read(call, number) for number, call in enumerate(said.tool_calls, self.steps)]
            self.messages.append(remembered(said.message, wanted))
            if not wanted:
                return LoopEnd("answer", self._last_text())
            if (ended := await self._carry_out(wanted, names)) is not None:
                return ended

    async def _carry_out(self, wanted: list[Wanted], names: set[str]) -> LoopEnd | None:
        """Do all calls of an answer, one after the other, as later ones may build on earlier ones."""
        images: list[Part] = []
        ended: LoopEnd | None = None
        for call in wanted:
            if ended is None and self.steps >= self.limits.steps:
                ended = LoopEnd("steps", self._last_text())
            result = NOT_DONE if ended is not None else await self._call(call, names)
            text = shortened(result.text, self.limits.output_chars)
            if result.images:
                text = f"{text}\n[{len(result.images)} image(s), shown in the next message]".lstrip()
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            images += result.images
            if result.done and ended is None:
                ended = LoopEnd("done", self._last_text())
        if images:
            # Most endpoints take images from the user alone, and only after every call has its answer.
            self.messages.append({"role": "user", "content": images})
        return ended

    async def _call(self, call: Wanted, names: set[str]) -> ToolResult:
        self.steps += 1
        if call.problem is not None:
            result = ToolResult.of_text(call.problem, is_error=True)
        elif call.name not in names:
            known = ", ".join(sorted(names))
            result = ToolResult.of_text(f"Error: there is no tool {call.name!r}. Tools: {known}", is_error=True)
        else:
            self._say("tool_call", {"tool": call.name, "arguments": call.arguments, "id": call.id})
            result = await self.tools.call_tool(call.name, call.arguments)
        self._say("tool_result", {"id": call.id, "error": result.is_error, "text": result.text[:SHOWN]})
        return result

    def _say(self, kind: str, data: dict[str, Any]) -> None:
        if self.report is not None:
            self.report(kind, data)

    def _last_text(self) -> str:
        said = (message for message in reversed(self.messages) if message["role"] == "assistant")
        return next((str(message["content"]) for message in said if message.get("content")), "")


NOT_DONE = ToolResult.of_text("Not carried out: the episode is over.", is_error=True)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tool call as the model asked for it."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why it cannot be carried out."""

    @classmethod
    def read(cls, call: dict[str, Any], number: int) -> Wanted:
        function = call.get("function") or {}
        name, given = str(function.get("name") or ""), function.get("arguments")
        own = str(call.get("id") or f"call_{number}")
        try:
            arguments = orjson.loads(given.strip() or "{}") if isinstance(given, str) else given or {}
        except orjson.JSONDecodeError as error:
            told = f"Error: the arguments of {name!r} are not valid JSON ({error}): {str(given)[:SHOWN]}"
            return cls(own, name, problem=told)
        if not isinstance(arguments, dict):
            return cls(own, name, problem=f"Error: the arguments of {name!r} must be a JSON object")
        return cls(own, name, arguments)

    def to_message(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call in the history. Engines refuse a history with arguments that are no JSON object."""
        given = (call.get("function") or {}).get("arguments")
        kept = given if self.problem is None and isinstance(given, str) and given.strip() else None
        written = orjson.dumps(self.arguments).decode() if kept is None else kept
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": written}}


def remembered(message: dict[str, Any], wanted: list[Wanted]) -> dict[str, Any]:
    """The model's own message as it goes into the history, its thoughts included."""
    kept = {"role": "assistant", "content": message.get("content") or ("" if not wanted else None)}
    if message.get("reasoning_content"):
        kept["reasoning_content"] = message["reasoning_content"]
    if wanted:
        calls = zip(wanted, message["tool_calls"], strict=True)
        kept["tool_calls"] = [call.to_message(given) for call, given in calls]
    return kept


def shortened(text: str, most: int) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
