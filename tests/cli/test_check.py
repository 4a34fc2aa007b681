import json
import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paddock.cli import main
from testing.servers import running, serving

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
    assert failure.keys() == {"name", "outcome", "detail", "hint", "seconds", "fault"}
    assert "hello from reset" in done.stderr


def test_a_server_is_checked_by_its_url() -> None:
    with serving("counter", "--max-sessions", "1") as url:
        done = paddock("check", url, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["counts"].keys() == {"passed", "skipped"}


def test_a_server_that_wants_a_token_gets_it() -> None:
    with serving("counter", "--auth-token", "secret") as url:
        refused = paddock("check", url)
        completed = paddock("check", url, "--auth-token", "secret")
        read = paddock("check", url, PADDOCK_AUTH_TOKEN="secret")
    assert (refused.returncode, completed.returncode, read.returncode) == (2, 0, 0)
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
        ("nowhere.py", "relative to the current folder"),
        ("http://127.0.0.1:99999", "http://host:port"),
        ("http://:80", "http://host:port"),
        ("http://[::1", "http://host:port"),
    ],
)
def test_a_bad_target_ends_with_2_and_a_hint(target: str, hint: str) -> None:
    done = paddock("check", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert hint in done.stderr.partition("\nhint: ")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--timeout", "-1"], "--timeout is -1"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--timeout", "nan"], "--timeout is nan"),
        (["--auth-token", "x"], "--auth-token has no effect"),
        (["--shard", "1/2"], "--shard has no effect: counter is no task set"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "counter", *options])
    assert ended.value.code == 2
    reply, hint = capsys.readouterr().err.splitlines()
    assert reply.startswith(f"error: {message}")
    assert hint.startswith("hint: ")


def test_a_port_that_never_answers_ends_with_2_and_a_hint() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = paddock("check", f"http://127.0.0.1:{silent.getsockname()[1]}", "--timeout", "0.2")
    assert (done.returncode, done.stdout) == (2, "")
    reply, hint = done.stderr.splitlines()
    assert reply.endswith("did not answer within 0.2 s")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("status", [200, 404])
def test_a_plain_web_server_is_no_environment_server(status: int) -> None:
    with running(web_page(status)) as url:
        done = paddock("check", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "this is no environment server" in done.stderr
    assert "hint: " in done.stderr


def web_page(status: int) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        event = await receive()
        if scope["type"] == "lifespan":
            await send({"type": f"{event['type']}.complete"})
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"<html>hello</html>"})

    return app


def test_an_mcp_server_is_checked_by_its_url() -> None:
    with serving("echo") as url:
        done = paddock("check", f"mcp+{url}/mcp")
    assert done.returncode == 0, done.stderr


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
    output = os.read(leader, 65536).decode()
    os.close(leader)
    assert "checking counter" in output
    assert json.loads(done.stdout)["ok"]
    assert "checking" not in paddock("check", "counter").stderr
