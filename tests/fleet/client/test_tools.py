import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.fleet import FleetMCPTools
from paddock.fleet.client.errors import ToolsUnavailable, UnknownTool

from .episodes import EventRecorder
from .plane import KEY, LabPlane, lab, tool
from .test_faults import made

TWICE = [{**tool("add"), "description": "another"}, tool("extra")]


def on(plane: LabPlane, work: Callable[[FleetMCPTools], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        orchestrator, tools = await made(plane, **options)
        try:
            return await work(tools)
        finally:
            await orchestrator.close_async()

    return asyncio.run(main())


async def names(tools: FleetMCPTools) -> list[str]:
    return [each["function"]["name"] for each in (await tools.list_tools()).tools]


def test_on_a_name_collision_the_first_is_used_and_reported_once() -> None:
    recorder = EventRecorder()

    async def work(tools: FleetMCPTools) -> list[str]:
        await names(tools)
        return await names(tools)

    with lab(aggregator_tools=TWICE) as plane:
        assert on(plane, work, bus=recorder.bus) == ["add", "show", "fail", "put", "extra"]
    collisions = [event for event in recorder.events if event.name == "fleet_tool_collision"]
    assert [event.tool_names for event in collisions] == [("add",)]


def test_the_same_tool_at_two_endpoints_is_no_collision() -> None:
    recorder = EventRecorder()
    with lab(aggregator_tools=[tool("add")]) as plane:
        assert on(plane, names, bus=recorder.bus) == ["add", "show", "fail", "put"]
    assert recorder.count("fleet_tool_collision") == 0


def test_on_a_name_collision_the_second_may_get_a_prefix() -> None:
    async def work(tools: FleetMCPTools) -> list[str]:
        listed = await names(tools)
        assert await tools.call_tool("api_v1_mcp__add", {"text": "x"}) == {"rows": 1}
        return listed

    with lab(aggregator_tools=TWICE) as plane:
        assert on(plane, work, on_collision="prefix")[4] == "api_v1_mcp__add"
        assert plane.count("POST", "api/v1/mcp") > plane.count("POST", r"/\w+-\w+/mcp")


def test_a_name_collision_may_be_an_error() -> None:
    async def work(tools: FleetMCPTools) -> None:
        with pytest.raises(ToolsUnavailable, match="add"):
            await tools.list_tools()

    with lab(aggregator_tools=TWICE) as plane:
        on(plane, work, on_collision="error")


def test_a_call_goes_to_the_endpoint_that_has_the_tool_even_unlisted() -> None:
    async def work(tools: FleetMCPTools) -> None:
        assert await tools.call_tool("extra", {"text": "x"}) == {"rows": 1}

    with lab(aggregator_tools=TWICE) as plane:
        on(plane, work)


def test_an_unknown_tool_is_a_value_error_with_the_names() -> None:
    async def work(tools: FleetMCPTools) -> None:
        with pytest.raises(UnknownTool, match="add, fail, put, show"):
            await tools.call_tool("nope", {})

    with lab() as plane:
        on(plane, work)
    assert issubclass(UnknownTool, ValueError)


def test_an_error_of_a_tool_is_a_result_and_not_an_exception() -> None:
    async def work(tools: FleetMCPTools) -> None:
        assert await tools.call_tool("fail", {}) == {"error": "it failed"}

    with lab() as plane:
        on(plane, work)


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigError):
        FleetMCPTools(KEY, (), on_collision="last")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        FleetMCPTools(KEY, (), on_partial="maybe")  # type: ignore[arg-type]


def test_tools_can_be_used_alone() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane)
        alone = FleetMCPTools(KEY, (f"{plane.url}/i/{plane.box.id}/mcp",))
        assert await names(alone) == ["add", "show", "fail", "put"]
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main(plane))
