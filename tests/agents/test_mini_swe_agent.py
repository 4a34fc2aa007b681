"""mini-swe-agent: its output."""

import json
from typing import Any

from agents.printed import check_parser
from paddock.agents.mini_swe_agent import MiniSweAgentRun


def function(call: str, command: str) -> dict[str, Any]:
    return {"id": call, "function": {"name": "bash", "arguments": json.dumps({"command": command})}}


PRINTED: list[Any] = [
    {"role": "system", "content": "You are"},
    {"role": "user", "content": "Do it."},
    {
        "role": "assistant",
        "content": "I write.",
        "reasoning_content": "Hm.",
        "tool_calls": [function("c1", "ls"), function("c2", "no")],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "a.txt", "returncode": 0},
    {"role": "tool", "tool_call_id": "c2", "content": "not found", "returncode": 127},
    {"role": "exit", "content": "broke", "exit_status": "it"},
]


def test_its_output_is_reported() -> None:
    check_parser(MiniSweAgentRun, PRINTED, error="it: broke")
