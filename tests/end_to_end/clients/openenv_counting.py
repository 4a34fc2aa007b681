"""An OpenEnv tool environment that overrides `step` without annotations, and counts there.

Prints a JSON object. Runs where Paddock and OpenEnv are installed together.
"""

import asyncio
import json
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server import MCPEnvironment, Observation, State

from paddock import Client
from paddock.errors import ToolFailure


class Counting(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int = 2) -> int:
            return a + b

        @server.tool
        def fail(text: str) -> str:
            raise ValueError(text)

        super().__init__(server)
        self._state = State(episode_id="e", step_count=0)

    def reset(self, seed=None, episode_id=None, **_):  # type: ignore[no-untyped-def]
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **_):  # type: ignore[no-untyped-def]
        return Observation(done=False, reward=0.5)

    def step(self, action, timeout_s=None, **more):  # type: ignore[no-untyped-def]
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **more)

    @property
    def state(self):  # type: ignore[no-untyped-def]
        return self._state


async def failed(env: Client[Any], name: str, **arguments: Any) -> str:
    try:
        await env.call_tool(name, **arguments)
    except ToolFailure as error:
        return type(error).__name__
    return "nothing"


async def main() -> None:
    async with Client(Counting) as env:
        await env.reset()
        names = [tool.name for tool in await env.tools()]
        counted = (await env.state()).step_count
        reply = {
            "tools": names,
            "steps after listing": counted,
            "sum": (await env.call_tool("add", a=1)).value,
            "steps after a call": (await env.state()).step_count,
            "not found": await failed(env, "nope"),
            "bad argument": await failed(env, "add", a="x"),
            "says not found": await failed(env, "fail", text="file not found"),
        }
    print(json.dumps(reply))


asyncio.run(main())
