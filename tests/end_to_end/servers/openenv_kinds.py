"""An environment for OpenEnv whose tools return, need and raise all kinds of things."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal
from uuid import uuid4

import fastmcp
from fastmcp import FastMCP
from fastmcp.utilities.types import Image
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, Field


@dataclass
class Point:
    x: int
    label: str | None = None


class Report(BaseModel):
    name: str = Field(alias="theName")
    at: datetime = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    points: list[Point] = []


class Kinds(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("kinds")
        for tool in (
            self.text,
            self.nothing,
            self.ratio,
            self.plain,
            self.listed,
            self.point,
            self.report,
            self.days,
        ):
            server.tool(tool)
        for tool in (self.unique, self.picture, self.fails, self.leaves, self.slow, self.pick):
            server.tool(tool)
        for tool in (self.wrong, self.empty, self.numeral, self.endless):
            server.tool(tool)
        server.resource("data://rules")(lambda: "be kind")
        super().__init__(server)
        self._state = State(episode_id=str(uuid4()))
        self.spoken = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Observation(reward=0.0)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"took": type(action).__name__})

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Asks its client for what OpenEnv does not, where the action says so."""
        if not action.metadata.get("ask"):
            return await super().step_async(action, timeout_s=timeout_s, **kwargs)
        async with self.mcp_client as client:
            rules = await client.read_resource("data://rules")
            failed = await client.call_tool("fails", {}, raise_on_error=False)
            return Observation(
                metadata={
                    "rules": rules[0].text,
                    "failed": failed.is_error,
                    "text": failed.content[0].text,
                    "connected": client.is_connected(),
                    "ping": await client.ping(),
                }
            )

    @property
    def state(self) -> State:
        return self._state

    def text(self, message: str = "hi") -> str:
        """Say it back."""
        return message

    def nothing(self) -> None:
        """Return nothing."""

    def ratio(self, a: int, b: int) -> float:
        """Divide."""
        return a / b

    def plain(self, deep: dict[str, Any] | None = None) -> dict[str, Any]:
        return {"a": 1, "deep": deep or {}}

    def listed(self) -> list[int]:
        return [3, 1, 2]

    def point(self) -> Point:
        return Point(1)

    def report(self) -> Report:
        return Report(theName="r", points=[Point(1, "a")])

    def days(self) -> list[datetime]:
        return [datetime(2026, 1, 2, tzinfo=UTC)]

    def unique(self) -> set[int]:
        return {1}

    def picture(self) -> Image:
        return Image(data=b"\x89PNG", format="png")

    def fails(self) -> str:
        raise ValueError("no such luck")

    def leaves(self) -> str:
        raise KeyError("session")

    async def slow(self, ways: Literal["one", "two"]) -> str:
        return ways

    def pick(self, of: list[str], at: int = 0) -> str:
        return of[at]

    def wrong(self) -> int:
        return "abc"  # type: ignore[return-value]

    def empty(self) -> str:
        return None  # type: ignore[return-value]

    def numeral(self) -> int:
        return "4"  # type: ignore[return-value]

    def endless(self) -> float:
        return float("nan")


class Speaking(Kinds):
    """Some of its tools need whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.mcp_server.tool(self.speaks)

    async def speaks(self, ctx: fastmcp.Context) -> int:
        self.spoken += 1
        await ctx.info("speaking")
        return self.spoken


class Whispering(Kinds):
    """One of its tools does, which no look at it tells."""

    def __init__(self) -> None:
        super().__init__()
        self.mcp_server.tool(self.whispers)

    async def whispers(self) -> int:
        import fastmcp.server.dependencies as given

        self.spoken += 1
        await getattr(given, "get_" + "context")().info("whispering")
        return self.spoken
