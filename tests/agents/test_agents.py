"""The registry of agents: every driver module is listed, and each describes itself."""

import pytest

from paddock.agents import AGENTS, find_agent, load_agent
from paddock.agents.opencode import OpenCode
from paddock.capture.dialects import DIALECTS
from paddock.errors import ConfigError

PROGRAMS = [name for name in AGENTS if find_agent(name).tools is not None]


def test_agents_are_chosen_by_name() -> None:
    assert isinstance(load_agent("opencode"), OpenCode)
    assert load_agent("opencode", driver="serve").describe()["driver"] == "serve"
    command = load_agent("command:python3 -c 'print(1)'")
    assert command.describe() == {"agent": "command", "command": ["python3", "-c", "print(1)"]}
    assert set(AGENTS) >= {"opencode", "command", "loop"}


@pytest.mark.parametrize(
    ("spec", "driver", "hint"),
    [
        ("opencoed", None, "did you mean 'opencode'"),
        ("nothing", None, "agents: "),
        ("opencode:fast", None, "--agent opencode"),
        ("opencode", "walk", "run or serve"),
        ("command:", None, "command:./agent.py"),
        ("command:ls", "serve", "run"),
    ],
)
def test_an_unknown_name_is_refused_with_a_hint(spec: str, driver: str | None, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(spec, driver=driver)
    assert hint in (caught.value.hint or "")


def test_a_module_without_a_class_of_its_name_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AGENTS, "other", "paddock.agents.pi")
    with pytest.raises(ConfigError, match=r"paddock\.agents\.pi has no AgentBase with the name 'other'"):
        find_agent("other")


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_has_the_name_of_its_module(name: str) -> None:
    agent_class = find_agent(name)
    assert agent_class.name == name
    assert agent_class.dialect in DIALECTS


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_agent_program_describes_itself(name: str) -> None:
    agent = load_agent(name)
    assert agent.describe() == {"agent": name, "driver": agent.drivers[0], "version": agent.version}
    assert agent.version
