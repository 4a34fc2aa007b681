"""Rollouts of the policy in the environment: many at once, through the capture and the store, as training samples.

The sessions of all rollouts lie on one connection to a Paddock server and are reset together.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import game
from endpoint import NAME

from paddock import Client, PaddockError, VectorClient
from paddock.capture.upstream import Upstream
from paddock.export.samples import Sample, samples
from paddock.models import Endpoint
from paddock.rollouts import Budget, RunConfig, Store, Task
from paddock.rollouts.batch import Batch
from paddock.rollouts.context import RunContext
from paddock.rollouts.loop import LoopAgent, LoopLimits, ToolResult, ToolSessions
from paddock.rollouts.loop.environment import openai_tool
from paddock.store.outcome import Reward

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONGEST_ANSWER = 8
START_SECONDS = 60.0
MOST_SESSIONS = 1000


@asynccontextmanager
async def environment() -> AsyncIterator[str]:
    """`paddock serve` in a process of its own; gives its address."""
    target = f"{Path(game.__file__)}:Game"
    options = ["--port", "0", "--max-sessions", str(MOST_SESSIONS), "--json", "--log-level", "error"]
    command = [sys.executable, "-m", "paddock", "serve", target, *options]
    pipe, devnull = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=devnull)
    assert server.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            started = await server.stdout.readline()
        yield str(json.loads(started)["url"])
    finally:
        server.terminate()
        await server.wait()


@dataclass(slots=True)
class VectorSession:
    """The session of one rollout: one of those of a vector, which has been reset already."""

    is_repeatable = True

    sessions: VectorClient
    number: int
    tool_list: list[dict[str, Any]]
    prompt: str = game.PROMPT
    rewards: list[float] = field(default_factory=list)
    is_scored: bool = True
    verifier_log: str = ""

    async def open(self) -> None:
        pass

    async def tools(self) -> Self:
        return self

    async def list_tools(self) -> list[dict[str, Any]]:
        return self.tool_list

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        (result,) = await self.sessions.step({self.number: action})
        if isinstance(result, PaddockError):
            raise result
        self.rewards.append(float(result.reward or 0.0))
        return ToolResult.of_value(result.observation["result"]["data"], done=result.done)

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        """What the guesses were worth. Who makes none has not found the number either."""
        return Reward(sum(self.rewards))

    async def close(self) -> None:
        pass

    @property
    def evidence(self) -> dict[str, Any]:
        return {"session": self.number}


class Episodes:
    """Plays `n` rollouts for each of the numbers that can be hidden. Use it as `async with`."""

    def __init__(self, url: str, model_url: str, store: Path, n: int) -> None:
        self.store = Store.open(store)
        self._seeds = range(game.LARGEST)
        self._n = n
        self._url = url
        self._sessions = VectorClient(url, n * len(self._seeds))
        self._upstream = Upstream()
        self._endpoint = Endpoint(model_url, NAME, engine="vllm")

    async def __aenter__(self) -> Self:
        client: Client[Any]
        async with Client(self._url) as client:
            tools = await client.tools()
        self._tools = [openai_tool(tool.name, tool.description, tool.input_schema) for tool in tools]
        async with AsyncExitStack() as opening:
            opening.callback(self.store.close)
            await opening.enter_async_context(self._upstream)
            await opening.enter_async_context(self._sessions)
            self._stack = opening.pop_all()
        return self

    async def __aexit__(self, *problem: Any) -> None:
        await self._stack.__aexit__(*problem)

    async def play(self, step: int) -> list[Sample]:
        """One batch of rollouts, and what can be trained on of it."""
        tasks = [Task(game.PROMPT, id=f"seed-{seed}") for seed in self._seeds]
        for first in await self._sessions.reset_all([seed for seed in self._seeds for _ in range(self._n)]):
            if isinstance(first, PaddockError):
                raise first
        free = {task.id: iter(range(i * self._n, (i + 1) * self._n)) for i, task in enumerate(tasks)}

        def session(task: Task) -> VectorSession:
            return VectorSession(self._sessions, next(free[task.id]), self._tools)

        config = RunConfig(
            model=self._endpoint,
            agent=LoopAgent(LoopLimits(steps=game.GUESSES), system=None),
            budget=Budget(max_tokens_per_call=LONGEST_ANSWER),
            n=self._n,
            parallel=len(self._sessions),
            retries=0,
            batch_id=f"step-{step}",
        )
        context = RunContext.create(
            config,
            endpoint=self._endpoint,
            store=self.store,
            upstream=self._upstream,
            sessions=ToolSessions(session, "environment"),
        )
        result = await Batch(tasks, context).run()
        return [
            sample for record in result.records for sample in samples(record, self.store.calls(record.rollout_id))
        ]
