"""Episodes of an environment for code that is not async: reset it, call its tools, read the reward.

All episodes of an `EnvironmentHandle` share one thread with an event loop, and each keeps its session from one
episode to the next.
"""

from __future__ import annotations

import atexit
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import orjson

from paddock.client.client import COMMON_RESET_ARGUMENTS, Client
from paddock.errors import PaddockError, ToolFailure
from paddock.loop_thread import LoopThread
from paddock.rollouts.loop.environment import EnvironmentTools
from paddock.targets import load_target
from paddock.types import ToolInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paddock.rollouts.loop.session import ToolResult

EPISODE_OVER = "The episode is over."


@dataclass(slots=True)
class EnvironmentHandle:
    """An environment at a URL, or one that runs in this process."""

    target: str | Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    """For the client: `token`, `timeouts`, `reconnect`, …"""
    thread: LoopThread = field(default_factory=lambda: LoopThread("paddock-trainer"))
    name: str = "Environment"
    tools: list[ToolInfo] = field(default_factory=list)
    reset_arguments: frozenset[str] = COMMON_RESET_ARGUMENTS
    _clients: WeakSet[Client[Any]] = field(default_factory=WeakSet)

    def __post_init__(self) -> None:
        self.thread.call(self._describe)
        # Trainers never close their environments, and asyncio warns about a loop that still runs at exit.
        atexit.register(self.close)

    def client(self) -> Client[Any]:
        """A new client of the environment, which `close` closes with the others."""
        target = self.target
        if isinstance(target, str) and not target.startswith(("http://", "https://")):
            target, _ = load_target(target)
        client: Client[Any] = Client(target, **self.options)
        self._clients.add(client)
        return client

    def close(self) -> None:
        """End every session."""
        atexit.unregister(self.close)
        for client in list(self._clients):
            self.thread.call(client.close)
        self._clients.clear()
        self.thread.close()

    async def _describe(self) -> None:
        client = self.client()
        async with client:
            schemas, metadata = await client.schema(), await client.metadata()
            offered = await EnvironmentTools(client, "").list_tools()
        self.name = str(metadata.get("name") or self.name)
        self.reset_arguments |= frozenset((schemas.get("reset") or {}).get("properties") or ())
        functions = [each["function"] for each in offered]
        self.tools = [
            ToolInfo(name=each["name"], description=each["description"], input_schema=each["parameters"])
            for each in functions
        ]


class SyncEpisode:
    """One session. An error that breaks it is raised, and leaves it without a reward."""

    def __init__(self, environment: EnvironmentHandle) -> None:
        self._environment = environment
        self._client: Client[Any] | None = None
        self._tools: EnvironmentTools | None = None
        self.is_over = False
        self.failure: PaddockError | None = None

    def begin(self, row: Mapping[str, Any]) -> str:
        """Begin an episode; returns the first observation. Of a row, the arguments of `reset` are passed on.

        A row without a seed has one made from its content: all generations of a row play the same episode.
        """
        arguments = {name: row[name] for name in self._environment.reset_arguments if row.get(name) is not None}
        if "seed" not in arguments and (seed := derive_seed(row)) is not None:
            arguments["seed"] = seed
        self.is_over, self.failure = False, None
        tools: EnvironmentTools = self._call(self._begin, arguments)
        return tools.prompt.lstrip()

    def act(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool. Raises ToolFailure for what the caller did wrong."""
        if self.is_over:
            return EPISODE_OVER
        result: ToolResult = self._call(self._act, name, arguments)
        self.is_over = result.done
        if result.is_error:
            raise ToolFailure(result.text.removeprefix("Error: "), tool_name=name)
        return result.text

    @property
    def reward(self) -> float | None:
        """The sum of all rewards; None if there was none, or something broke."""
        rewards = [] if self._tools is None else self._tools.rewards
        return sum(rewards) if rewards and self.failure is None else None

    def close(self) -> None:
        """Close the episode's session, if it is open."""
        client, self._client, self._tools = self._client, None, None
        if client is not None:
            self._environment.thread.call(client.close)

    def _call(self, function: Any, *arguments: Any) -> Any:
        try:
            return self._environment.thread.call(function, *arguments)
        except PaddockError as error:
            self.failure = error
            raise

    async def _begin(self, arguments: dict[str, Any]) -> EnvironmentTools:
        if self._client is None:
            client = self._environment.client()
            await client.transport.open()
            self._client = client
        tools = self._tools = EnvironmentTools(self._client, "")
        # The list tells whether an action is a tool call.
        await tools.list_tools()
        tools.begin(await self._client.reset(**arguments))
        return tools

    async def _act(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        assert self._tools is not None, "begin comes first"
        return await self._tools.call_tool(name, arguments)


def derive_seed(row: Mapping[str, Any]) -> int | None:
    """The same number for the same row; None for an empty row."""
    prompt = row.get("prompt")
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    empty = not (last.get("content") if isinstance(last, dict) else last)
    if empty and not any(value is not None for name, value in row.items() if name != "prompt"):
        return None
    content = orjson.dumps(dict(row), default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "big") >> 1
