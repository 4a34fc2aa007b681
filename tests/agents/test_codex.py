"""Codex: its configuration, the roles of its calls, and its output."""

import json
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest

from agents.printed import ASSIGNMENT, ODD_LINES, run_printed
from paddock.agents import codex
from paddock.agents.codex import Codex, CodexRun
from paddock.capture.trace import Role

WORKDIR = PurePosixPath('/home/user/work dir "x"')


def test_it_gets_one_model_and_does_not_trust_the_work_folder() -> None:
    config = tomllib.loads(codex.toml(codex.configuration(ASSIGNMENT, WORKDIR)))
    provider = config["model_providers"][config["model_provider"]]
    assert provider["base_url"] == ASSIGNMENT.base_url
    assert provider["wire_api"] == "responses"
    assert config["projects"] == {str(WORKDIR): {"trust_level": "untrusted"}}
    assert config["model_auto_compact_token_limit"] < config["model_context_window"] == 40_000
    assert config["web_search"] == "disabled"
    assert config["shell_environment_policy"]["exclude"] == [provider["env_key"]]
    assert not any(config["features"].values())
    assert ASSIGNMENT.api_key not in json.dumps(config)


def turn(**metadata: Any) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps(metadata)}


@pytest.mark.parametrize(
    ("headers", "role"),
    [
        (turn(request_kind="turn", thread_source="user"), Role.AGENT),
        (turn(request_kind="turn", thread_source="subagent", subagent_kind="thread_spawn"), Role.SUBAGENT),
        (turn(request_kind="compaction", thread_source="user"), Role.COMPACTION),
        (turn(request_kind="compaction", thread_source="subagent"), Role.COMPACTION),
        ({"x-openai-subagent": "collab_spawn"}, Role.SUBAGENT),
        ({"x-codex-turn-metadata": "no JSON"}, None),
        ({"x-codex-turn-metadata": "[1]"}, None),
        ({}, None),
    ],
)
def test_its_headers_name_the_role_of_a_call(headers: dict[str, str], role: Role | None) -> None:
    assert Codex().classify({"messages": []}, headers) is role


def item(kind: str, name: str, *, ended: bool = True, **fields: Any) -> dict[str, Any]:
    return {"type": "item.completed" if ended else "item.started", "item": {"id": name, "type": kind, **fields}}


PRINTED = [
    {"type": "thread.started", "thread_id": "s1"},
    item("error", "i0", message="Model metadata for `policy` not found."),
    item("error", "i00", message="A setting is odd."),
    {"type": "turn.started"},
    item("reasoning", "i1", text="Hm."),
    item("agent_message", "i2", text="I write."),
    item("command_execution", "i3", ended=False, command="ls", aggregated_output="", status="in_progress"),
    item("command_execution", "i3", command="ls", aggregated_output="a.txt", exit_code=0, status="completed"),
    item("command_execution", "i4", command="no", aggregated_output="not found", exit_code=127, status="failed"),
    item("file_change", "i5", changes=[{"path": "b.txt", "kind": "add"}], status="completed"),
    item("mcp_tool_call", "i6", tool="look", arguments={"at": 1}, error={"message": "away"}, status="failed"),
    {"type": "turn.failed", "error": {"message": "it broke"}},
]


def test_its_items_become_texts_tools_and_errors() -> None:
    reported, messages, ended, session = run_printed(CodexRun, *PRINTED)
    assert reported == [
        ("agent_warning", {"warning": "A setting is odd."}),
        ("agent_text", {"kind": "reasoning", "text": "Hm."}),
        ("agent_text", {"kind": "text", "text": "I write."}),
        (
            "agent_tool",
            {"tool": "exec_command", "status": "completed", "input": {"command": "ls"}, "output": "a.txt"},
        ),
        ("agent_tool", {"tool": "exec_command", "status": "error", "input": {"command": "no"}, "error": "not found"}),
        (
            "agent_tool",
            {
                "tool": "apply_patch",
                "status": "completed",
                "input": {"changes": [{"path": "b.txt", "kind": "add"}]},
                "output": "completed",
            },
        ),
        ("agent_tool", {"tool": "look", "status": "error", "input": {"arguments": {"at": 1}}, "error": "away"}),
        ("agent_error", {"error": "it broke"}),
    ]
    assert (session, ended.error) == ("s1", "it broke")
    assert [part["type"] for each in messages[1:] for part in each["parts"]] == ["reasoning", "text", *["tool"] * 4]


def test_an_item_that_has_not_ended_is_running_in_the_transcript() -> None:
    reported, messages, _, _ = run_printed(CodexRun, PRINTED[6])
    assert reported == []
    assert messages[1]["parts"][0]["state"] == {"status": "running", "input": {"command": "ls"}}


def test_unknown_output_is_ignored() -> None:
    reported, messages, ended, _ = run_printed(CodexRun, *ODD_LINES)
    assert (reported, len(messages), ended.exit_code) == ([], 1, 3)
