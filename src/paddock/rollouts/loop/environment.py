"""Scenes of Paddock and OpenEnv environments: a session behind `paddock.Client` gives the tools and the reward.

An environment with tools offers them. One without offers a single tool, `step`, that takes its action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.client.client import Client
from paddock.errors import InvalidMessage, NotSupported, ServerError, ToolFailure
from paddock.rollouts.loop.tools import ToolResult
from paddock.rollouts.outcome import Reward

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.types import StepResult

STEP = "step"


class EnvironmentTools:
    """The tools of one session. `rewards` are those that its steps gave."""

    def __init__(self, client: Client[Any], prompt: str) -> None:
        self.prompt = prompt
        self.rewards: list[float] = []
        self._client = client
        self._has_tools = True

    async def list_tools(self) -> list[dict[str, Any]]:
        try:
            tools = await self._client.tools()
        except (NotSupported, ServerError):
            self._has_tools = False
            schema = (await self._client.schema())["action"]
            return [openai_tool(STEP, "Act in the environment.", schema)]
        return [openai_tool(tool.name, tool.description, tool.input_schema) for tool in tools]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        action: dict[str, Any] = arguments
        if self._has_tools:
            action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            result = await self._client.step(action)
        except (ToolFailure, InvalidMessage) as error:
            return ToolResult.of_text(f"Error: {error.message}", is_error=True)
        if result.reward is not None:
            self.rewards.append(float(result.reward))
        return self._told(result)

    def _told(self, result: StepResult[Any]) -> ToolResult:
        seen = result.observation
        fields = seen if isinstance(seen, dict) else seen.model_dump(mode="json")
        if not self._has_tools:
            return ToolResult.of_value(fields, done=result.done)
        if error := fields.get("error"):
            return ToolResult.of_text(f"Error: {error.get('message', error)}", is_error=True, done=result.done)
        return ToolResult.of_value(fields.get("result"), done=result.done)


class EnvironmentScene:
    """A session of an environment: at a URL, or of a class in this process."""

    kind = "environment"
    is_scored = False
    verifier_log = ""

    def __init__(
        self, target: str | Callable[[], Any], prompt: str, *, seed: int | None = None, **options: Any
    ) -> None:
        self._target = target
        self._seed = seed
        self._client: Client[Any] = Client(target, **options)
        self._tools = EnvironmentTools(self._client, prompt)

    async def open(self) -> None:
        await self._client.transport.open()
        await self._client.reset(**({} if self._seed is None else {"seed": self._seed}))

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
        named = self._target if isinstance(self._target, str) else getattr(self._target, "__name__", "a class")
        return {"environment": named, "seed": self._seed}


def openai_tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, **schema}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
