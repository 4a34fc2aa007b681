"""OpenCode: its configuration, the roles of its calls, and the output of `opencode run`."""

import json
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from agents.printed import ASSIGNMENT, check_parser, run_printed
from paddock.agents.opencode import OpenCode, OpenCodeRun, configuration, environment, own_program
from paddock.capture.trace import Role
from paddock.errors import AgentError


class StubSandbox:
    home = PurePosixPath("/home/user")


PRINTED: list[Any] = [
    {"type": "reasoning", "sessionID": "s1", "part": {"type": "reasoning", "text": "Hm.", "messageID": "m"}},
    {"type": "text", "part": {"type": "text", "text": "I write.", "messageID": "m"}},
    {
        "type": "tool_use",
        "part": {
            "type": "tool",
            "tool": "bash",
            "messageID": "m",
            "state": {"status": "completed", "input": {"command": "ls"}, "output": "a.txt"},
        },
    },
    {
        "type": "tool_use",
        "part": {
            "type": "tool",
            "tool": "bash",
            "messageID": "m",
            "state": {"status": "error", "input": {"command": "no"}, "error": "not found"},
        },
    },
    {"type": "error", "error": "it broke"},
]


def test_it_reaches_only_the_model() -> None:
    config = configuration(ASSIGNMENT)
    (provider,) = config["provider"].values()
    assert provider["options"]["baseURL"] == ASSIGNMENT.base_url
    assert provider["options"]["apiKey"] == ASSIGNMENT.api_key
    assert provider["models"]["policy"]["limit"] == {"context": 40_000, "output": 77}
    assert config["permission"]["webfetch"] == "deny"
    assert "ask" not in json.dumps(config["permission"])
    assert (config["share"], config["autoupdate"]) == ("disabled", False)


def test_a_file_in_the_work_folder_cannot_redirect_it() -> None:
    env = environment(ASSIGNMENT, StubSandbox())  # type: ignore[arg-type]
    assert env["OPENCODE_DISABLE_PROJECT_CONFIG"] == "1"
    assert json.loads(env["OPENCODE_CONFIG_CONTENT"]) == configuration(ASSIGNMENT)
    assert env["HOME"] == "/home/user"


@pytest.mark.parametrize(
    ("body", "role"),
    [
        ({"tools": [{}], "messages": [{"role": "system", "content": "You are a title generator"}]}, None),
        ({"messages": [{"role": "system", "content": "You are a title generator. …"}]}, Role.TITLE),
        ({"messages": [{"role": "system", "content": "Sum it up."}]}, Role.COMPACTION),
        ({"messages": []}, Role.COMPACTION),
        ({"messages": ["nonsense"]}, Role.COMPACTION),
        ({}, Role.COMPACTION),
    ],
)
def test_roles_of_its_calls(body: dict[str, object], role: Role | None) -> None:
    assert OpenCode().classify(body, {}) is role


def test_paddock_opencode_must_name_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_OPENCODE", str(tmp_path / "elsewhere"))
    with pytest.raises(AgentError):
        own_program()
    program = tmp_path / "opencode"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv("PADDOCK_OPENCODE", str(program))
    with pytest.raises(AgentError):
        own_program()
    program.chmod(0o755)
    assert own_program() == program
    monkeypatch.delenv("PADDOCK_OPENCODE")
    assert own_program() is None


def test_its_output_is_reported() -> None:
    check_parser(OpenCodeRun, PRINTED)
    assert run_printed(OpenCodeRun, *PRINTED)[3] == "s1"
