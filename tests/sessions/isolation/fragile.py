"""Environments that break in every way, for tests of child processes."""

import asyncio
import ctypes
import os
import time
from typing import Any

from paddock import Action, Environment, Observation, State, ToolEnvironment, tool


class Do(Action):
    what: str = "go"
    size: int = 0


class Seen(Observation):
    count: int = 0
    pid: int = 0
    text: str = ""


class Count(State):
    count: int = 0


def break_down(what: str) -> None:
    if what == "exit":
        os._exit(3)
    if what == "segfault":
        ctypes.string_at(0)
    if what == "fork":
        os.fork()
    if what == "close descriptors":
        os.closerange(0, 1024)
    if what == "raise":
        raise ValueError("not that")
    if what == "leave":
        raise SystemExit("bye")


class Fragile(Environment[Do, Seen, Count]):
    """Breaks when it is told to."""

    concurrent_sessions = True
    isolation = "process"

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        if os.environ.get("FRAGILE_BUILD"):
            break_down(os.environ["FRAGILE_BUILD"])

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Seen:
        self.count = seed or 0
        return Seen(count=self.count, pid=os.getpid())

    def step(self, action: Do) -> Seen:
        break_down(action.what)
        if action.what == "hang":
            time.sleep(60)
        self.count += 1
        return Seen(count=self.count, pid=os.getpid(), reward=1.0, text="x" * action.size)

    @property
    def state(self) -> Count:
        return Count(count=self.count)

    def num_tasks(self, split: str) -> int:
        return {"train": 7}[split]

    def close(self) -> None:
        if path := os.environ.get("FRAGILE_CLOSED"):
            with open(path, "a") as closed:
                closed.write(f"{os.getpid()}\n")


class AsyncFragile(Fragile):
    async def step(self, action: Do) -> Seen:  # type: ignore[override]
        break_down(action.what)
        if action.what == "hang":
            await asyncio.sleep(60)
        if action.what == "block":
            time.sleep(60)  # noqa: ASYNC251 - it breaks the rules
        self.count += 1
        return Seen(count=self.count, pid=os.getpid())


class FragileTools(ToolEnvironment):
    concurrent_sessions = True
    isolation = "process"

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @tool
    def add(self, amount: int) -> dict[str, Any]:
        self.count += amount
        return {"count": self.count, "pid": os.getpid()}

    @tool
    async def later(self, what: str) -> str:
        break_down(what)
        return what
