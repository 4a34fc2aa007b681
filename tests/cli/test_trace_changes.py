"""`paddock trace show` of a rollout with snapshots."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddock.cli import run
from paddock.cli.trace_changes import LISTED_CHANGES, summarize
from paddock.rollouts.folder_changes import ShownChange
from paddock.sandbox.folder_scan import FileState
from paddock.store import Store
from rollouts.snapshotted import save_snapshots

LINK = FileState("link", 0o777, target="a.txt")
FOLDERS = (
    {"a.txt": b"one\ntwo\n", "same": b"x"},
    {"a.txt": b"one\n2\n3\n", "same": b"x", "link": LINK},
    {"a.txt": b"one\n2\n3\n", "same": b"x", "link": LINK},
    {"same": b"x", ".git/a": b"1", ".git/b": b"2", "noise": b"\0"},
)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("PADDOCK_STORE", str(tmp_path))
    with Store.open(tmp_path) as opened:
        save_snapshots(opened, FOLDERS)
        yield opened


def show(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    code = run(["trace", "show", "r1234", *options])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_each_call_has_a_line_with_its_files(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = show(capsys)
    assert text.partition("files changed by each call:\n")[2].splitlines() == [
        "c0:   a.txt +2 −1, link +1 −0 (added, link)",
        "c2:   a.txt +0 −3 (removed), link +0 −1 (removed, link), noise (added, binary), .git/ (2 entries of git)",
        "not saved: venv: why",
    ]


def test_one_call_has_a_diff(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = show(capsys, "--changes", "c0")
    assert text.splitlines()[:6] == ["a.txt +2 −1", "@@ -1,2 +1,3 @@", " one", "-two", "+2", "+3"]
    assert show(capsys, "--changes", "1") == (0, "nothing changed\n")
    changes = json.loads(show(capsys, "--changes", "c2", "--json")[1])
    assert [(each["path"], each["kind"]) for each in changes][-1] == (".git/", "changed")


def test_old_snapshots_can_be_pruned(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "prune", "--snapshots-older-than", "1h"]) == 0
    assert "snapshots of 1 rollout deleted" in capsys.readouterr().err
    assert "the snapshots are no longer in the store" in show(capsys)[1]


def test_what_is_not_there_is_reported(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = show(capsys, "--changes", "c9")
    assert code != 0
    assert "has no call c9" in text
    store.expire_snapshots(0.0)
    assert "the snapshots are no longer in the store" in show(capsys)[1]


def test_a_line_counts_all_files() -> None:
    changes = [ShownChange(f"{number}", "added") for number in range(LISTED_CHANGES + 1)]
    assert summarize([*changes, ShownChange("…", "changed", entries=1500)]).endswith("7 (added) and 1501 more")
