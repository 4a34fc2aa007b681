"""The two sources of the stream: games behind Paddock servers, and the policy behind an endpoint, in token mode."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import game
import words
from endpoint import NAME

from paddock.models import Endpoint
from paddock.rollouts import Budget, Task
from paddock.rollouts.loop import LoopAgent, LoopLimits
from paddock.train.sources import Source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONGEST_ANSWER = 8
START_SECONDS = 60.0
MOST_SESSIONS = 1000


@asynccontextmanager
async def environment(name: str = "Game") -> AsyncIterator[str]:
    """`paddock serve` in a process of its own; gives its address."""
    target = f"{Path(game.__file__)}:{name}"
    options = ["--port", "0", "--max-sessions", str(MOST_SESSIONS), "--json", "--log-level", "error"]
    command = [sys.executable, "-m", "paddock", "serve", target, *options]
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    server = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=nowhere)
    assert server.stdout is not None
    try:
        async with asyncio.timeout(START_SECONDS):
            started = await server.stdout.readline()
        yield str(json.loads(started)["url"])
    finally:
        server.terminate()
        await server.wait()


@asynccontextmanager
async def open_sources(model_url: str, store: Path, n: int, parallel: int) -> AsyncIterator[list[Source]]:
    """A source for each game: `n` rollouts of each of its tasks, `parallel` at a time."""
    tokenizer = words.write_tokenizer(store / "tokenizer")
    options: dict[str, Any] = {
        "agent": LoopAgent(LoopLimits(steps=game.GUESSES), system=None),
        "budget": Budget(max_tokens_per_call=LONGEST_ANSWER),
        "token_mode": True,
        "tokenizer": str(tokenizer),
        "renderer": "default",
        "store": store,
        "silent": 0.0,
        "n": n,
        "parallel": parallel,
        "retries": 0,
    }
    endpoint = Endpoint(model_url, NAME, engine="vllm")
    async with environment("Game") as find_url, environment("After") as after_url:
        seeds = range(game.LARGEST)
        find = [Task(game.PROMPT, id=f"find-{seed}", metadata={"seed": seed}) for seed in seeds]
        after = [Task(game.after_prompt(seed), id=f"after-{seed}", metadata={"seed": seed}) for seed in seeds]
        yield [
            Source.create(endpoint, find, name="find", environment=find_url, **options),
            Source.create(endpoint, after, name="after", environment=after_url, **options),
        ]
