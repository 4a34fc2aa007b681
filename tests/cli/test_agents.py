import json
from pathlib import Path

import pytest

from paddock.agents import AGENTS, find_agent
from paddock.errors import AgentError

from .processes import paddock

SHIPPED = [name for name in AGENTS if find_agent(name).version]


def test_every_agent_says_what_it_is_in_a_table(tmp_path: Path) -> None:
    done = paddock("agents", PADDOCK_AGENTS=str(tmp_path), COLUMNS="120")
    assert done.returncode == 0
    heading, *lines = done.stdout.splitlines()
    assert heading.split() == ["agent", "release", "dialect", "drivers", "size", "here", "events", "abort"]
    assert [line.split()[0] for line in lines] == SHIPPED
    for name, line in zip(SHIPPED, lines, strict=True):
        kind = find_agent(name)
        assert line.split()[1:3] == [kind.version, kind.dialect]
        if kind.size_mb:
            assert f"{kind.size_mb} MB" in line
            assert " no " in line
    assert "hint: paddock agents --install all" in done.stderr


def test_the_list_as_json_is_what_the_drivers_say(tmp_path: Path) -> None:
    rows = json.loads(paddock("agents", "--json", PADDOCK_AGENTS=str(tmp_path)).stdout)
    assert [row["name"] for row in rows] == SHIPPED
    for row in rows:
        kind = find_agent(row["name"])
        assert row["installed"] is (kind.size_mb == 0)
        for name in ("version", "dialect", "size_mb", "live_events", "clean_abort"):
            assert row[name] == getattr(kind, name)
        assert row["drivers"] == list(kind.drivers)


def test_each_agent_that_cannot_be_fetched_is_reported(tmp_path: Path) -> None:
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho the registry is closed >&2\nexit 1\n")
    npm.chmod(0o755)
    words = ("agents", "--install", "pi", "--install", "qwen-code", "--json")
    done = paddock(*words, PADDOCK_AGENTS=str(tmp_path / "agents"), PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == AgentError.exit_code
    assert done.stdout == ""
    for name in ("pi", "qwen-code"):
        assert f"{name} is not here: npm could not fetch" in done.stderr
    assert "error: could not fetch pi, qwen-code" in done.stderr
    assert "hint:" in done.stderr


@pytest.mark.parametrize("wanted", ["nothing", "command"])
def test_a_name_that_no_agent_has_is_refused(wanted: str, tmp_path: Path) -> None:
    done = paddock("agents", "--install", wanted, PADDOCK_AGENTS=str(tmp_path))
    assert done.returncode not in (0, 1)
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
