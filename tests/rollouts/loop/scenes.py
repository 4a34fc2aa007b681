"""A scene whose tools are plain functions, and whole rollouts in it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from paddock.rollouts.capture import Upstream
from paddock.rollouts.limits import Budget, Timeouts
from paddock.rollouts.loop.agent import LoopAgent, LoopLimits
from paddock.rollouts.loop.plan import LoopPlan
from paddock.rollouts.loop.rollout import LoopRollout
from paddock.rollouts.loop.scene import Scene
from paddock.rollouts.loop.tools import Part, ToolResult
from paddock.rollouts.models.endpoint import Endpoint
from paddock.rollouts.outcome import Reward
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.store import Store
from paddock.rollouts.task import Task
from paddock.testing.replay import ReplayServer

Tool = Callable[[dict[str, Any]], Awaitable[ToolResult]]
NOBODY_THERE = Endpoint("http://127.0.0.1:1/v1", "nobody", engine="vllm")
TIMEOUTS = Timeouts(install=5, setup=5, agent=20, verifier=5, model_call=20)
PIXEL: Part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def say(arguments: dict[str, Any]) -> ToolResult:
    return ToolResult.of_text(f"heard {arguments.get('word')}")


async def hang(arguments: dict[str, Any]) -> ToolResult:
    await asyncio.Event().wait()
    raise AssertionError


class Stage:
    """Counts what is done to it. Its reward is the number of tool calls, unless it is told another."""

    kind = "stage"
    is_scored = True
    verifier_log = "the verifier said so"

    def __init__(self, *, prompt: str | list[Part] = "Do it.", reward: Reward | None = None, **tools: Tool) -> None:
        self.prompt = prompt
        self.functions: dict[str, Tool] = {"say": say, **tools}
        self.reward = reward
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.story: list[str] = []
        self.scored: list[dict[str, Any]] = []

    async def open(self) -> None:
        self.story.append("open")

    async def tools(self) -> "Stage":
        return self

    async def list_tools(self) -> list[dict[str, Any]]:
        schema = {"type": "object", "properties": {}}
        return [{"type": "function", "function": {"name": name, "parameters": schema}} for name in self.functions]

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        self.called.append((name, arguments))
        return await self.functions[name](arguments)

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        self.story.append("score")
        self.scored = messages
        return self.reward or Reward(float(len(self.called)))

    async def close(self) -> None:
        self.story.append("close")

    @property
    def evidence(self) -> dict[str, Any]:
        return {"place": "stage 1"}


def turns(*turns: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"turns": list(turns), **options}


def a_rollout(
    scene: Scene,
    store: Store,
    upstream: Upstream,
    endpoint: Endpoint = NOBODY_THERE,
    *,
    steps: int = 20,
    budget: Budget | None = None,
    **changes: Any,
) -> LoopRollout:
    settings: dict[str, Any] = {"timeouts": TIMEOUTS, "sandbox": scene.kind, **changes}
    plan = LoopPlan(LoopAgent(LoopLimits(steps=steps)), endpoint, budget=budget or Budget(), **settings)
    return LoopRollout(Task("Do it.", id="do-it"), plan, scene, store=store, upstream=upstream)


async def played(
    folder: Path, scene: Scene, script: dict[str, Any], **options: Any
) -> tuple[RolloutRecord, ReplayServer, Store]:
    """A whole rollout in the scene with a model that plays the script."""
    store = Store.open(folder)
    async with Upstream() as upstream, ReplayServer(script) as server:
        endpoint = Endpoint(server.url, "replay", engine="vllm")
        record = await a_rollout(scene, store, upstream, endpoint, **options).run()
    return record, server, store
