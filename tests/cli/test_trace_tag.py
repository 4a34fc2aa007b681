"""`paddock trace tag`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paddock.cli.commands import paddock
from paddock.errors import ConfigError, StoreError
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.open(tmp_path) as opened:
        for name in ("r00aa", "r00bb"):
            opened.finish(RolloutRecord(name, "task", outcome=Outcome.OK))
    return tmp_path


def trace(store: Path, *arguments: str) -> Result:
    return CliRunner().invoke(paddock, ["trace", *arguments, "--store", str(store)], standalone_mode=False)


def test_tags_are_added_removed_and_printed(store: Path) -> None:
    assert trace(store, "tag", "r00aa", "r00b", "+good", "+again").stdout == "r00aa  again good\nr00bb  again good\n"
    assert trace(store, "tag", "r00aa", "-again").stdout == "r00aa  good\n"
    assert json.loads(trace(store, "tag", "r00aa", "--json").stdout) == {"r00aa": ["good"]}
    listed = trace(store, "list", "--tag", "again", "--json").stdout.splitlines()
    assert [json.loads(line)["rollout_id"] for line in listed] == ["r00bb"]
    assert "tags:      good" in trace(store, "show", "r00aa").stdout


def test_a_wrong_tag_or_rollout_is_refused(store: Path) -> None:
    assert isinstance(trace(store, "tag", "+good").exception, ConfigError)
    assert isinstance(trace(store, "tag", "r00aa", "+").exception, ConfigError)
    assert isinstance(trace(store, "tag", "r00aa", "").exception, StoreError)
    assert isinstance(trace(store, "tag", "r-none", "+good").exception, StoreError)
