"""The tool-calling loop: ask the model, carry out its tool calls, send it the results, until it is done.

Knows a `ChatClient` and `Tools`. Knows nothing of rollouts, of the capture of tokens, or of the store.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import orjson

from paddock.agents.base import AgentBase
from paddock.capture.trace import Role
from paddock.distribution import VERSION
from paddock.errors import ConfigError
from paddock.rollouts.loop.chat import ContextFull
from paddock.rollouts.loop.session import ToolResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.agents.base import Report
    from paddock.capture.paused_time import AgentDeadline
    from paddock.rollouts.loop.chat import ChatClient
    from paddock.rollouts.loop.session import Part, Tools
    from paddock.sandbox.base import Mount

SYSTEM = (
    "You work in an environment that you act on only through the given tools. Do the task by calling them. "
    "When it is done, answer without calling a tool."
)
EVENT_CHARACTERS = 500
"""How many characters of a tool's text an event keeps."""

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


class LoopAgent(AgentBase):
    """The agent `loop`: settings of the tool-calling loop. `LoopScene` runs it in this process, without a sandbox."""

    name: ClassVar[str] = "loop"
    version: ClassVar[str] = VERSION
    live_events: ClassVar[bool] = True
    clean_abort: ClassVar[bool] = True

    def __init__(self, limits: LoopLimits | None = None, *, system: str | None = SYSTEM, driver: str = "run") -> None:
        self.limits = limits or LoopLimits()
        self.system = system
        self.driver = driver

    async def fetch(self, log: Callable[[str], None], *, timeout: float) -> tuple[Mount, ...]:
        return ()

    def classify(self, body: dict[str, Any], headers: Mapping[str, str]) -> Role:
        return Role.AGENT

    def describe(self) -> dict[str, Any]:
        return {"agent": self.name, **asdict(self.limits), "system": self.system}


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """Why a loop ended by itself."""

    reason: Reason
    """`answer`: the model called no tool. `done`: the session said so. Else what was used up."""
    answer: str = ""
    """The last text of the model."""


@dataclass(slots=True)
class ToolLoop:
    """One conversation. `messages` grows while it runs, and stays when it breaks."""

    chat: ChatClient
    tools: Tools
    limits: LoopLimits = field(default_factory=LoopLimits)
    max_tokens: int = 4096
    system: str | None = SYSTEM
    report: Report | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0

    async def run(self, schemas: list[dict[str, Any]], *, deadline: AgentDeadline) -> LoopEnd:
        """Until the model answers without a call, the session says done, or a limit is reached.

        `schemas` are the tools as the model is offered them. Raises ModelError when the model gives no answer, and
        what `call_tool` raises.
        """
        if self.system:
            self.messages.append({"role": "system", "content": self.system})
        self.messages.append({"role": "user", "content": self.tools.prompt})
        try:
            async with deadline.limit() as limit:
                return await self._converse(schemas)
        except TimeoutError:
            if not limit.expired():
                raise
            return LoopEnd("time", self._last_text())

    async def _converse(self, schemas: list[dict[str, Any]]) -> LoopEnd:
        names = {str(tool["function"]["name"]) for tool in schemas}
        while True:
            try:
                reply = await self.chat.complete(self.messages, schemas, self.max_tokens)
            except ContextFull:
                return LoopEnd("context", self._last_text())
            calls = [RequestedToolCall.read(call, number) for number, call in enumerate(reply.tool_calls, self.steps)]
            self.messages.append(assistant_message(reply.message, calls))
            if not calls:
                return LoopEnd("answer", self._last_text())
            if (end := await self._carry_out(calls, names)) is not None:
                return end

    async def _carry_out(self, calls: list[RequestedToolCall], names: set[str]) -> LoopEnd | None:
        """Do all calls of an answer, one after the other, as later ones may build on earlier ones."""
        images: list[Part] = []
        end: LoopEnd | None = None
        for call in calls:
            if end is None and self.steps >= self.limits.steps:
                end = LoopEnd("steps", self._last_text())
            result = NOT_DONE if end is not None else await self._call(call, names)
            text = shorten(result.text, self.limits.output_chars)
            if result.images:
                text = f"{text}\n[{len(result.images)} image(s), shown in the next message]".lstrip()
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            images += result.images
            if result.done and end is None:
                end = LoopEnd("done", self._last_text())
        if images:
            # Most endpoints take images from the user alone, and only after every call has its answer.
            self.messages.append({"role": "user", "content": images})
        return end

    async def _call(self, call: RequestedToolCall, names: set[str]) -> ToolResult:
        self.steps += 1
        if call.problem is not None:
            result = ToolResult.of_text(call.problem, is_error=True)
        elif call.name not in names:
            tools = ", ".join(sorted(names))
            result = ToolResult.of_text(f"Error: there is no tool {call.name!r}. Tools: {tools}", is_error=True)
        else:
            self._emit("tool_call", {"tool": call.name, "arguments": call.arguments, "id": call.id})
            result = await self.tools.call_tool(call.name, call.arguments)
        self._emit("tool_result", {"id": call.id, "error": result.is_error, "text": result.text[:EVENT_CHARACTERS]})
        return result

    def _emit(self, kind: str, data: dict[str, Any]) -> None:
        if self.report is not None:
            self.report(kind, data)

    def _last_text(self) -> str:
        replies = (message for message in reversed(self.messages) if message["role"] == "assistant")
        return next((str(message["content"]) for message in replies if message.get("content")), "")


NOT_DONE = ToolResult.of_text("Not carried out: the episode is over.", is_error=True)


@dataclass(frozen=True, slots=True)
class RequestedToolCall:
    """A tool call as the model asked for it."""

    id: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    """Why it cannot be carried out."""

    @classmethod
    def read(cls, call: dict[str, Any], number: int) -> RequestedToolCall:
        function = call.get("function") or {}
        name, text = str(function.get("name") or ""), function.get("arguments")
        call_id = str(call.get("id") or f"call_{number}")
        try:
            arguments = orjson.loads(text.strip() or "{}") if isinstance(text, str) else text or {}
        except orjson.JSONDecodeError as error:
            excerpt = str(text)[:EVENT_CHARACTERS]
            problem = f"Error: the arguments of {name!r} are not valid JSON ({error}): {excerpt}"
            return cls(call_id, name, problem=problem)
        if not isinstance(arguments, dict):
            return cls(call_id, name, problem=f"Error: the arguments of {name!r} must be a JSON object")
        return cls(call_id, name, arguments)

    def to_message(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call in the history. Engines refuse a history with arguments that are no JSON object."""
        text = (call.get("function") or {}).get("arguments")
        if self.problem is not None or not isinstance(text, str) or not text.strip():
            text = orjson.dumps(self.arguments).decode()
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": text}}


def assistant_message(message: dict[str, Any], calls: list[RequestedToolCall]) -> dict[str, Any]:
    """The model's own message as it goes into the history, its thoughts included."""
    entry = {"role": "assistant", "content": message.get("content") or ("" if not calls else None)}
    if message.get("reasoning_content"):
        entry["reasoning_content"] = message["reasoning_content"]
    if calls:
        pairs = zip(calls, message["tool_calls"], strict=True)
        entry["tool_calls"] = [call.to_message(original) for call, original in pairs]
    return entry


def shorten(text: str, limit: int) -> str:
    """The beginning and the end of a long text."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"
