"""The table of tools in docs/models.md."""

import json
from pathlib import Path

import pytest

from paddock.agents import AGENTS, find_agent

MODELS = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()


@pytest.mark.parametrize("name", [name for name in AGENTS if find_agent(name).tools is not None])
def test_the_tools_of_an_agent_are_documented(name: str) -> None:
    tools = find_agent(name).tools
    assert tools is not None
    uses = (tools.run("ls"), tools.write("/work/a.txt", "text"))
    cells = " | ".join(f"`{tool}` `{json.dumps(arguments)}`" for tool, arguments in uses)
    row = f"| `{name}` | {cells} |"
    assert row in MODELS, f"add this row to the table of tools in docs/models.md: {row}"
