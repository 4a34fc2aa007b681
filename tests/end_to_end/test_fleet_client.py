"""The fleet client on real servers: official MCP servers, and a plane with instances in processes of their own."""

import asyncio
import json
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from paddock.fleet import FleetMCPTools, FleetTaskEnv, close_all
from paddock.telemetry.bus import Bus

from .processes import HERE, Server, free_port, serving

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]

KEY = "the-key"
VERIFIER = """
def helper(env):
    return 0.25

def verify(env, final_answer=None):
    rows = env.db("current").query("SELECT title FROM notes").rows
    print(len(rows), "notes")
    return 1.0 if [title for (title,) in rows].count("hello") == 1 else 0.0
"""
TASK = {"task_key": "t-1", "prompt": "add a note", "env_key": "notes", "verifier_code": VERIFIER}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, folder = free_port(), tmp_path_factory.mktemp("plane")
    command = [sys.executable, HERE / "servers" / "fleet_plane.py", str(port), folder / "state", KEY]
    with serving("paddock", command, port, folder / "plane.log") as server:
        yield server


def control(plane: Server, method: str, path: str, document: Any = None) -> Any:
    body = None if document is None else json.dumps(document).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{plane.url}{path}", body, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def running(plane: Server) -> list[Any]:
    return [each for each in control(plane, "GET", "/v1/env/instances") if each["status"] == "running"]


@pytest.mark.parametrize("which", ["echo_server", "fastmcp_echo"])
def test_tools_of_any_mcp_server_are_listed_and_called(which: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(which)

    async def main() -> None:
        tools = FleetMCPTools(KEY, (f"{server.url}/mcp",))
        names = {tool["function"]["name"] for tool in (await tools.list_tools()).tools}
        assert names == {"echo_message", "echo_with_length"}
        assert await tools.call_tool("echo_message", {"message": "hi"}) == "hi"
        assert await tools.call_tool("echo_with_length", {"message": "hello"}) == {"message": "hello", "length": 5}
        await tools.close()

    asyncio.run(main())


def episode(plane: Server, act: Callable[[FleetTaskEnv], Awaitable[None]]) -> tuple[float | None, dict[str, Any]]:
    events: list[Any] = []
    bus = Bus()
    bus.subscribe(events.append)

    async def main() -> tuple[float | None, dict[str, Any]]:
        async with FleetTaskEnv(TASK, KEY, base_url=plane.url, bus=bus) as env:
            await env.reset_async()
            await act(env)
            _, reward, done, info = await env.step_async({"done": True})
            assert done
        await close_all()
        return reward, info

    answer = asyncio.run(main())
    names = [event.name for event in events]
    assert names.count("fleet_rollout_started") == names.count("fleet_rollout_completed") == 1
    assert running(plane) == []
    return answer


async def add(env: FleetTaskEnv) -> None:
    observation, _, _, info = await env.step_async({"tool": "add_note", "params": {"title": "hello"}})
    assert "tool_error" not in info, info
    assert observation["observation"] == {"id": 2}


def test_an_episode_is_played_and_graded(plane: Server) -> None:
    reward, info = episode(plane, add)
    assert reward == 1.0
    assert info["verifier_stdout"] == "2 notes\n"


def test_a_lost_answer_does_not_add_the_note_twice(plane: Server) -> None:
    async def act(env: FleetTaskEnv) -> None:
        fault = {"method": "POST", "path": f"/{env.instance_id}/mcp", "times": 1, "drop": True, "after": True}
        await asyncio.to_thread(control, plane, "POST", "/_lab/faults", fault)
        await add(env)

    assert episode(plane, act)[0] == 1.0


def test_an_instance_that_is_ended_from_outside_ends_the_episode(plane: Server) -> None:
    async def main() -> None:
        async with FleetTaskEnv(TASK, KEY, base_url=plane.url) as env:
            await env.reset_async()
            await asyncio.to_thread(control, plane, "DELETE", f"/v1/env/instances/{env.instance_id}")
            _, reward, done, info = await env.step_async({"tool": "list_notes"})
            assert (reward, done, info["failure_reason"]) == (None, True, "instance_expired")

    asyncio.run(main())


def test_a_screen_task_sees_its_screen(plane: Server) -> None:
    async def main() -> None:
        config = {**TASK, "task_modality": "computer_use"}
        async with FleetTaskEnv(config, KEY, base_url=plane.url) as env:
            observation = await env.reset_async()
            assert [tool["function"]["name"] for tool in observation["tools"]] == ["computer"]
            assert any(part["type"] == "image_url" for part in observation["initial_screenshot"])

    asyncio.run(main())
