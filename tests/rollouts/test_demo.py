"""The model `demo` with the tools of each agent."""

from typing import Any

import pytest

from paddock.agents import AGENTS, find_agent
from paddock.models.replay import Script
from paddock.rollouts.demo import RECORDED_WITH, demo_script, translate_tool

OTHERS = [name for name in AGENTS if name != RECORDED_WITH and find_agent(name).tools is not None]


def tools_used(script: dict[str, Any]) -> set[str]:
    return {turn["tool"] for task in script["tasks"] for turn in task["turns"] if "tool" in turn}


@pytest.mark.parametrize("name", OTHERS)
def test_an_agent_gets_only_tools_that_it_has(name: str) -> None:
    tools = find_agent(name).tools
    assert tools is not None
    script = demo_script(name, tools)
    tool_names = {tools.run("x")[0], tools.write("p", "x")[0]}
    assert tools_used(script) <= tool_names | ({tools.finish[0]} if tools.finish else set())
    assert len(Script.parse(script).tasks) == 5


def test_opencode_gets_the_answers_as_they_were_recorded() -> None:
    assert "edit" in tools_used(demo_script(RECORDED_WITH, find_agent(RECORDED_WITH).tools))


def test_a_file_is_edited_by_a_command() -> None:
    tools = find_agent("pi").tools
    assert tools is not None
    name, arguments = translate_tool("edit", {"filePath": "/a", "oldString": "it's", "newString": "is"}, tools)
    assert name == "bash"
    assert arguments["command"].endswith("""/a 'it'"'"'s' is""")
