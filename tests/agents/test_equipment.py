"""MCP servers and skills of a task: who can use them, and where each program finds them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from paddock.agents import codex, gemini_cli, load_agent, opencode, pi, qwen_code
from paddock.agents.base import Assignment
from paddock.agents.equipment import check_can_use, mcp_entries
from paddock.errors import TaskError
from paddock.rollouts import run_rollout
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.tasks.settings import EnvironmentSettings, McpServer, TaskSettings
from paddock.tasks.task import Task
from rollouts.played import NOBODY_THERE, a_task, needs_bwrap, rolled, shell

LOCAL = McpServer("local", "stdio", command="serve", args=("-v",))
REMOTE = McpServer("remote", "streamable-http", url="http://127.0.0.1:1/mcp", headers={"x": "y"})
EVENTS = McpServer("events", "sse", url="http://127.0.0.1:1/sse")
SERVERS = (LOCAL, REMOTE, EVENTS)
EQUIPPED = Assignment("Do it.", "http://127.0.0.1:7000/v1", "key", mcp_servers=SERVERS)


def task_with(*servers: McpServer, skills_dir: str = "") -> Task:
    return a_task(settings=TaskSettings(EnvironmentSettings(mcp_servers=servers, skills_dir=skills_dir)))


@pytest.mark.parametrize(
    ("name", "task", "missing"),
    [
        ("mini-swe-agent", task_with(LOCAL, skills_dir="/skills"), "environment.mcp_servers, environment.skills_dir"),
        ("loop", task_with(LOCAL), "environment.mcp_servers"),
        ("codex", task_with(LOCAL, EVENTS), "environment.mcp_servers with transport 'sse'"),
        ("qwen-code", task_with(skills_dir="/skills"), "environment.skills_dir"),
    ],
)
def test_an_agent_that_cannot_use_it_is_refused_with_the_key(name: str, task: Task, missing: str) -> None:
    with pytest.raises(TaskError) as caught:
        check_can_use(load_agent(name), task)
    assert f"with the agent {name}, which cannot use {missing}" in str(caught.value)
    assert "use --agent claude-code or " in (caught.value.hint or "")


def test_a_task_without_them_runs_with_every_agent() -> None:
    check_can_use(load_agent("mini-swe-agent"), task_with())


def test_a_refused_rollout_has_no_reward_and_starts_nothing(tmp_path: Path) -> None:
    stages: list[str] = []
    with Store.open(tmp_path) as store:
        rollout = run_rollout(
            task_with(LOCAL),
            model=NOBODY_THERE,
            agent="mini-swe-agent",
            store=store,
            on_change=lambda rollout: stages.append(rollout.record.stage),
        )
        record = asyncio.run(rollout)
    assert (record.outcome, record.reward, set(stages)) == (Outcome.TASK, None, {"done"})
    assert "mini-swe-agent, which cannot use environment.mcp_servers (use --agent " in (record.error or "")


def test_every_program_gets_the_servers_in_its_own_form() -> None:
    remote = {"url": REMOTE.url, "headers": {"x": "y"}}
    assert mcp_entries(SERVERS) == {
        "local": {"type": "stdio", "command": "serve", "args": ["-v"]},
        "remote": {"type": "http", **remote},
        "events": {"type": "sse", "url": EVENTS.url, "headers": {}},
    }
    assert opencode.mcp_entry(LOCAL)["command"] == ["serve", "-v"]
    assert opencode.mcp_entry(REMOTE).items() >= {"type": "remote", **remote}.items()
    assert codex.mcp_entry(LOCAL).items() >= {"command": "serve", "args": ["-v"], "required": True}.items()
    assert codex.mcp_entry(REMOTE).items() >= {"url": REMOTE.url, "http_headers": {"x": "y"}}.items()
    assert gemini_cli.settings(EQUIPPED)["mcpServers"]["remote"] == {"type": "http", "trust": True, **remote}
    servers = qwen_code.servers(EQUIPPED)
    assert (servers["remote"]["httpUrl"], servers["events"]["url"]) == (REMOTE.url, EVENTS.url)
    assert {entry["exposure"] for entry in pi.servers(EQUIPPED).values()} == {"direct"}


def test_the_configuration_of_codex_with_servers_is_toml() -> None:
    import tomllib
    from pathlib import PurePosixPath

    text = codex.toml(codex.configuration(EQUIPPED, PurePosixPath("/w")))
    assert tomllib.loads(text)["mcp_servers"]["local"]["args"] == ["-v"]


def equipped(tmp_path: Path, script: str, **settings: Any) -> Any:
    environment = EnvironmentSettings(mcp_servers=SERVERS, **settings)
    files = {"skills/one/SKILL.md": b"---\nname: one\ndescription: One.\n---\n"}
    task = a_task(files=files, settings=TaskSettings(environment))
    return rolled(tmp_path / "store", shell(script), task=task)


@needs_bwrap
def test_a_program_of_the_user_gets_variables(tmp_path: Path) -> None:
    script = "cat $PADDOCK_MCP_FILE; echo; ls $PADDOCK_SKILLS_DIR; echo 42 > answer.txt"
    record = equipped(tmp_path, script, skills_dir="/home/user/workdir/skills")
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.error
    assert set(json.loads(record.agent_log.splitlines()[0])["mcpServers"]) == {"local", "remote", "events"}
    assert record.agent_log.splitlines()[1:] == ["one"]
