"""Tool calls through the official client, first generation. Usage: opencode_client.py URL CALLS

CALLS is a JSON list of [tool, arguments]; what is printed is a list of [structured content, is error, text].
"""

import asyncio
import json
import sys
from typing import Any

from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client


async def call_all(url: str, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    answers = []
    async with streamable_http_client(url) as (read, write, _), ClientSession(read, write) as session:
        await session.initialize()
        await session.list_tools()
        for name, arguments in calls:
            result = await session.call_tool(name, arguments)
            answers.append([result.structuredContent, result.isError, result.content[0].text])
    return answers


print(json.dumps(asyncio.run(call_all(sys.argv[1], json.loads(sys.argv[2])))))
