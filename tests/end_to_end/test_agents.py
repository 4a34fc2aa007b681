"""Every shipped agent, the real program in a real sandbox, as the shipped suite sees it; and what the suite sees."""

import asyncio
import shlex
from pathlib import Path

import pytest

from paddock.agents import AGENTS, find_agent, load_agent
from paddock.agents.base import Agent, AgentTools, shell_write
from paddock.agents.command import CommandAgent
from paddock.agents.install import NODE_FOLDER
from paddock.errors import ConfigError
from paddock.loading import class_in_file
from paddock.rollouts import RunConfig, Task, run_rollout
from paddock.tasks.shipped import shipped
from paddock.testing.agents import check_agent
from paddock.testing.checks import Result
from paddock.testing.conformance import failed
from rollouts.played import SPEAKING, needs_bwrap, own_children, remember_children

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300, func_only=True), needs_bwrap]

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_agent.py"
MCP, SKILLS = {"it uses the mcp servers of a task"}, {"it offers the skills of a task"}
SHIPPED = [name for name in AGENTS if find_agent(name).tools is not None]


def results_of(agent: str | Agent) -> dict[str, Result]:
    return {result.name: result for result in asyncio.run(check_agent(agent))}


def skipped(results: dict[str, Result]) -> set[str]:
    return {name for name, result in results.items() if result.outcome == "skipped"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_agent_conforms(name: str) -> None:
    remember_children()
    agent, results = find_agent(name), results_of(name)
    assert failed(list(results.values())) == []
    unsupported = (set() if agent.mcp_transports else MCP) | (set() if agent.supports_skills else SKILLS)
    assert skipped(results) == unsupported
    assert own_children() == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_agent_is_as_large_as_it_says(name: str) -> None:
    installed = asyncio.run(load_agent(name).install(lambda line: None, timeout=300))
    own = [mount.source for mount in installed.mounts if mount.target != NODE_FOLDER]
    size = sum(path.stat().st_size for source in own for path in source.rglob("*") if path.is_file()) / 1e6
    assert size == pytest.approx(find_agent(name).size_mb, rel=0.25, abs=5)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_demo_model_solves_a_task_with_a_shipped_agent(name: str, tmp_path: Path) -> None:
    task = Task.from_folder(shipped()["refactor"])
    record = asyncio.run(run_rollout(task, RunConfig(model="demo", agent=name, store=tmp_path)))
    assert (record.outcome, record.reward) == ("ok", 1.0)


def test_the_example_of_a_driver_conforms() -> None:
    """CONTRIBUTING.md tells how to add an agent with it."""
    results = results_of(class_in_file(str(EXAMPLE), "Tiny")())
    assert failed(list(results.values())) == []
    assert skipped(results) == MCP | SKILLS


# -- the suite itself: a small agent that conforms, and what it finds in those that do not -----------------

TOOLS = AgentTools(
    run=lambda command: ("bash", {"command": command}),
    write=lambda path, text: ("bash", {"command": shell_write(path, text)}),
)


class Talking(CommandAgent):
    """A driver whose program is a few lines of Python."""

    name = "talking"
    requires_model_call = True
    tools = TOOLS
    mcp_transports = ()
    supports_skills = False

    def __init__(self, script: str = "sys.exit(converse())") -> None:
        super().__init__(shlex.join(["/usr/bin/python3", "-I", "-c", f"{SPEAKING}\n{script}"]))


BEGINS = "import subprocess, pathlib\n"
READS = "import io; sys.stdin = io.StringIO(open('.pi/SYSTEM.md').read() + sys.stdin.read()); sys.exit(converse())"
BROKEN = {
    "it does nothing": (Talking("sys.exit(0)"), "it solves a task with its tools"),
    "it obeys the work folder": (Talking(READS), "the work folder does not configure it"),
    "it never gives up": (
        Talking("import time\nwhile converse(): time.sleep(1)\n"),
        "a model that fails is blamed",
    ),
}


def test_a_small_agent_conforms_without_live_events() -> None:
    results = results_of(Talking())
    assert failed(list(results.values())) == []
    assert skipped(results) == {"it reports events while it runs", "it keeps a transcript"} | MCP | SKILLS


@pytest.mark.parametrize("case", BROKEN)
def test_what_an_agent_gets_wrong_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from paddock.limits import RolloutTimeouts
    from paddock.testing import agents

    monkeypatch.setattr(agents, "TIMEOUTS", RolloutTimeouts(agent=5, verifier=30, model_call=60))
    agent, wrong = BROKEN[case]
    results = results_of(agent)
    assert results[wrong].outcome == "failed", results
    assert results[wrong].hint


def test_an_agent_without_tools_is_not_checked() -> None:
    with pytest.raises(ConfigError, match="the driver of command does not name its tools"):
        results_of(CommandAgent("/bin/true"))
