"""`paddock trace export`: what it writes, what it says, and how it ends."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from export.rollouts import call, conversation, record
from paddock.cli.commands import paddock
from paddock.errors import ConfigError
from paddock.export import FORMS
from paddock.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    with Store.open(folder) as opened:
        versioned = conversation(2)
        for each, version in zip(versioned, ("1", "2"), strict=True):
            each.weight_version = version
        for name, reward, calls in (("r00a", 1.0, versioned), ("r00b", None, conversation(1))):
            about = record(name, reward, started_at=float(len(name)), reward_reason="it hung")
            outcome, about.outcome = about.outcome, None
            opened.begin(about)
            for each in calls:
                opened.save_call(name, each)
            about.outcome = outcome
            opened.finish(about)
    return folder


def export(store: Path, *arguments: str) -> Result:
    command = ["trace", "export", "--store", str(store), *arguments]
    return CliRunner().invoke(paddock, command, standalone_mode=False)


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_only_scored_rollouts_are_written_and_the_others_are_explained(store: Path) -> None:
    result = export(store, "--to", "trl")
    assert result.return_value == 0
    assert [line["rollout_id"] for line in lines(result)] == ["r00a"]
    assert "1 trl line of 1 rollout written" in result.stderr
    assert "1 left out: it has no reward: it hung" in result.stderr


def test_unscored_rollouts_can_be_flagged(store: Path) -> None:
    exported = lines(export(store, "--to", "trl", "--unscored", "flag"))
    assert [line["reward"] for line in exported] == [1.0, None]


def test_weights_choose_the_calls(store: Path) -> None:
    (line,) = lines(export(store, "r00a", "--to", "jsonl", "--weights", "newest"))
    assert line["call"] == "c1"
    assert len(lines(export(store, "r00a", "--to", "jsonl", "--weights", "1"))) == 2


@pytest.mark.parametrize(
    ("weights", "newest", "message"),
    [("2", "abc", "'abc', which has no number"), ("any", "2", "--newest has no effect"), ("same", "2", "no effect")],
)
def test_a_newest_version_that_decides_nothing_is_refused(
    store: Path, weights: str, newest: str, message: str
) -> None:
    refused = export(store, "--weights", weights, "--newest", newest).exception
    assert isinstance(refused, ConfigError)
    assert message in refused.message
    assert "--weights" in (refused.hint or "")
    assert lines(export(store, "r00a", "--weights", "same")) == []
    assert lines(export(store, "r00a", "--weights", "newest", "--newest", "9")) == []


def test_a_file_or_a_folder_takes_it(store: Path, tmp_path: Path) -> None:
    export(store, "--to", "verl", "--out", str(tmp_path / "x.jsonl"))
    export(store, "--to", "verl", "--out", str(tmp_path))
    assert (tmp_path / "x.jsonl").read_bytes() == (tmp_path / "rollouts.jsonl").read_bytes() != b""


def test_parquet_is_a_file(store: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert isinstance(export(store, "--to", "parquet").exception, ConfigError)
    assert export(store, "--to", "parquet", "--out", str(tmp_path / "x.parquet")).return_value == 0
    assert parquet.read_table(tmp_path / "x.parquet").num_rows == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_check_writes_nothing_and_reports_what_is_left_out(store: Path, form: str) -> None:
    result = export(store, "--to", form, "--check")
    assert result.return_value == 0, result.output
    if form != "replay":
        assert result.stdout.splitlines() == ["r00b  left out: it has no reward: it hung"]
    assert "would be written" in result.stderr


def test_a_check_ends_with_1_if_something_is_wrong(store: Path, tmp_path: Path) -> None:
    with Store.open(store) as opened:
        about = record("r00c", 1.0, outcome=None)
        opened.begin(about)
        opened.save_call("r00c", call(0, [1], [2], logprobs=[0.75]))
        opened.finish(record("r00c", 1.0))
    result = export(store, "r00c", "--check", "--json")
    assert result.return_value == 1
    finding, report = lines(result)
    assert finding["kind"] == "wrong"
    assert report["wrong"] == 1


def test_a_check_of_nothing_ends_with_1(store: Path) -> None:
    assert export(store, "--check", "--batch", "another").return_value == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--to", "parkett"),
        ("--weights", "old"),
        ("--roles", "agent,judge"),
        ("--weights", "-1"),
        ("--out", "/no/such/folder/x.jsonl"),
        ("--to", "parquet", "--out", "/no/such/folder/x.parquet"),
        ("--to", "html", "r00a", "--out", "/no/such/folder/x.html"),
        ("--to", "html", "r00a", "--check"),
    ],
)
def test_invalid_options_are_refused_with_a_hint(store: Path, arguments: tuple[str, ...]) -> None:
    error = export(store, *arguments).exception
    assert isinstance(error, ConfigError)
    assert error.hint


def test_a_list_without_a_match_is_not_an_empty_store(store: Path, tmp_path: Path) -> None:
    def printed(folder: Path, *arguments: str) -> str:
        command = ["trace", "list", "--store", str(folder), *arguments]
        return CliRunner().invoke(paddock, command, standalone_mode=False).stderr

    assert "no rollout matches --task another --outcome budget" in printed(
        store, "--task", "another", "--outcome", "budget"
    )
    Store.open(tmp_path / "empty").close()
    assert "the store holds no rollouts" in printed(tmp_path / "empty")


def test_trees_are_one_line_each(store: Path) -> None:
    documents = lines(export(store, "--tree"))
    assert documents
    assert all({"tree_id", "rollouts", "nodes"} <= document.keys() for document in documents)
    assert export(store, "--tree", "--check").exit_code == 0
    refused = export(store, "--tree", "--to", "trl")
    assert refused.exit_code != 0
