import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testing.servers import serving

from .processes import paddock

BROKEN = '''
from paddock import Environment, Observation
from paddock.envs.counter import Add, Total
from paddock import State

print("hello from the module")

class Broken(Environment[Add, Total, State]):
    """Says too much, and scores badly."""

    def reset(self, *, seed=None, episode_id=None):
        print("hello from reset")
        return Total(total=0)

    def step(self, action):
        return Total(total=1, reward=float("nan"))
'''


@pytest.fixture
def broken(tmp_path: Path) -> str:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    return f"{file}:Broken"


@pytest.mark.parametrize("target", ["counter", "echo"])
def test_a_good_environment_ends_with_0(target: str) -> None:
    done = paddock("check", target)
    assert done.returncode == 0
    assert "✓" in done.stdout
    assert "✗" not in done.stdout
    assert re.fullmatch(rf"{target}: \d+ passed, \d+ skipped\n", done.stderr)


def test_a_broken_environment_ends_with_1_and_a_hint(broken: str) -> None:
    done = paddock("check", broken)
    assert done.returncode == 1
    assert "✗  rewards are numbers or none" in done.stdout
    assert 'hint: return a finite number, or None for "not scored"' in done.stdout
    assert "1 failed" in done.stderr


def test_results_are_json_whatever_the_environment_prints(broken: str) -> None:
    done = paddock("check", broken, "--json")
    document = json.loads(done.stdout)
    [failure] = [result for result in document["results"] if result["outcome"] == "failed"]
    assert (document["ok"], document["counts"]["failed"]) == (False, 1)
    assert failure.keys() == {"name", "outcome", "detail", "hint", "seconds"}
    assert "hello from reset" in done.stderr


def test_a_server_is_checked_by_its_url() -> None:
    with serving("counter", "--max-sessions", "1") as url:
        done = paddock("check", url, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["counts"].keys() == {"passed", "skipped"}


def test_a_server_that_wants_a_token_gets_it() -> None:
    with serving("counter", "--auth-token", "secret") as url:
        refused = paddock("check", url)
        given = paddock("check", url, "--auth-token", "secret")
        read = paddock("check", url, PADDOCK_AUTH_TOKEN="secret")
    assert (refused.returncode, given.returncode, read.returncode) == (2, 0, 0)
    assert "hint: give the server's token" in refused.stderr


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("cuonter", "did you mean 'counter'?"),
        ("localhost:8000", "did you mean http://localhost:8000?"),
        ("ws://localhost:8000", "http://host:port"),
        ("http://127.0.0.1:9", "is the server up"),
        ("no_such_package.env:Env", "is the package installed"),
        ("json:Nothing", "no class with a step method"),
        ("nowhere.py:Env", "relative to the current folder"),
    ],
)
def test_a_bad_target_ends_with_2_and_a_hint(target: str, hint: str) -> None:
    done = paddock("check", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert hint in done.stderr.partition("\nhint: ")[2]


def test_a_module_that_does_not_import_is_a_bad_target(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("1 / 0\n")
    done = paddock("check", "bad.py:Env", cwd=tmp_path)
    assert done.returncode == 2
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "Traceback" not in done.stderr


def test_progress_is_shown_on_a_terminal_only() -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "paddock", "check", "counter", "--json"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, env=environment, check=True)
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert "checking counter" in shown
    assert json.loads(done.stdout)["ok"]
    assert "checking" not in paddock("check", "counter").stderr
