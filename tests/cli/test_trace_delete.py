"""`paddock trace rm` and `paddock trace prune`."""

import json
import time
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
    folder = tmp_path / "store"
    with Store.open(folder) as opened:
        for name, days in (("r00aa", 30), ("r00bb", 2), ("r00cc", 1)):
            record = RolloutRecord(name, "task", batch_id=f"b{days > 10}", started_at=time.time() - days * 86_400)
            opened.begin(record)
            if name != "r00cc":
                record.outcome, record.finished_at = Outcome.OK, record.started_at + 1
                opened.finish(record)
    return folder


def trace(store: Path, *arguments: str) -> Result:
    return CliRunner().invoke(paddock, ["trace", *arguments, "--store", str(store)], standalone_mode=False)


def names(store: Path) -> set[str]:
    with Store.open(store, read_only=True) as opened:
        return {record.rollout_id for record in opened.list()}


def test_named_rollouts_are_deleted(store: Path) -> None:
    result = trace(store, "rm", "r00aa", "r00b")
    assert result.return_value == 0
    assert "2 rollouts deleted" in result.stderr
    assert names(store) == {"r00cc"}


def test_an_unknown_id_deletes_nothing(store: Path) -> None:
    result = trace(store, "rm", "r00aa", "r00zz")
    assert isinstance(result.exception, StoreError)
    assert names(store) == {"r00aa", "r00bb", "r00cc"}


@pytest.mark.parametrize("arguments", [("r00cc",), ("--batch", "bFalse")], ids=["by id", "by batch"])
def test_a_running_rollout_is_refused(store: Path, arguments: tuple[str, ...]) -> None:
    result = trace(store, "rm", *arguments)
    assert "still run" in str(result.exception)
    assert len(names(store)) == 3


def test_a_whole_batch_is_deleted(store: Path) -> None:
    assert json.loads(trace(store, "rm", "--batch", "bTrue", "--json").stdout)["rollouts"] == ["r00aa"]


def test_old_rollouts_are_pruned(store: Path) -> None:
    assert json.loads(trace(store, "prune", "--older-than", "1w", "--json").stdout)["rollouts"] == ["r00aa"]
    assert names(store) == {"r00bb", "r00cc"}


def test_the_store_is_pruned_to_a_size(store: Path) -> None:
    assert json.loads(trace(store, "prune", "--max-size", "0", "--json").stdout)["rollouts"] == ["r00aa", "r00bb"]


@pytest.mark.parametrize("arguments", [("rm",), ("prune",)])
def test_a_deletion_of_nothing_in_particular_is_refused(store: Path, arguments: tuple[str, ...]) -> None:
    assert isinstance(trace(store, *arguments).exception, ConfigError)


def test_a_missing_store_is_not_created(tmp_path: Path) -> None:
    assert isinstance(trace(tmp_path / "none", "prune", "--older-than", "1d").exception, StoreError)
    assert not (tmp_path / "none").exists()


def test_an_age_without_a_unit_is_refused(store: Path) -> None:
    assert "30d" in str(trace(store, "prune", "--older-than", "30").exception)
