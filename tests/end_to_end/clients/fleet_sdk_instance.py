"""The Fleet SDK against one instance, without a plane. Usage: fleet_sdk_instance.py MANAGER_URL ROOT_URL"""

import asyncio
from typing import Any

from fleet._async.resources.mcp import AsyncMCPResource
from fleet.verifiers import IgnoreConfig
from mcp import ClientSession
from mcp.client.streamable_http import streamablehttp_client
from report import report

from fleet import Fleet

KEY = "the-key"


def instance(manager: str) -> Any:
    env = Fleet(api_key=KEY, base_url="http://127.0.0.1:9").instance(manager)
    env.instance.load()
    return env


async def looking(manager: str, root: str) -> Any:
    def look() -> Any:
        env = instance(manager)
        env.reset()
        described = env.db("current").describe()
        missing = env.db("current").query("SELECT * FROM missing")
        return {
            "health": env.instance.manager_health_check().service,
            "resources": sorted(resource.name for resource in env.resources()),
            "columns": [(column["name"], column["pk"]) for column in described.tables[0].columns],
            "rows": env.db("seed").query("SELECT title FROM notes").rows,
            "missing": [missing.success, "no such table" in missing.error],
            "refused": env.db("seed").exec("DELETE FROM notes").success,
            "app": env.app("crm").manager_health_check().status,
            "files": env.fs().diff().total_files,
            "file": env.fs().file("/etc/hosts").exists,
        }

    return await asyncio.to_thread(look)


async def tools(manager: str, root: str) -> Any:
    """The SDK's own listing sends no key, so it finds nothing; a client of the agent sends it."""
    without_a_key = await AsyncMCPResource(f"{root}mcp", "notes").list_tools()
    headers = {"Authorization": f"Bearer {KEY}"}
    async with streamablehttp_client(f"{root}mcp", headers=headers) as (read, write, session_id):
        async with ClientSession(read, write) as session:
            await session.initialize()
            listed = (await session.list_tools()).tools
            added = await session.call_tool("add_note", {"title": "by an agent"})
            unknown = await session.call_tool("nope", {})
        named = session_id()
    return {
        "without_a_key": without_a_key,
        "listed": [tool.name for tool in listed],
        "added": [added.isError, added.structuredContent],
        "unknown": unknown.isError,
        "session": named,
    }


async def differences(manager: str, root: str) -> Any:
    def compare() -> Any:
        env = instance(manager)
        diff = env.db("seed").diff(env.db("current"), IgnoreConfig(), use_structured_diff=True)
        fields = [("id", 2), ("title", "by an agent"), ("body", "")]
        insert = {"table": "notes", "pk": 2, "type": "insert", "fields": fields}
        diff.expect_only([{"table": "notes", "pk": 2, "field": None, "after": "__added__"}])
        diff.expect_only_v2([insert])
        diff.expect_exactly([insert])
        try:
            env.db("seed").diff(env.db("current")).expect_exactly([])
        except AssertionError:
            strict = True
        else:
            strict = False
        reset = env.reset(seed=4)
        return [strict, reset.success, env.db("current").query("SELECT COUNT(*) FROM notes").rows]

    return await asyncio.to_thread(compare)


report(looking, tools, differences)
