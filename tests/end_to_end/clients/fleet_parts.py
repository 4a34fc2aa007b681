"""What both generations of the Fleet client share here: faults, tools over MCP, and how errors are told."""

import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client

VERIFIER = """
def verify(env, final_answer=None):
    titles = [row[0] for row in env.db("current").query("SELECT title FROM notes").rows]
    before = env.db("seed").query("SELECT count(*) FROM notes").rows[0][0]
    print("titles", titles)
    return 1.0 if "milk" in titles and before == 1 and final_answer == "done" else 0.25
"""


def inject(url: str, key: str, **fault: Any) -> None:
    request = urllib.request.Request(
        f"{url}/_lab/faults", json.dumps(fault).encode(), {"Authorization": f"Bearer {key}"}, method="POST"
    )
    urllib.request.urlopen(request, timeout=10).close()


async def use_tools(url: str, key: str) -> Any:
    """The names of the tools, and what one of them answers."""
    async with (
        streamablehttp_client(url, {"Authorization": f"Bearer {key}"}) as (read, write, _),
        ClientSession(read, write) as session,
    ):
        await session.initialize()
        names = sorted(tool.name for tool in (await session.list_tools()).tools)
        added = await session.call_tool("add_note", {"title": "milk"})
        return [names, json.loads(added.content[0].text), added.isError]


def chosen(*scenarios: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Those that the last argument names, which is taken away."""
    wanted = sys.argv.pop()
    return [scenario for scenario in scenarios if wanted in ("all", scenario.__name__)]


def told(error: BaseException) -> list[Any]:
    """An error as its class and its words."""
    return [type(error).__name__, str(error)]
