"""A session whose tools are plain functions, and whole rollouts in it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from paddock.capture.upstream import Upstream
from paddock.limits import RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.config import RunConfig
from paddock.rollouts.context import RunContext
from paddock.rollouts.loop.session import Part, ToolResult, ToolSession, ToolSessions
from paddock.rollouts.rollout import Rollout
from paddock.store import Store
from paddock.store.outcome import Reward
from paddock.store.record import RolloutRecord
from paddock.tasks.task import Task

Tool = Callable[[dict[str, Any]], Awaitable[ToolResult]]
NOBODY_THERE = Endpoint("http://127.0.0.1:1/v1", "nobody", engine="vllm")
TIMEOUTS = RolloutTimeouts(install=5, setup=5, agent=20, verifier=5, model_call=20)
PIXEL: Part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


async def say(arguments: dict[str, Any]) -> ToolResult:
    return ToolResult.of_text(f"heard {arguments.get('word')}")


async def hang(arguments: dict[str, Any]) -> ToolResult:
    await asyncio.Event().wait()
    raise AssertionError


class FakeSession:
    """Counts what is done to it. Its reward is the number of tool calls, unless it is told another."""

    is_repeatable = True

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

    async def tools(self) -> "FakeSession":
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
    session: ToolSession,
    store: Store,
    upstream: Upstream,
    endpoint: Endpoint = NOBODY_THERE,
    *,
    steps: int = 20,
    **changes: Any,
) -> Rollout:
    fields: dict[str, Any] = {"timeouts": TIMEOUTS, **changes}
    config = RunConfig(model=endpoint, agent="loop", max_steps=steps, **fields)
    sessions = ToolSessions(lambda _: session, "fake")
    context = RunContext.create(config, endpoint=endpoint, store=store, upstream=upstream, sessions=sessions)
    return Rollout(Task("Do it.", id="do-it"), context)


async def played(
    folder: Path, session: ToolSession, script: dict[str, Any], **options: Any
) -> tuple[RolloutRecord, ReplayServer, Store]:
    """A whole rollout in the session with a model that plays the script."""
    store = Store.open(folder)
    async with Upstream() as upstream, ReplayServer(script) as server:
        endpoint = Endpoint(server.url, "replay", engine="vllm")
        record = await a_rollout(session, store, upstream, endpoint, **options).run()
    return record, server, store
