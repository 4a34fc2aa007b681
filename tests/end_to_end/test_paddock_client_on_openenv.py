"""Paddock's clients work on OpenEnv's own servers."""

from pathlib import Path

import pytest

from paddock import Client, SyncClient
from paddock.errors import CapacityReached, InvalidMessage, ToolFailure
from paddock.rollouts.loop.environment import EnvironmentSession
from rollouts.loop.fake_session import played, turns

from .processes import Server
from .wire import occupied

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(60, func_only=True), pytest.mark.anyio]

ECHO_TOOLS = ["echo_message", "echo_with_length"]


async def test_an_episode(openenv_counter: Server) -> None:
    async with Client(openenv_counter.url) as env:
        reset = await env.reset(seed=1, episode_id="mine")
        assert (reset.observation["total"], reset.reward, reset.done) == (0, None, False)
        steps = [await env.step({"amount": amount}) for amount in (3, 7)]
        assert [(step.observation["total"], step.reward, step.done) for step in steps] == [
            (3, 3.0, False),
            (10, 7.0, True),
        ]
        assert await env.state() == {"episode_id": "mine", "step_count": 2, "total": 10}


def test_an_episode_without_await(openenv_counter: Server) -> None:
    with SyncClient(openenv_counter.url) as env:
        assert env.reset(seed=1, episode_id="mine").observation["total"] == 0
        step = env.step({"amount": 10})
        assert (step.observation["total"], step.reward, step.done) == (10, 10.0, True)
        assert env.state() == {"episode_id": "mine", "step_count": 1, "total": 10}


async def test_two_clients_have_an_episode_each(openenv_counter: Server) -> None:
    async with Client(openenv_counter.url) as one, Client(openenv_counter.url) as two:
        await one.reset()
        await two.reset()
        await one.step({"amount": 3})
        assert (await two.step({"amount": 4})).observation["total"] == 4


async def test_a_refused_action_raises_and_the_episode_goes_on(openenv_counter: Server) -> None:
    async with Client(openenv_counter.url) as env:
        await env.reset()
        with pytest.raises(InvalidMessage):
            await env.step({"amount": -1})
        assert (await env.step({"amount": 3})).observation["total"] == 3


async def test_a_full_server_raises(openenv_counter: Server) -> None:
    with occupied(openenv_counter.url, 4), pytest.raises(CapacityReached):
        async with Client(openenv_counter.url) as env:
            await env.reset()


async def test_reset_metadata_arrives(openenv_echo: Server) -> None:
    async with Client(openenv_echo.url) as env:
        reset = await env.reset()
        assert (reset.reward, reset.metadata) == (0.0, {"status": "ready"})


async def test_tools(openenv_echo: Server) -> None:
    async with Client(openenv_echo.url) as env:
        await env.reset()
        assert [tool.name for tool in await env.tools()] == ECHO_TOOLS
        assert (await env.call_tool("echo_message", message="hi")).value == "hi"
        assert (await env.call_tool("echo_with_length", message="hi")).value == {"message": "hi", "length": 2}


def test_tools_without_await(openenv_echo: Server) -> None:
    with SyncClient(openenv_echo.url) as env:
        env.reset()
        assert [tool.name for tool in env.tools()] == ECHO_TOOLS
        assert env.call_tool("echo_message", message="hi").value == "hi"


async def test_an_unknown_tool_raises(openenv_echo: Server) -> None:
    async with Client(openenv_echo.url) as env:
        await env.reset()
        with pytest.raises(ToolFailure, match="nope"):
            await env.call_tool("nope")


async def test_the_loop_plays_an_episode(openenv_counter: Server, tmp_path: Path) -> None:
    acts = [{"tool": "act", "arguments": {"amount": amount}} for amount in (4, 6)]
    scene = EnvironmentSession(openenv_counter.url, "Reach ten.", seed=1)
    record, _, store = await played(tmp_path, scene, turns(*acts))
    store.close()
    assert (record.outcome, record.reward, record.call_count, record.trainable_calls) == ("ok", 10.0, 2, 2)
    assert '"total":0' in record.transcript[1]["content"]


async def test_the_loop_calls_tools(openenv_echo: Server, tmp_path: Path) -> None:
    calls = [{"tool": "echo_message", "arguments": {"message": "hi"}}, {"text": "Done."}]
    record, _, store = await played(tmp_path, EnvironmentSession(openenv_echo.url, "Echo hi."), turns(*calls))
    store.close()
    assert (record.outcome, record.call_count) == ("ok", 2)
    assert record.transcript[3]["content"] == "hi"
