"""The echo tools through OpenEnv's own clients. Usage: openenv_echo.py URL"""

from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.mcp_client import MCPToolClient
from report import report


async def tools(url: str) -> Any:
    async with MCPToolClient(base_url=url) as env:
        return {tool.name: tool.input_schema for tool in await env.list_tools()}


async def calls(url: str) -> Any:
    async with MCPToolClient(base_url=url) as env:
        return [
            await env.call_tool("echo_message", message="hi"),
            await env.call_tool("echo_with_length", message="hello"),
        ]


def calls_sync(url: str) -> Any:
    with MCPToolClient(base_url=url).sync() as env:
        names = [tool.name for tool in env.list_tools()]
        return [names, env.call_tool("echo_message", message="hi")]


async def unknown_tool(url: str) -> Any:
    async with MCPToolClient(base_url=url) as env:
        try:
            return await env.call_tool("nope")
        except RuntimeError as error:
            return {"refusal": str(error)}


async def episode(url: str) -> Any:
    async with MCPToolClient(base_url=url) as env:
        reset = await env.reset(episode_id="mine")
        listed = await env.step(ListToolsAction())
        called = await env.step(CallToolAction(tool_name="echo_message", arguments={"message": "hi"}))
        missed = await env.step(CallToolAction(tool_name="nope", arguments={}))
        state = await env.state()
        return {
            "reset": [reset.reward, reset.done, bool(reset.observation.metadata)],
            "listed": [tool.name for tool in listed.observation.tools],
            "called": called.observation.result["data"],
            "missed": missed.observation.error.error_type,
            "state": [state.episode_id, state.step_count],
        }


async def generic(url: str) -> Any:
    async with GenericEnvClient(base_url=url) as env:
        reset = await env.reset()
        arguments = {"message": "hello"}
        step = {"type": "call_tool", "tool_name": "echo_with_length", "arguments": arguments}
        called = await env.step(step)
        return {
            "metadata_repeated": reset.metadata == reset.observation["metadata"],
            "data": called.observation["result"]["data"],
        }


async def two_at_once(url: str) -> Any:
    async with MCPToolClient(base_url=url) as one, MCPToolClient(base_url=url) as two:
        await one.reset(episode_id="one")
        await two.reset(episode_id="two")
        await one.step(ListToolsAction())
        states = [await one.state(), await two.state()]
        return [[state.episode_id, state.step_count] for state in states]


report(tools, calls, calls_sync, unknown_tool, episode, generic, two_at_once)
