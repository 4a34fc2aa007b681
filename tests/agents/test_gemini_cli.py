"""Gemini CLI: its configuration, the roles of its calls, and its output."""

import json
from typing import Any

import pytest

from agents.printed import ASSIGNMENT, ODD_LINES, run_printed
from paddock.agents import gemini_cli
from paddock.agents.gemini_cli import GeminiCli, GeminiCliRun
from paddock.capture.trace import Role


def body(*texts: str, tools: bool = True, system: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, *messages], **({"tools": [{"type": "function"}]} if tools else {})}


def test_it_trusts_nothing_and_compacts_in_time_for_the_real_context() -> None:
    settings = gemini_cli.settings(ASSIGNMENT)
    assert settings["security"]["folderTrust"] == {"enabled": True}
    assert settings["security"]["auth"] == {"selectedType": "gemini-api-key", "useExternal": True}
    assert settings["model"]["compressionThreshold"] * 1_048_576 == pytest.approx(34_000)
    assert settings["tools"]["truncateToolOutputThreshold"] == 40_000
    assert {"web_fetch", "google_web_search"} <= set(settings["tools"]["exclude"])
    assert (settings["privacy"]["usageStatisticsEnabled"], settings["general"]["enableAutoUpdate"]) == (False, False)
    assert ASSIGNMENT.api_key not in json.dumps(settings)


@pytest.mark.parametrize(
    ("request_body", "role"),
    [
        (body("Do it.", system="You are Gemini CLI, an autonomous agent"), Role.AGENT),
        (body("Do it.", system="You are **Codebase Investigator**"), Role.SUBAGENT),
        (body("Do it.", tools=False, system="You distill history into a <state_snapshot>."), Role.COMPACTION),
        (body("Who speaks next?", tools=False), Role.TITLE),
        ({"messages": [3], "tools": [{}]}, Role.SUBAGENT),
        ({}, Role.TITLE),
    ],
)
def test_roles_of_its_calls(request_body: dict[str, Any], role: Role) -> None:
    assert GeminiCli().classify(request_body, {}) is role


def piece(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, "delta": True}


PRINTED = [
    {"type": "init", "session_id": "s1", "model": "policy"},
    {"type": "message", "role": "user", "content": "Do it."},
    *(piece("I "), piece("write.")),
    {"type": "tool_use", "tool_name": "ls", "tool_id": "c1", "parameters": {"at": "."}},
    {"type": "tool_result", "tool_id": "c1", "status": "success", "output": "a.txt"},
    {"type": "tool_use", "tool_name": "ls", "tool_id": "c2", "parameters": {"at": "x"}},
    {"type": "tool_result", "tool_id": "c2", "status": "error", "error": {"type": "gone", "message": "not found"}},
    piece("Done."),
    {"type": "result", "status": "error", "error": {"type": "Api", "message": "it broke"}},
]


def test_its_pieces_become_whole_texts() -> None:
    reported, messages, ended, session = run_printed(GeminiCliRun, *PRINTED)
    assert reported == [
        ("agent_text", {"kind": "text", "text": "I write."}),
        ("agent_tool", {"tool": "ls", "status": "completed", "input": {"at": "."}, "output": "a.txt"}),
        ("agent_tool", {"tool": "ls", "status": "error", "input": {"at": "x"}, "error": "gone: not found"}),
        ("agent_text", {"kind": "text", "text": "Done."}),
        ("agent_error", {"error": "Api: it broke"}),
    ]
    assert (session, ended.error) == ("s1", "Api: it broke")
    assert [len(each["parts"]) for each in messages[1:]] == [2, 1, 1]


def test_an_unfinished_text_is_kept() -> None:
    reported, messages, _, _ = run_printed(GeminiCliRun, piece("I was "), piece("just"))
    assert reported == [("agent_text", {"kind": "text", "text": "I was just"})]
    assert messages[1]["parts"] == [{"type": "text", "text": "I was just"}]


def test_unknown_output_is_ignored() -> None:
    reported, messages, ended, _ = run_printed(GeminiCliRun, *ODD_LINES)
    assert (reported, len(messages), ended.exit_code) == ([], 1, 3)
