"""Which tool servers of an environment are asked directly, and whether a lifespan is lived through all the same.

Prints a JSON object. Runs where Paddock and OpenEnv are installed together.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from fastmcp import Client, FastMCP
from fastmcp.server.middleware import Middleware

from paddock.sessions.openenv_tools import DirectMcpClient, use_direct_client

lived: list[str] = []


@asynccontextmanager
async def lifespan(_: Any) -> AsyncIterator[None]:
    lived.append("began")
    yield
    lived.append("ended")


def seen() -> list[str]:
    return list(lived)


def mounted() -> FastMCP:
    server = FastMCP("outer")
    server.mount(FastMCP("inner"))
    return server


SERVERS = {
    "simple": FastMCP("simple"),
    "lifespan": FastMCP("lifespan", lifespan=lifespan),
    "middleware": FastMCP("middleware", middleware=[type("Ours", (Middleware,), {})()]),
    "mounted": mounted(),
    "strict": FastMCP("strict", strict_input_validation=True),
}


async def main() -> None:
    environments = {
        name: use_direct_client(SimpleNamespace(mcp_server=server, mcp_client=Client(server)))
        for name, server in SERVERS.items()
    }
    SERVERS["lifespan"].tool(seen)
    async with environments["lifespan"].mcp_client as client:
        reply = (await client.call_tool("seen", {})).data
    direct = {name: isinstance(each.mcp_client, DirectMcpClient) for name, each in environments.items()}
    without = use_direct_client(SimpleNamespace(mcp_server=None, mcp_client=None))
    print(json.dumps({"direct": direct, "lived": reply, "without": without.mcp_client is None}))


asyncio.run(main())
