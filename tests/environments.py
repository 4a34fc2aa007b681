"""Environments that tests serve: each instance notes how it was treated."""

import asyncio
import threading
import time
from typing import Any, ClassVar

from pydantic import Field

from paddock import Action, Environment, Observation, State, ToolEnvironment, ToolReturn, tool

LIVES: list["Watched"] = []


class Watched:
    """Counts its closes and remembers which threads ran it."""

    def __init__(self) -> None:
        super().__init__()
        self.closes = 0
        self.steps = 0
        self.cancelled = 0
        self.threads: list[str] = [threading.current_thread().name]
        self.release = threading.Event()
        LIVES.append(self)

    def close(self) -> None:
        self.threads.append(threading.current_thread().name)
        self.closes += 1
        self.release.set()

    def noted(self) -> None:
        self.steps += 1
        self.threads.append(threading.current_thread().name)


def alive() -> int:
    return sum(1 for life in LIVES if life.closes == 0)


class Add(Action):
    amount: int = Field(ge=0)


class Total(Observation):
    total: int


class Sum(State):
    total: int = 0


class Adder(Watched, Environment[Add, Total, Sum]):
    """Adds on a thread."""

    concurrent_sessions = True

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Total:
        self.total = seed or 0
        return Total(total=self.total)

    def step(self, action: Add) -> Total:
        self.noted()
        self.total += action.amount
        return Total(total=self.total, reward=float(action.amount), done=self.total >= 10)

    @property
    def state(self) -> Sum:
        return Sum(total=self.total, step_count=self.steps)


class InlineAdder(Adder):
    """Adds on the loop."""

    inline = True


class Alone(Adder):
    """Instances may not live side by side."""

    concurrent_sessions = False


class Script(Action):
    """Tells an environment what to do in this step."""

    sleep: float = 0.0
    hang: bool = False
    fail: str | None = None
    exit: bool = False
    value: Any = None


class Did(Observation):
    value: Any = None


class Scripted(Watched, Environment[Script, Did, State]):
    """Does on a thread what its action says."""

    concurrent_sessions = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Did:
        return Did()

    def step(self, action: Script) -> Did:
        self.noted()
        if action.hang:
            self.release.wait(30)
        time.sleep(action.sleep)
        if action.exit:
            raise SystemExit(3)
        if action.fail is not None:
            raise RuntimeError(action.fail)
        return Did(value=action.value)


class AsyncScripted(Watched, Environment[Script, Did, State]):
    """Does on the loop, awaiting, what its action says."""

    concurrent_sessions = True

    async def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Did:
        return Did()

    async def step(self, action: Script) -> Did:
        self.noted()
        try:
            await asyncio.sleep(30 if action.hang else action.sleep)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if action.exit:
            raise SystemExit(3)
        if action.fail is not None:
            raise RuntimeError(action.fail)
        return Did(value=action.value)


class Kit(Watched, ToolEnvironment):
    """Tools that count, pause, fail and score."""

    concurrent_sessions = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.most_at_once = 0
        self._inside = 0

    @tool
    def add(self, amount: int) -> int:
        """Read, wait, write: two at a time would lose one."""
        self.noted()
        self._inside += 1
        self.most_at_once = max(self.most_at_once, self._inside)
        before = self.count
        time.sleep(0.005)
        self.count = before + amount
        self._inside -= 1
        return self.count

    @tool
    def pause(self, seconds: float) -> str:
        """Take a while."""
        self.release.wait(seconds)
        return "done"

    @tool
    def fail(self, text: str) -> str:
        """Raise."""
        raise RuntimeError(text)

    @tool
    def win(self, points: float) -> ToolReturn:
        """Score, and end the episode."""
        return ToolReturn("won", reward=points, done=True)

    @tool(read_only=True, idempotent=True)
    def look(self) -> dict[str, int]:
        """See the count."""
        return {"count": self.count}


class AsyncKit(Watched, ToolEnvironment):
    """Tools on the loop."""

    concurrent_sessions = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @tool
    async def add(self, amount: int) -> int:
        """Read, await, write."""
        before = self.count
        await asyncio.sleep(0.005)
        self.count = before + amount
        return self.count

    @tool
    async def hang(self) -> str:
        """Wait until it is cancelled."""
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return "never"

    @tool
    def plain(self, hang: bool = False) -> str:
        """Not async."""
        self.noted()
        if hang:
            self.release.wait(30)
        return threading.current_thread().name


class SlowToBuild(Adder):
    """Its constructor takes as long as the test says."""

    seconds: ClassVar[float] = 1.2

    def __init__(self) -> None:
        time.sleep(self.seconds)
        super().__init__()
