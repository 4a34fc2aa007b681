"""Scenes of environments: a session behind `paddock.Client` gives the tools and the reward.

Any environment that Paddock or OpenEnv serve, or that is a class here. One with tools offers them; one without offers
a single tool, `act`, that takes its action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from paddock.client.client import Client
from paddock.errors import InvalidMessage, NotSupported, ServerError, ToolFailure
from paddock.rollouts.loop.tools import Part, ToolResult
from paddock.rollouts.outcome import Reward

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.types import StepResult

ACT = "act"
NOT_OFFERED = ("metadata", "type")
"""Fields of an action that say nothing to a model."""
NOT_SHOWN = ("metadata", "reward", "done")


class EnvironmentTools:
    """The tools of one session. `rewards` are those that its steps gave."""

    def __init__(self, client: Client[Any], instruction: str) -> None:
        self.prompt: str = instruction
        self.rewards: list[float] = []
        self._client = client
        self._has_tools = True

    def begin(self, result: StepResult[Any]) -> None:
        """What the environment shows at the start is part of the task."""
        seen = {name: value for name, value in fields_of(result).items() if name not in NOT_SHOWN}
        if seen:
            shown = orjson.dumps(seen, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
            self.prompt = f"{self.prompt}\n\nThe environment shows:\n{shown}"

    async def list_tools(self) -> list[dict[str, Any]]:
        try:
            tools = await self._client.tools()
        except (NotSupported, ServerError):
            self._has_tools = False
            schema = (await self._client.schema())["action"]
            return [openai_tool(ACT, "Act in the environment.", offered(schema))]
        return [openai_tool(tool.name, tool.description, tool.input_schema) for tool in tools]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        action: dict[str, Any] = arguments
        if self._has_tools:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            result = await self._client.step(action)
        except ToolFailure as error:
            return ToolResult.of_text(f"Error: {error.message}", is_error=True)
        except InvalidMessage as error:
            return ToolResult.of_text(f"Error: {'; '.join(error.problems) or error.message}", is_error=True)
        if result.reward is not None:
            self.rewards.append(float(result.reward))
        return self._told(result)

    def _told(self, result: StepResult[Any]) -> ToolResult:
        fields = fields_of(result)
        if not self._has_tools:
            seen = {name: value for name, value in fields.items() if name not in NOT_SHOWN or value}
            return ToolResult.of_value(seen, done=result.done)
        if error := fields.get("error"):
            return ToolResult.of_text(f"Error: {error.get('message', error)}", is_error=True, done=result.done)
        return told(fields.get("result"), done=result.done)


class EnvironmentScene:
    """A session of an environment: at a URL, or of a class in this process.

    `arguments` go to `reset`, the seed among them. Other options are those of `Client`.
    """

    kind = "environment"
    is_scored = False
    verifier_log = ""

    def __init__(
        self,
        target: str | Callable[[], Any],
        prompt: str,
        *,
        seed: int | None = None,
        arguments: dict[str, Any] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        self._name = name or (target if isinstance(target, str) else getattr(target, "__name__", "a class"))
        self._arguments = {**(arguments or {}), **({} if seed is None else {"seed": seed})}
        self._client: Client[Any] = Client(target, **options)
        self._tools = EnvironmentTools(self._client, prompt)

    async def open(self) -> None:
        await self._client.transport.open()
        self._tools.begin(await self._client.reset(**self._arguments))

    async def tools(self) -> EnvironmentTools:
        return self._tools

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        """The sum of what the steps were worth."""
        rewards = self._tools.rewards
        return Reward(sum(rewards)) if rewards else Reward.unknown("the environment gave no reward")

    async def close(self) -> None:
        await self._client.close()

    @property
    def evidence(self) -> dict[str, Any]:
        return {"environment": self._name, "reset": self._arguments, "rewards": list(self._tools.rewards)}


def told(result: Any, *, done: bool) -> ToolResult:
    """What a tool returned, as a model is told: blocks of an MCP result become parts of a message."""
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return ToolResult.of_value(result, done=done)
    parts = [part for block in result["content"] if (part := part_of(block)) is not None]
    failed = bool(result.get("isError") or result.get("is_error"))
    return ToolResult(tuple(parts) or ({"type": "text", "text": ""},), failed, done)


def part_of(block: Any) -> Part | None:
    """A block of MCP content as a part of a chat message."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    if kind == "image":
        url = f"data:{block.get('mimeType', 'image/png')};base64,{block.get('data', '')}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "resource" and isinstance(block.get("resource"), dict):
        return {"type": "text", "text": str(block["resource"].get("text") or block["resource"].get("uri") or "")}
    return {"type": "text", "text": orjson.dumps(block, default=str).decode()} if kind else None


def fields_of(result: StepResult[Any]) -> dict[str, Any]:
    seen = result.observation
    fields: dict[str, Any] = seen if isinstance(seen, dict) else seen.model_dump(mode="json")
    return fields


def offered(schema: dict[str, Any]) -> dict[str, Any]:
    """An action's schema without what is not for a model."""
    properties = {name: each for name, each in schema.get("properties", {}).items() if name not in NOT_OFFERED}
    return {**schema, "properties": properties}


def openai_tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, **schema}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
