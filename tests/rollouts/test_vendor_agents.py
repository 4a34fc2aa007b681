"""Codex, Claude Code and Gemini CLI: what they are told, what their calls are for, and what they print."""

import asyncio
import json
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest

from paddock.errors import SandboxError
from paddock.rollouts.agents import claude_code, codex, gemini_cli
from paddock.rollouts.agents.base import Assignment
from paddock.rollouts.agents.claude_code import ClaudeCode, ClaudeCodeRun
from paddock.rollouts.agents.codex import Codex, CodexRun
from paddock.rollouts.agents.gemini_cli import GeminiCli, GeminiCliRun
from paddock.rollouts.agents.notes import carry_notes, plain_words
from paddock.rollouts.trace import Role
from rollouts.test_headless import ran

ASSIGNMENT = Assignment("Do it.", "http://127.0.0.1:7000/v1", "paddock-key", max_tokens=77, context_tokens=40_000)
WORKDIR = PurePosixPath('/home/user/work dir "x"')


# -- what they are told ---------------------------------------------------------------------------------


def test_codex_is_given_one_model_and_a_folder_that_it_does_not_trust() -> None:
    told = tomllib.loads(codex.toml(codex.configuration(ASSIGNMENT, WORKDIR)))
    provider = told["model_providers"][told["model_provider"]]
    assert provider["base_url"] == ASSIGNMENT.base_url
    assert provider["wire_api"] == "responses"
    assert told["projects"] == {str(WORKDIR): {"trust_level": "untrusted"}}
    assert told["model_auto_compact_token_limit"] < told["model_context_window"] == 40_000
    assert told["web_search"] == "disabled"
    assert told["shell_environment_policy"]["exclude"] == [provider["env_key"]]
    assert not any(told["features"].values())
    assert ASSIGNMENT.api_key not in json.dumps(told)


def test_claude_code_has_one_model_for_all_and_its_own_settings_only() -> None:
    env = claude_code.environment(ASSIGNMENT)
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:7000"
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {"policy"}
    assert env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "77"
    assert env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "40000"
    assert env["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    words = " ".join(claude_code.ARGUMENTS)
    assert "--setting-sources user --strict-mcp-config --disable-slash-commands" in words
    assert "Web" not in words


def test_gemini_cli_trusts_nothing_and_sums_up_in_time_for_the_real_context() -> None:
    told = gemini_cli.settings(ASSIGNMENT)
    assert told["security"]["folderTrust"] == {"enabled": True}
    assert told["security"]["auth"] == {"selectedType": "gemini-api-key", "useExternal": True}
    assert told["model"]["compressionThreshold"] * 1_048_576 == pytest.approx(34_000)
    assert told["tools"]["truncateToolOutputThreshold"] == 40_000
    assert {"web_fetch", "google_web_search"} <= set(told["tools"]["exclude"])
    assert (told["privacy"]["usageStatisticsEnabled"], told["general"]["enableAutoUpdate"]) == (False, False)
    assert ASSIGNMENT.api_key not in json.dumps(told)


class Folder:
    """As much of a sandbox as notes need."""

    workdir = PurePosixPath("/w")

    def __init__(self, **files: bytes) -> None:
        self.files = {f"/w/{name}": text for name, text in files.items()}

    async def read(self, path: PurePosixPath, *, limit: int) -> bytes:
        found = self.files.get(str(path))
        if found is None:
            raise FileNotFoundError(path)
        if found == b"link" or len(found) > limit:
            raise SandboxError("not a file, or too large")
        return found

    async def write(self, path: PurePosixPath, data: bytes) -> None:
        self.files[str(path)] = data


@pytest.mark.parametrize(
    ("files", "carried"),
    [
        ({}, None),
        ({"B": b"second"}, b"second"),
        ({"A": b"first", "B": b"second"}, b"first"),
        ({"A": b"link", "B": b"second"}, b"second"),
        ({"A": b"x" * 100_000}, None),
    ],
)
def test_a_tasks_own_words_are_carried_to_a_program_that_does_not_trust_it(
    files: dict[str, bytes], carried: bytes | None
) -> None:
    folder = Folder(**files)
    asyncio.run(carry_notes(folder, ("A", "B"), PurePosixPath("/to")))  # type: ignore[arg-type]
    assert folder.files.get("/to") == carried


@pytest.mark.parametrize(
    ("instruction", "words"), [("Do it.", b"Do it."), ("/exit", b" /exit"), ("a/b", b"a/b"), ("", b"")]
)
def test_an_instruction_is_never_a_command_of_the_program(instruction: str, words: bytes) -> None:
    assert plain_words(instruction) == words


# -- what their calls are for -----------------------------------------------------------------------------


def said(*texts: str, tools: bool = True, system: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": text} for text in texts]
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, *messages], **({"tools": [{"type": "function"}]} if tools else {})}


def turn(**told: Any) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps(told)}


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
def test_codex_says_in_its_headers_what_a_call_is_for(headers: dict[str, str], role: Role | None) -> None:
    assert Codex().classify(said("Do it."), headers) is role


SUMMARY = "CRITICAL: Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of the conversation so far"


@pytest.mark.parametrize(
    ("body", "headers", "role"),
    [
        (said("Do it."), {}, Role.AGENT),
        (said("Do it."), {"x-claude-code-agent-id": "a1"}, Role.SUBAGENT),
        (said("Do it.", SUMMARY), {}, Role.COMPACTION),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": SUMMARY}]}]}, {}, Role.COMPACTION),
        (said(SUMMARY, "Go on."), {}, Role.AGENT),
        (said("Name this.", tools=False), {}, Role.TITLE),
        ({"messages": ["nonsense"]}, {}, Role.TITLE),
        ({}, {}, Role.TITLE),
    ],
)
def test_claude_codes_calls_are_told_apart(body: dict[str, Any], headers: dict[str, str], role: Role) -> None:
    assert ClaudeCode().classify(body, headers) is role


@pytest.mark.parametrize(
    ("body", "role"),
    [
        (said("Do it.", system="You are Gemini CLI, an autonomous agent"), Role.AGENT),
        (said("Do it.", system="You are **Codebase Investigator**"), Role.SUBAGENT),
        (said("Do it.", tools=False, system="You distill history into a <state_snapshot>."), Role.COMPACTION),
        (said("Who speaks next?", tools=False), Role.TITLE),
        ({"messages": [3], "tools": [{}]}, Role.SUBAGENT),
        ({}, Role.TITLE),
    ],
)
def test_gemini_clis_calls_are_told_apart(body: dict[str, Any], role: Role) -> None:
    assert GeminiCli().classify(body, {}) is role


# -- what they print --------------------------------------------------------------------------------------


def item(kind: str, name: str, *, ended: bool = True, **told: Any) -> dict[str, Any]:
    return {"type": "item.completed" if ended else "item.started", "item": {"id": name, "type": kind, **told}}


CODEX = [
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


def test_codexs_items_become_texts_tools_and_errors() -> None:
    told, messages, ended, session = ran(CodexRun, *CODEX)
    assert told == [
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


def test_a_codex_item_that_has_not_ended_is_in_the_transcript_as_running() -> None:
    told, messages, _, _ = ran(CodexRun, CODEX[6])
    assert told == []
    assert messages[1]["parts"][0]["state"] == {"status": "running", "input": {"command": "ls"}}


def test_claude_code_tells_of_its_subagents_work_but_not_their_orders_as_its_own_words() -> None:
    order = {"type": "user", "message": {"role": "user", "content": [{"type": "text", "text": "Look around."}]}}
    block = {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "a.txt"}
    events = [
        {"type": "system", "subtype": "init", "session_id": "s1"},
        {**order, "parent_tool_use_id": "c0"},
        {"type": "assistant", "message": {"id": "m1", "content": [block]}, "parent_tool_use_id": "c0"},
        {"type": "user", "message": {"content": [result]}, "parent_tool_use_id": "c0"},
    ]
    told, _, _, session = ran(ClaudeCodeRun, *events)
    tool = {"tool": "Bash", "status": "completed", "input": {"command": "ls"}, "output": "a.txt"}
    assert (told, session) == ([("agent_tool", tool)], "s1")


def piece(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, "delta": True}


GEMINI = [
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


def test_gemini_clis_pieces_become_whole_texts() -> None:
    told, messages, ended, session = ran(GeminiCliRun, *GEMINI)
    assert told == [
        ("agent_text", {"kind": "text", "text": "I write."}),
        ("agent_tool", {"tool": "ls", "status": "completed", "input": {"at": "."}, "output": "a.txt"}),
        ("agent_tool", {"tool": "ls", "status": "error", "input": {"at": "x"}, "error": "gone: not found"}),
        ("agent_text", {"kind": "text", "text": "Done."}),
        ("agent_error", {"error": "Api: it broke"}),
    ]
    assert (session, ended.error) == ("s1", "Api: it broke")
    assert [len(each["parts"]) for each in messages[1:]] == [2, 1, 1]


def test_what_gemini_cli_was_saying_when_it_ended_is_not_lost() -> None:
    told, messages, _, _ = ran(GeminiCliRun, piece("I was "), piece("just"))
    assert told == [("agent_text", {"kind": "text", "text": "I was just"})]
    assert messages[1]["parts"] == [{"type": "text", "text": "I was just"}]


@pytest.mark.parametrize("kind", [CodexRun, ClaudeCodeRun, GeminiCliRun])
def test_what_they_print_besides_is_passed_over(kind: Any) -> None:
    odd = [b"plain words", b"[1]", {"type": "new"}, {"type": "item.completed", "item": 3}, {"type": "assistant"}]
    told, messages, ended, _ = ran(kind, *odd)
    assert (told, len(messages), ended.exit_code) == ([], 1, 3)
