"""The model `demo` for any agent: recorded answers, with the tool calls that the agent understands.

The recorded answers use OpenCode's tools. Other agents have other tools, but all can run a command and write a file.
"""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

from paddock.tasks.shipped import replay_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.agents.base import AgentTools, ToolUse

RECORDED_WITH = "opencode"
REPLACE = "import pathlib, sys; p = pathlib.Path(sys.argv[1]); p.write_text(p.read_text().replace(*sys.argv[2:]))"


def demo_script(agent: str, tools: AgentTools | None) -> dict[str, Any]:
    """The script of the model for this agent, as `docs/models.md` describes scripts."""
    script: dict[str, Any] = json.loads(replay_file().read_text())
    if agent == RECORDED_WITH or tools is None:
        return script
    for task in script["tasks"]:
        task["turns"] = [translate_turn(turn, tools) for turn in task["turns"]]
        if tools.finish is not None:
            task["turns"][-1] |= as_turn(tools.finish)
    return script


def translate_turn(turn: Mapping[str, Any], tools: AgentTools) -> dict[str, Any]:
    if "tool" not in turn:
        return dict(turn)
    texts = {key: value for key, value in turn.items() if key in ("text", "thinking")}
    return {**texts, **as_turn(translate_tool(turn["tool"], turn["arguments"], tools))}


def translate_tool(tool: str, arguments: Mapping[str, str], tools: AgentTools) -> ToolUse:
    """What does the same as a tool of OpenCode."""
    path = arguments.get("filePath", "")
    match tool:
        case "bash":
            return tools.run(arguments["command"])
        case "read":
            return tools.run(f"cat {shlex.quote(path)}")
        case "write":
            return tools.write(path, arguments["content"])
        case "edit":
            words = ["python3", "-c", REPLACE, path, arguments["oldString"], arguments["newString"]]
            return tools.run(shlex.join(words))
        case _:
            raise ValueError(f"the demo has no translation of the tool {tool!r}")


def as_turn(use: ToolUse) -> dict[str, Any]:
    name, arguments = use
    return {"tool": name, "arguments": arguments}
