"""Claude Code: its configuration, the roles of its calls, and its output."""

from typing import Any

import pytest

from agents.printed import ASSIGNMENT, run_printed
from paddock.agents import claude_code
from paddock.agents.claude_code import ClaudeCode, ClaudeCodeRun
from paddock.capture.trace import Role

SUMMARY = "CRITICAL: Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of the conversation so far"


def body(*texts: str, tools: bool = True) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    return {"messages": messages, **({"tools": [{"type": "function"}]} if tools else {})}


def test_it_has_one_model_and_its_own_settings_only() -> None:
    env = claude_code.environment(ASSIGNMENT)
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:7000"
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {"policy"}
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "77"
    assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    arguments = " ".join(claude_code.ARGUMENTS)
    assert "--setting-sources user --strict-mcp-config" in arguments
    assert "Web" not in " ".join(claude_code.TOOLS)


@pytest.mark.parametrize(
    ("request_body", "headers", "role"),
    [
        (body("Do it."), {}, Role.AGENT),
        (body("Do it."), {"x-claude-code-agent-id": "a1"}, Role.SUBAGENT),
        (body("Do it.", SUMMARY), {}, Role.COMPACTION),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": SUMMARY}]}]}, {}, Role.COMPACTION),
        (body(SUMMARY, "Go on."), {}, Role.AGENT),
        (body("Name this.", tools=False), {}, Role.TITLE),
        ({"messages": ["nonsense"]}, {}, Role.TITLE),
        ({}, {}, Role.TITLE),
    ],
)
def test_roles_of_its_calls(request_body: dict[str, Any], headers: dict[str, str], role: Role) -> None:
    assert ClaudeCode().classify(request_body, headers) is role


def test_tools_of_subagents_are_reported_but_not_their_instructions() -> None:
    instruction = {"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": "Look around."}]}}
    block = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"}
    events = [
        {"type": "system", "subtype": "init", "session_id": "s1"},
        {**instruction, "parent_tool_use_id": "c0"},
        {"type": "assistant", "message": {"id": "m1", "content": [block]}, "parent_tool_use_id": "c0"},
        {"type": "user", "message": {"content": [result]}, "parent_tool_use_id": "c0"},
    ]
    reported, _, _, session = run_printed(ClaudeCodeRun, *events)
    tool = {"tool": "Bash", "status": "completed", "input": {"command": "ls"}, "output": "a.txt"}
    assert (reported, session) == ([("agent_tool", tool)], "s1")
