"""MCP endpoints of an instance: servers of every kind, and what their errors mean to a fleet client."""

import asyncio

import pytest

from paddock.fleet.client.errors import Unreachable, Unsendable
from paddock.fleet.client.tool_endpoints import FleetMcpClient

from .plane import KEY, lab
from .test_faults import made


@pytest.mark.parametrize("setting", ["streams", "sessions", "stateless", "repeats_safely"])
def test_every_kind_of_server_is_understood(setting: str) -> None:
    async def main() -> None:
        orchestrator, tools = await made(plane)
        assert len((await tools.list_tools()).tools) == 4
        assert await tools.call_tool("add", {"text": "x"}) == {"rows": 1}
        await tools.close()
        await orchestrator.close_async()

    with lab(**{setting: True}) as plane:
        asyncio.run(main())
        assert plane.rpc.count("initialize") == 1


def test_a_session_that_the_server_forgot_is_begun_again() -> None:
    async def main() -> None:
        orchestrator, tools = await made(plane)
        await tools.list_tools()
        plane.known_sessions.clear()
        assert await tools.call_tool("add", {"text": "x"}) == {"rows": 1}
        await orchestrator.close_async()

    with lab(sessions=True) as plane:
        asyncio.run(main())
        assert plane.rpc.count("initialize") == 2


def test_an_endpoint_that_is_not_there_means_that_nothing_ran() -> None:
    async def main() -> None:
        with pytest.raises(Unreachable) as caught:
            await FleetMcpClient("http://127.0.0.1:1/mcp", KEY).list_tools()
        assert caught.value.ran is False

    asyncio.run(main())


def test_arguments_that_cannot_be_sent_mean_that_nothing_ran() -> None:
    async def main() -> None:
        orchestrator, tools = await made(plane)
        client = FleetMcpClient(tools.mcp_urls[0], KEY)
        with pytest.raises(Unsendable) as caught:
            await client.call_tool("add", {"text": object()})
        assert caught.value.ran is False
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main())
