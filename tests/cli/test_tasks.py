import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paddock.cli import main
from rollouts.played import needs_bwrap
from tasks.datasets.package_stores import KEY, Store, serve_store
from tasks.datasets.repositories import commit_files, make_repository

TEST = "if grep -q 1 done; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
GOOD = {"instruction.md": "Write 1 into done.", "tests/test.sh": TEST}
SOLUTION = "echo 1 > done"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PADDOCK_TASKS", str(tmp_path / "cache"))
    good = {f"good/{name}": text for name, text in GOOD.items()}
    bad = {f"bad/{name}": text for name, text in GOOD.items()}
    solutions = {"good/solution/solve.sh": SOLUTION, "bad/solution/solve.sh": "true"}
    make_repository(tmp_path / "r", {**good, **bad, **solutions})
    return f"git+file://{tmp_path}/r"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["tasks", *words])
    output = capsys.readouterr()
    return int(str(ended.value.code)), output.out, output.err


def test_ls_shows_what_each_task_needs(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "ls", address)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["task", "bad", "good"]
    assert "2 tasks; hash " in err
    assert "commit " in err
    code, out, _ = run(capsys, "ls", address, "--json", "--filter", "g*")
    (task,) = map(json.loads, out.splitlines())
    assert (task["id"], task["network"], task["needs"]) == ("good", "no-network", [])


def test_pull_asks_for_the_newest_commit(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "ls", address)
    commit = commit_files(tmp_path / "r", {"new/instruction.md": "New."})
    assert json.loads(run(capsys, "pull", address, "--json")[1]) | {"hash": ""} == {
        "set": address,
        "tasks": 3,
        "hash": "",
        "commits": [commit],
        "digests": [],
        "images": [],
    }
    assert "3 tasks" in run(capsys, "ls", address)[2]


def test_pull_names_images_that_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PADDOCK_IMAGES", str(tmp_path / "images"))
    dockerfile = "FROM 127.0.0.1:9/base:1 AS one\nFROM one\nFROM scratch\n"
    for name, files in {"a": {"environment/Dockerfile": dockerfile}, "b": {}}.items():
        for path, text in {"instruction.md": "Do.", **files}.items():
            (tmp_path / "set" / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "set" / name / path).write_text(text)
    code, out, err = run(capsys, "pull", str(tmp_path / "set"), "--json")
    (image,) = json.loads(out)["images"]
    assert (code, image["name"]) == (1, "127.0.0.1:9/base:1")
    assert image["problem"]
    assert "0 of 1 image ready" in err
    assert run(capsys, "pull", str(tmp_path / "set"), "--no-images")[0] == 0


@needs_bwrap
def test_check_counts_the_faults_of_a_set(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", address, "--json", "--parallel", "2")
    report: dict[str, Any] = json.loads(out)
    assert code == 1
    assert {task["id"]: task["ok"] for task in report["tasks"]} == {"bad": False, "good": True}
    assert report["faults"] == {"solution-below-1.0": 1}
    assert "2 tasks, 1 passed, 1 failed (1 solution-below-1.0)" in err
    assert run(capsys, "check", address, "--filter", "good")[0] == 0


@pytest.mark.parametrize("command", [["tasks", "ls"], ["check"], ["rollout", "--model", "demo"]])
def test_ctrl_c_removes_what_was_fetched_in_part(command: list[str], tmp_path: Path) -> None:
    store = Store(slow={"acme/one"})
    store.publish_dataset("acme/sums", {"acme/one": store.publish_task("acme/one", {"instruction.md": "Do."})})
    cache = tmp_path / "cache"
    with serve_store(store) as url:
        variables = {"PADDOCK_TASKS": str(cache), "PADDOCK_PACKAGE_STORE": url, "PADDOCK_PACKAGE_STORE_KEY": KEY}
        words = [sys.executable, "-m", "paddock", *command, "acme/sums@latest"]
        process = subprocess.Popen(words, env={**os.environ, **variables}, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not list(cache.rglob("*.tar.gz")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, "error: interrupted" in err) == (130, True)
    assert not list(cache.rglob("*.partial"))


@pytest.mark.parametrize("command", ["ls", "pull", "check"])
def test_a_set_that_cannot_be_read_is_an_error_with_a_hint(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, command, "./nothing")
    assert (code, out) == (2, "")
    assert "hint:" in err
