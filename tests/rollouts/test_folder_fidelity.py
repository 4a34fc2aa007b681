"""Whether a fork has the same files: what counts as a difference, and at which calls one can tell."""

from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call
from paddock.rollouts.folder_fidelity import compare_with_source, describe_files, find_interleaved
from paddock.sandbox.folder_scan import FileState
from paddock.store import Store
from rollouts.snapshotted import Files, digest, save_snapshots

UNREAD = FileState("file", 0o644, 9, reason="too large", modified=1)


def compared(folder: Path, one: Files, other: Files) -> dict[str, Any]:
    """The result for a fork with other files at its only call."""
    with Store.open(folder) as store:
        source, own = (save_snapshots(store, (files, files), name) for files, name in ((one, "r1a"), (other, "r1b")))
        return compare_with_source(store, source, store.calls(own), [("c0", "c0")])


@pytest.mark.parametrize(
    ("one", "other", "state"),
    [
        ({"a": b"x"}, {"a": b"x"}, "equal"),
        ({"a": b"x"}, {"a": b"y"}, "different"),
        ({"a": b"x"}, {}, "different"),
        ({}, {"a": b"x"}, "different"),
        ({"a": b"x"}, {"a": FileState("file", 0o755, 1, digest(b"x"))}, "different"),
        ({"a": FileState("link", 0o777, target="b")}, {"a": FileState("link", 0o777, target="c")}, "different"),
        ({"a": b"at 12:31:07"}, {"a": b"at 12:31:09"}, "volatile"),
        ({".git/index": b"x"}, {".git/index": b"y"}, "volatile"),
        ({"a.pyc": b"x"}, {"a.pyc": b"y"}, "volatile"),
        ({"a": UNREAD}, {"a": FileState("file", 0o644, 9, reason="too large", modified=2)}, "equal"),
    ],
)
def test_files_are_compared_by_what_an_agent_sees(tmp_path: Path, one: Files, other: Files, state: str) -> None:
    assert compared(tmp_path, one, other)["state"] == state


def test_a_difference_is_described_on_one_line(tmp_path: Path) -> None:
    result = compared(tmp_path, {"a": b"x", "b": b"y"}, {"a": b"z"})
    assert describe_files(result) == "files differ from c0 on (a and 1 more); equal at 0 of 1 calls"
    assert result["paths"][1] == {
        "path": "b",
        "kind": "missing in the fork",
        "difference": None,
        "call": "c0",
        "recorded": "c0",
    }


def test_a_deleted_source_is_the_reason(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        assert "no longer in the store" in compare_with_source(store, "r-gone", [], [])["reason"]


def calls(*parents: tuple[str, str | None]) -> list[Call]:
    return [Call(name, number, parent=parent, started=number) for number, (name, parent) in enumerate(parents)]


def test_an_agent_that_waits_for_a_subagent_does_not_disturb_it() -> None:
    assert find_interleaved(calls(("m0", None), ("s0", None), ("s1", "s0"), ("m1", "m0"))) == set()


def test_parallel_subagents_disturb_each_other() -> None:
    both = calls(("m0", None), ("s0", None), ("t0", None), ("s1", "s0"), ("t1", "t0"), ("m1", "m0"))
    assert find_interleaved(both) == {"t0", "s1"}
