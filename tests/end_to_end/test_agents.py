"""Every shipped agent, the real program in a real sandbox, as the shipped suite sees it; and what the suite sees."""

import asyncio
import shlex

import pytest

from paddock.errors import ConfigError
from paddock.rollouts.agents import AGENTS, find_agent, load_agent
from paddock.rollouts.agents.base import Agent
from paddock.rollouts.agents.command import CommandAgent
from paddock.rollouts.agents.install import NODE_FOLDER
from paddock.testing.agents import MOVES, Moves, bash, check_agent
from paddock.testing.checks import Result
from paddock.testing.conformance import failed
from rollouts.played import SPEAKING, needs_bwrap, own_children, remember_children

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300, func_only=True), needs_bwrap]

SHIPPED = [name for name in AGENTS if find_agent(name).size_mb]


def results_of(agent: str | Agent, moves: Moves | None = None) -> dict[str, Result]:
    return {result.name: result for result in asyncio.run(check_agent(agent, moves=moves))}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_agent_conforms(name: str) -> None:
    remember_children()
    results = results_of(name)
    assert failed(list(results.values())) == []
    assert {result.outcome for result in results.values()} == {"passed"}
    assert own_children() == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_agent_is_as_large_as_it_says(name: str) -> None:
    installed = asyncio.run(load_agent(name).install(lambda line: None, timeout=300))
    own = [mount.source for mount in installed.mounts if mount.target != NODE_FOLDER]
    size = sum(path.stat().st_size for source in own for path in source.rglob("*") if path.is_file()) / 1e6
    assert size == pytest.approx(find_agent(name).size_mb, rel=0.25, abs=5)


# -- the suite itself: a small agent that conforms, and what it finds in those that do not -----------------

TOOLS = Moves(run=bash, write=lambda path, text: bash(f"printf %s {shlex.quote(text)} > {path}"))


class Talking(CommandAgent):
    """A driver whose program is a few lines of Python."""

    name = "talking"
    must_call = True

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
    results = results_of(Talking(), TOOLS)
    assert failed(list(results.values())) == []
    skipped = {name for name, result in results.items() if result.outcome == "skipped"}
    assert skipped == {"it tells what it does while it does it", "it keeps a transcript"}


@pytest.mark.parametrize("case", BROKEN)
def test_what_an_agent_gets_wrong_is_found(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from paddock.rollouts.limits import Timeouts
    from paddock.testing import agents

    monkeypatch.setattr(agents, "TIMEOUTS", Timeouts(agent=5, verifier=30, model_call=60))
    agent, wrong = BROKEN[case]
    results = results_of(agent, TOOLS)
    assert results[wrong].outcome == "failed", results
    assert results[wrong].hint


def test_an_agent_whose_tools_are_unknown_is_not_examined() -> None:
    with pytest.raises(ConfigError, match="nothing is known of the tools of talking"):
        results_of(Talking())


def test_every_shipped_agent_can_be_examined() -> None:
    assert set(SHIPPED) <= set(MOVES)
