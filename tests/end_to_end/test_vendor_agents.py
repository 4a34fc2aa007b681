"""Codex, Claude Code, Gemini CLI and Qwen Code as a user runs them: with sub-agents, and with notes in the folder."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paddock.agents import find_agent
from paddock.capture.trace import Call, Caller, Role
from paddock.store import Store
from rollouts.played import IS_DONE, needs_bwrap, own_children, remember_children

from .test_rollouts import Ran, paddock

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(150, func_only=True), needs_bwrap]

SPAWNS: dict[str, dict[str, Any]] = {
    "codex": {
        "tool": "multi_agent_v1__spawn_agent",
        "arguments": {"message": "Look around.", "agent_type": "default"},
    },
    "claude-code": {
        "tool": "Agent",
        "arguments": {"description": "Looks", "prompt": "Look around.", "subagent_type": "general-purpose"},
    },
    "gemini-cli": {
        "tool": "invoke_agent",
        "arguments": {"agent_name": "codebase_investigator", "prompt": "Look around."},
    },
    "qwen-code": {
        "tool": "agent",
        "arguments": {"description": "Looks", "prompt": "Look around.", "subagent_type": "general-purpose"},
    },
}
"""How a model begins a sub-agent."""
REPORTS = {"gemini-cli": {"tool": "complete_task", "arguments": {"report": "All is there."}}}
"""How a sub-agent ends where it must call for it."""
NOTES = "Speak friend and enter."


@dataclass
class Report:
    ran: Ran
    calls: list[Call]


def make_task(folder: Path) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "instruction.md").write_text("Write 42 to answer.txt.")
    (folder / "tests" / "test.sh").write_text(IS_DONE)
    for name in ("AGENTS.md", "CLAUDE.md", "GEMINI.md"):
        (folder / "environment" / name).write_text(NOTES)
    return folder


def run_turn(name: str, command: str) -> dict[str, Any]:
    tools = find_agent(name).tools
    assert tools is not None
    tool, arguments = tools.run(command)
    return {"text": "I am at it.", "tool": tool, "arguments": arguments}


async def tell(name: str, folder: Path) -> Report:
    """A rollout in which the model begins a sub-agent and then does the work itself."""
    work = [SPAWNS[name], run_turn(name, "sleep 0.5; echo 42 > answer.txt"), {"text": "Done."}]
    looks = [run_turn(name, "ls"), REPORTS.get(name, {"text": "All is there."})]
    # A sub-agent of Codex says something else first, and is made to do the same work; it has no sub-agents.
    tasks = [{"when": "Look around.", "turns": looks}, {"when": "", "turns": work}]
    task, script = make_task(folder / "task"), folder / "script.json"
    script.write_text(json.dumps({"tasks": tasks}))
    words = ("rollout", str(task), "--agent", name, "--model", f"replay:{script}", "--retries", "0")
    ran = await paddock(folder / "store", *words)
    with Store.open(folder / "store", read_only=True) as store:
        return Report(ran, store.calls(ran.lines[0]["rollout_id"]))


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    async def all_of_them() -> list[Report]:
        return await asyncio.gather(*(tell(name, tmp_path_factory.mktemp(name)) for name in SPAWNS))

    remember_children()
    return dict(zip(SPAWNS, asyncio.run(all_of_them()), strict=True))


@pytest.fixture(params=list(SPAWNS))
def report(request: pytest.FixtureRequest, stories: dict[str, Report]) -> Report:
    return stories[request.param]


def test_the_work_is_done_and_every_token_is_kept(report: Report) -> None:
    (record,) = report.ran.lines
    assert (record["outcome"], record["reward"], record["error"]) == ("ok", 1.0, None), report.ran.words
    assert record["level"] == "tokens"
    assert all(call.trainable for call in report.calls if call.role is Role.AGENT)
    assert {call.caller for call in report.calls} == {Caller.AGENT}
    assert own_children() == []


def test_its_subagent_is_recognized(report: Report) -> None:
    own = [call for call in report.calls if call.role is Role.AGENT]
    others = [call for call in report.calls if call.role is not Role.AGENT]
    assert len(own) >= 3
    assert {call.role for call in others} == {Role.SUBAGENT}
    assert [call.parent for call in own] == [None, *(call.id for call in own[:-1])]


def test_the_notes_of_the_task_reach_the_model(report: Report) -> None:
    assert NOTES in json.dumps(report.calls[0].request)
