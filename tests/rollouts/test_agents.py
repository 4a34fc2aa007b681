"""Drivers by name, the command driver, and what OpenCode is told."""

import json
from pathlib import Path, PurePosixPath

import pytest

from paddock.errors import AgentError, ConfigError
from paddock.rollouts.agents import AGENTS, load_agent, pi, qwen_code
from paddock.rollouts.agents.base import Agent, Assignment
from paddock.rollouts.agents.command import CommandAgent
from paddock.rollouts.agents.opencode import OpenCode, configuration, environment, own_program
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.store import Store
from paddock.rollouts.trace import Role
from paddock.testing.agents import MOVES
from rollouts.played import needs_bwrap, rolled

ASSIGNMENT = Assignment("Do it.", "http://127.0.0.1:7000/v1", "paddock-key", max_tokens=77, context_tokens=999)


class Place:
    """As much of a sandbox as a driver asks for its environment."""

    home = PurePosixPath("/home/user")


def test_agents_are_chosen_by_name() -> None:
    assert isinstance(load_agent("opencode"), OpenCode)
    assert load_agent("opencode", driver="serve").describe()["driver"] == "serve"
    command = load_agent("command:python3 -c 'print(1)'")
    assert command.describe() == {"agent": "command", "command": ["python3", "-c", "print(1)"]}
    assert set(AGENTS) >= {"opencode", "command"}


@pytest.mark.parametrize(
    ("spec", "driver", "words"),
    [
        ("opencoed", None, "did you mean 'opencode'"),
        ("nothing", None, "agents: "),
        ("opencode:fast", None, "--agent opencode"),
        ("opencode", "walk", "run or serve"),
        ("command:", None, "command:./agent.py"),
        ("command:ls", "serve", "run"),
    ],
)
def test_a_name_that_does_not_fit_is_refused_with_a_way_out(spec: str, driver: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(spec, driver=driver)
    assert words in (caught.value.hint or "")


def test_a_quote_that_is_not_closed_is_refused() -> None:
    with pytest.raises(ConfigError):
        load_agent("command:python3 'oops")


def test_a_program_of_the_host_must_be_executable(tmp_path: Path) -> None:
    script = tmp_path / "agent.sh"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="cannot be executed"):
        CommandAgent(str(script))


@pytest.mark.parametrize("name", [name for name in AGENTS if name not in ("command", "loop")])
def test_a_shipped_agent_says_what_it_is(name: str) -> None:
    agent = load_agent(name)
    assert agent.name == name
    assert agent.describe() == {"agent": name, "driver": agent.drivers[0], "version": agent.version}
    assert agent.dialect in ("chat", "responses", "anthropic", "google")
    assert agent.version
    assert name in MOVES


@needs_bwrap
def test_a_program_of_the_host_comes_along_with_its_folder_and_cannot_be_changed(tmp_path: Path) -> None:
    folder = tmp_path / "agents"
    folder.mkdir()
    (folder / "helper.txt").write_text("42")
    script = folder / "agent.sh"
    script.write_text(
        '#!/bin/bash\ncd "$(dirname "$0")" && cp helper.txt ~/workdir/answer.txt; echo "$0 $1"; echo x > helper.txt\n'
    )
    script.chmod(0o755)
    with Store.open(tmp_path / "store") as store:
        record = rolled(store, CommandAgent(f"{script} 'two words'"))
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    assert "/opt/agent/agent.sh two words" in record.agent_log
    assert (folder / "helper.txt").read_text() == "42"


def test_opencode_reaches_nothing_but_the_model() -> None:
    told = configuration(ASSIGNMENT)
    (provider,) = told["provider"].values()
    assert provider["options"]["baseURL"] == ASSIGNMENT.base_url
    assert provider["options"]["apiKey"] == ASSIGNMENT.api_key
    assert provider["models"]["policy"]["limit"] == {"context": 999, "output": 77}
    assert told["permission"]["webfetch"] == "deny"
    assert "ask" not in json.dumps(told["permission"])
    assert (told["share"], told["autoupdate"]) == ("disabled", False)


def test_a_file_in_the_work_folder_cannot_redirect_opencode() -> None:
    env = environment(ASSIGNMENT, Place())  # type: ignore[arg-type]
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
def test_opencodes_side_calls_are_known(body: dict[str, object], role: Role | None) -> None:
    assert OpenCode().classify(body, {}) is role


def test_an_own_program_must_be_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_pi_is_given_one_model_and_tries_nothing_twice() -> None:
    (provider,) = pi.models(ASSIGNMENT)["providers"].values()
    assert (provider["baseUrl"], provider["apiKey"]) == (ASSIGNMENT.base_url, ASSIGNMENT.api_key)
    assert [model["id"] for model in provider["models"]] == [ASSIGNMENT.model]
    assert (provider["models"][0]["contextWindow"], provider["models"][0]["maxTokens"]) == (999, 77)
    told = pi.settings(ASSIGNMENT)
    assert told["retry"]["enabled"] is False
    assert told["compaction"] == {"reserveTokens": 77, "keepRecentTokens": (999 - 77) // 2}


def test_qwen_code_is_given_one_model_and_trusts_no_folder() -> None:
    told = qwen_code.settings(ASSIGNMENT)
    (model,) = told["modelProviders"]["openai"]
    assert (model["id"], model["baseUrl"]) == (ASSIGNMENT.model, ASSIGNMENT.base_url)
    assert model["generationConfig"]["maxRetries"] == 0
    assert told["security"]["folderTrust"]["enabled"] is True
    assert not told["telemetry"]["enabled"]


@pytest.mark.parametrize(("said", "heard"), [("Do it.", "Do it."), ("/clear", "\n/clear"), ("a\n/b", "a\n/b")])
def test_qwen_code_hears_an_instruction_not_a_command(said: str, heard: str) -> None:
    assert qwen_code.spoken(said).decode() == heard


@pytest.mark.parametrize("agent", [pi.Pi(), qwen_code.QwenCode()])
def test_a_call_without_tools_is_a_summary(agent: Agent) -> None:
    assert agent.classify({"messages": []}, {}) is Role.COMPACTION
    assert agent.classify({"messages": [], "tools": [{}]}, {}) is not Role.COMPACTION


def test_qwen_code_is_known_by_its_system_prompt_and_so_are_its_sub_agents() -> None:
    def role(system: str) -> Role | None:
        body = {"messages": [{"role": "system", "content": system}], "tools": [{}]}
        return qwen_code.QwenCode().classify(body, {})

    assert role("You are Qwen Code, an interactive CLI agent developed by Alibaba Group.") is Role.AGENT
    assert role("You are a general-purpose subagent working for a parent agent.") is Role.SUBAGENT
