"""Sessions of environments: a session behind `paddock.Client` gives the tools and the reward.

The environment may be served by Paddock or OpenEnv, or be a class of this process. If it has tools, the model gets
them. If not, the model gets one tool, `act`, whose arguments are the fields of an action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from paddock.client.client import Client
from paddock.errors import ConfigError, InvalidMessage, NotSupported, ServerError, TaskError, ToolFailure
from paddock.rollouts.loop.session import Part, ToolResult, ToolSessions
from paddock.store.outcome import Reward

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.config import RunConfig
    from paddock.tasks.task import Task
    from paddock.types import StepResult

ACT = "act"
NOT_OFFERED = ("metadata", "type")
"""Fields of an action that are not for a model."""
NOT_SHOWN = ("metadata", "reward", "done")


class EnvironmentTools:
    """The tools of one session. `rewards` are those that its steps gave."""

    def __init__(self, client: Client[Any], instruction: str) -> None:
        self.prompt: str = instruction
        self.rewards: list[float] = []
        self._client = client
        self._has_tools = True

    def begin(self, result: StepResult[Any]) -> None:
        """The first observation is part of the task."""
        observation = {name: value for name, value in fields_of(result).items() if name not in NOT_SHOWN}
        if observation:
            text = orjson.dumps(observation, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
            self.prompt = f"{self.prompt}\n\nThe environment shows:\n{text}"

    async def list_tools(self) -> list[dict[str, Any]]:
        try:
            tools = await self._client.tools()
        except (NotSupported, ServerError):
            self._has_tools = False
            schema = (await self._client.schema())["action"]
            return [openai_tool(ACT, "Act in the environment.", action_parameters(schema))]
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
        return self._observe(result)

    def _observe(self, result: StepResult[Any]) -> ToolResult:
        fields = fields_of(result)
        if not self._has_tools:
            observation = {name: value for name, value in fields.items() if name not in NOT_SHOWN or value}
            return ToolResult.of_value(observation, done=result.done)
        if error := fields.get("error"):
            return ToolResult.of_text(f"Error: {error.get('message', error)}", is_error=True, done=result.done)
        return tool_result(fields.get("result"), done=result.done)


class EnvironmentSession:
    """A session of an environment: at a URL, or of a class in this process.

    `arguments` go to `reset`, with the seed. `default_reward` is the reward of an episode in which no step gave one.
    Other options are those of `Client`.
    """

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
        default_reward: float | None = None,
        **options: Any,
    ) -> None:
        own_name = environment_name(target) if isinstance(target, str) else getattr(target, "__name__", "a class")
        self._name = name or own_name
        self._target = target
        self._arguments = {**(arguments or {}), **({} if seed is None else {"seed": seed})}
        self._default_reward = default_reward
        self._client: Client[Any] = Client(target, **options)
        self._tools = EnvironmentTools(self._client, prompt)

    @property
    def is_repeatable(self) -> bool:
        """What the environment declares as `deterministic`."""
        declared = self._client.transport if isinstance(self._target, str) else self._target
        return bool(getattr(declared, "deterministic", False))

    async def open(self) -> None:
        await self._client.transport.open()
        self._tools.begin(await self._client.reset(**self._arguments))

    async def tools(self) -> EnvironmentTools:
        return self._tools

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        """The sum of the rewards of all steps, or the default reward if no step gave one."""
        reward = sum(self._tools.rewards) if self._tools.rewards else self._default_reward
        return Reward.unknown("the environment gave no reward") if reward is None else Reward(reward)

    async def close(self) -> None:
        await self._client.close()

    @property
    def evidence(self) -> dict[str, Any]:
        return {"environment": self._name, "reset": self._arguments, "rewards": list(self._tools.rewards)}


def environment_sessions(config: RunConfig) -> ToolSessions:
    """Each rollout gets a session of the config's `env`. Raises ConfigError if there is none.

    A task may say in its metadata how to begin: `seed`, and `reset` with more arguments. Its verifier, if it has one,
    scores the work; else the environment does.
    """
    env = config.env
    if env is None:
        raise ConfigError("the agent loop needs an environment", hint="add --env TARGET or --env URL")

    def make(task: Task) -> EnvironmentSession:
        seed, arguments = read_seed(task, config.seed), reset_arguments(task)
        return EnvironmentSession(env, task.instruction, seed=seed, arguments=arguments)

    settings = {"env": config.env_name or environment_name(env), "seed": config.seed}
    return ToolSessions(make, "environment", settings, use_task_tests=True)


def environment_name(env: str | Callable[[], Any]) -> str | None:
    """A URL without its credentials, or where a class or function is defined. None for what has no name."""
    if isinstance(env, str):
        parts = urlsplit(env)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    name = getattr(env, "__qualname__", None)
    return None if name is None else f"{getattr(env, '__module__', None)}:{name}"


def read_seed(task: Task, default: int | None) -> int | None:
    seed = task.metadata.get("seed", default)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
        raise TaskError(f"the seed of task {task.id} is {seed!r}", hint="write a whole number, 0 or more")
    return seed


def reset_arguments(task: Task) -> dict[str, Any]:
    arguments = task.metadata.get("reset", {})
    if not isinstance(arguments, dict):
        raise TaskError(f"reset of task {task.id} is {arguments!r}", hint="write an object of arguments")
    return arguments


def tool_result(result: Any, *, done: bool) -> ToolResult:
    """What a tool returned, for a model: blocks of an MCP result become parts of a message."""
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
    observation = result.observation
    fields: dict[str, Any] = observation if isinstance(observation, dict) else observation.model_dump(mode="json")
    return fields


def action_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """An action's schema without what is not for a model."""
    properties = {name: each for name, each in schema.get("properties", {}).items() if name not in NOT_OFFERED}
    return {**schema, "properties": properties}


def openai_tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, **schema}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
