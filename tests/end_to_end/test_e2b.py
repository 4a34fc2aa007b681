"""E2B's real SDK on `paddock e2b up`, and sandboxes of the `e2b` backend there: rollouts, limits, crashes."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts.peers import peer_python

from paddock.store import Store
from rollouts.played import needs_bwrap

from .fronts import FrontProcess, alive, front, wait_until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True), needs_bwrap]

CONFORM = """
import asyncio, json
from paddock.sandbox import open_sandbox
from paddock.testing.sandbox import check_sandbox
results = asyncio.run(check_sandbox(lambda spec: open_sandbox("e2b", spec)))
print(json.dumps([[result.name, result.outcome, result.detail] for result in results]))
"""
AGENT = """
import json, os, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": sys.stdin.read()}], "max_tokens": 64}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
request.add_header("Content-Type", "application/json")
answer = json.load(urllib.request.urlopen(request, timeout=30))
open("answer.txt", "w").write(answer["choices"][0]["message"]["content"])
"""
TEST = '[ "$(cat answer.txt)" = "said by the model" ] && echo 1 > /logs/verifier/reward.txt\n'
MAKE = """
from e2b import Sandbox
sandbox = Sandbox.create()
sandbox.commands.run("sleep 500", background=True)
print(sandbox.sandbox_id)
"""
OPEN_AND_WAIT = """
import asyncio, os
from paddock.rollouts.sandboxes import owned_sandbox
from paddock.limits import SandboxLimits
from paddock.sandbox import SandboxSpec
from paddock.store import Store

async def main(store):
    spec = SandboxSpec(SandboxLimits())
    async with owned_sandbox(store, "e2b", spec, rollout_id=None, consent=False, timeout=30) as sandbox:
        print(sandbox.id, flush=True)
        await asyncio.sleep(60)

asyncio.run(main(Store.open(os.environ["PADDOCK_STORE"])))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    with front(tmp_path_factory.mktemp("front"), "--max-sandboxes", "3") as running:
        yield running
    assert running.process.returncode == 0


@pytest.fixture(scope="module")
def report(shared: FrontProcess) -> dict[str, Any]:
    """What E2B's SDK met, call by call."""
    return shared.client("e2b_sync.py")


def test_commands_run_as_at_e2b(report: dict[str, Any]) -> None:
    seen = report["commands"]
    assert seen["done"] == ["bar\n/home/user\nuser\n", "wrong\n", 0]
    assert seen["failed"] == [3, "out\n"]
    assert (seen["heard"], seen["env"], seen["much"]) == ("one\ntwo\n", "b", 3_000_000)
    assert seen["late"] == ["TimeoutException", True, "gone\n"]
    assert seen["no_cwd"] == "NotFoundException"
    assert seen["unicode"] == "grüße 🐎\n\ufffd"
    assert seen["user"][:2] == ["user\n", "InvalidArgumentException"]


def test_background_commands_can_be_read_written_to_and_killed(report: dict[str, Any]) -> None:
    assert report["background"] == {
        "streamed": ["a\n", "b\n"],
        "fed": "hello one two",
        "killed": [["sleep 100"], True, "CommandExitException", False],
        "joined": "CommandExitException",
        "no_stdin": "SandboxException",
        "nobody": "NotFoundException",
    }


def test_a_terminal_is_one(report: dict[str, Any]) -> None:
    assert report["terminal"] == {"size": True, "tty": True}


def test_files_are_those_of_the_sandbox(report: dict[str, Any]) -> None:
    seen = report["files"]
    assert seen["written"] == ["/home/user/new/ü n.txt", "ü n.txt"]
    assert seen["info"] == [6, "-rw-------", "user", "file"]
    assert (seen["links"], seen["target"]) == (["symlink", "symlink"], "/home/user/new")
    assert seen["moved"] == ["/home/user/other/moved.txt", "hällo", False]
    assert seen["listed"] == seen["deeper"] == ["/home/user/deep/er"]
    assert seen["several"] == ["1", 255]
    assert (seen["big"], seen["streamed"], seen["packed"]) == (True, True, True)
    assert (seen["made"], seen["metadata"]) == ([True, False, False], {"kind": "v"})


def test_failures_are_exceptions_of_the_sdk(report: dict[str, Any]) -> None:
    seen, lives = report["files"], report["lives"]
    assert (seen["missing"], seen["a_folder"], seen["not_a_folder"]) == (
        "FileNotFoundException",
        "InvalidArgumentException",
        "InvalidArgumentException",
    )
    assert seen["forbidden"] != "no error"
    assert seen["no_root"][0] == "InvalidArgumentException"
    assert (lives["bad_key"], lives["no_such"]) == ("AuthenticationException", "SandboxNotFoundException")
    assert (lives["after"], lives["too_long"]) == ("SandboxNotRunningException", "SandboxException")
    assert lives["pause"][0] == "SandboxException"
    assert "cannot be paused" in lives["pause"][1]


def test_changes_are_watched(report: dict[str, Any]) -> None:
    events = [tuple(event) for event in report["watched"]["events"]]
    wanted = [
        ("a", "create"),
        ("sub", "create"),
        ("sub/b", "create"),
        ("a", "chmod"),
        ("a", "rename"),
        ("c", "remove"),
    ]
    assert [event for event in events if event in wanted] == wanted
    assert report["watched"]["stopped"] == "SandboxException"


def test_ports_are_reached_through_the_front(report: dict[str, Any]) -> None:
    assert report["ports"]["page"] == [200, "served"]
    status, body = report["ports"]["closed"]
    assert status == 502
    assert json.loads(body)["message"] == "The sandbox is running but port is not open"
    assert report["signed"] == {"good": "by its token", "bad": "HTTPError"}


def test_a_sandbox_lives_as_long_as_its_timeout_says(report: dict[str, Any]) -> None:
    lives = report["lives"]
    assert (lives["connected"], lives["found"], lives["later"]) == ("bar\n", [True], True)
    assert lives["info"] == [{"of": "grüße & mehr"}, "running", "base"]
    assert (lives["ended"], lives["metrics"], lives["killed"]) == ([False, True], True, [True, False, False])


def test_the_code_interpreters_sandbox_is_made_but_has_no_kernel(report: dict[str, Any]) -> None:
    assert report["interpreter"] == ["made\n", True]


def test_the_asynchronous_sdk_meets_the_same(shared: FrontProcess) -> None:
    reply = shared.client("e2b_async.py")
    assert reply["commands"] == {
        "heard": ["one\n", "two\n"],
        "done": 0,
        "fed": [5, "in order and whole"],
        "together": [str(number) for number in range(8)],
        "again": "heard\n",
        "late": "TimeoutException",
    }
    assert reply["terminal"] is True
    assert reply["files"] == {
        "events": ["create a", "write a"],
        "pieces": 500_000,
        "missing": "FileNotFoundException",
    }
    assert reply["full_disk"] == ["NotEnoughSpaceException", "CommandExitException"]
    assert reply["killed"] == [True, "SandboxNotRunningException", False]
    assert reply["full"] == [3, "RateLimitException"]


# -- the e2b backend --------------------------------------------------------------------------------------


def test_the_e2b_backend_conforms(shared: FrontProcess) -> None:
    finished = shared.run("-c", CONFORM)
    assert finished.returncode == 0, finished.stderr[-4000:]
    results = json.loads(finished.stdout)
    # `test_e2b_images.py` opens sandboxes on images.
    assert [result for result in results if result[1] != "passed" and "image" not in result[0]] == []
    assert len(results) > 30
    assert shared.inside() == []


def test_a_whole_rollout_runs_at_e2b(shared: FrontProcess, tmp_path: Path) -> None:
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "instruction.md").write_text("Write what you are told.")
    (task / "tests" / "test.sh").write_text(TEST)
    agent = tmp_path / "agent" / "agent.py"
    agent.parent.mkdir()
    agent.write_text(f"#!/usr/bin/python3\n{AGENT}")
    agent.chmod(0o755)
    script = tmp_path / "replay.json"
    script.write_text(json.dumps({"turns": [{"text": "said by the model"}]}))
    words = ["rollout", str(task), "--agent", f"command:{shlex.quote(str(agent))}", "--model", f"replay:{script}"]
    options = ["--sandbox", "e2b", "--retries", "0", "--json", "--store", str(tmp_path / "rollouts")]
    finished = shared.run("-m", "paddock", *words, *options)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    record = json.loads(finished.stdout)
    assert (record["outcome"], record["reward"], record["sandbox"]) == ("ok", 1.0, "e2b")
    assert (record["calls"], record["trainable_calls"], record["level"]) == (1, 1, "tokens")


# -- nothing is left --------------------------------------------------------------------------------------


def test_a_killed_front_leaves_nothing(tmp_path: Path) -> None:
    with front(tmp_path) as running:
        assert running.run("-c", MAKE).stdout.startswith("sb-")
        inside = running.inside()
        assert inside
        running.process.send_signal(signal.SIGKILL)
        running.process.wait(10)
    with front(tmp_path) as again:
        wait_until(lambda: not any(alive(pid) for pid in inside))
        reopened = Store.open(again.store)
        owners = {entry.owner.pid for entry in reopened.open_sandboxes() if entry.owner is not None}
        reopened.close()
    assert owners == {again.process.pid}


def test_a_killed_owner_is_cleaned_up_after_at_the_service(shared: FrontProcess, tmp_path: Path) -> None:
    store = tmp_path / "owner"
    owner = subprocess.Popen(
        [peer_python("e2b"), "-c", OPEN_AND_WAIT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **shared.variables, "PADDOCK_STORE": str(store)},
    )
    assert owner.stdout is not None
    with owner.stdout as output:
        sandbox_id = output.readline().strip()
        owner.kill()
        owner.wait(10)
    assert sandbox_id.startswith("sb-")
    assert shared.inside()
    cleaned = shared.run("-m", "paddock", "doctor", "--clean", "--json", "--store", str(store))
    assert json.loads(cleaned.stdout)["sandboxes"] == [sandbox_id], cleaned.stderr
    assert shared.inside() == []
