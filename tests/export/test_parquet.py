"""Parquet: the rows of a file are the samples."""

import io
import json
from pathlib import Path

import pytest

from paddock.errors import ConfigError
from paddock.export import load_form, parquet
from paddock.export.policy import Policy
from paddock.export.stream import export, read_rollouts, select_keys
from paddock.store import Store


def test_parquet_has_the_same_rows_as_the_samples(store: Store, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    report = export(store, "parquet", tmp_path / "out.parquet")
    rows = arrow.read_table(tmp_path / "out.parquet").to_pylist()
    expected = [
        document
        for about, calls in read_rollouts(store, select_keys(store), whole=False)
        for document in load_form("parquet").export(about, calls, Policy())
    ]
    assert rows == expected
    assert (report.rollouts, report.documents) == (2, 4)
    assert report.tokens == sum(len(row["prompt_ids"]) + len(row["response_ids"]) for row in rows)


def test_parquet_flags_unscored_rollouts(store: Store, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    export(store, "parquet", tmp_path / "out.parquet", policy=Policy(unscored="flag"))
    rows = {row["rollout_id"]: row for row in arrow.read_table(tmp_path / "out.parquet").to_pylist()}
    assert rows["r2"]["reward"] is None
    assert json.loads(rows["r2"]["metadata"])["unscored"] == "it hung"


def test_parquet_of_nothing_is_an_empty_table(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    with Store.open(tmp_path / "empty") as empty:
        export(empty, "parquet", tmp_path / "out.parquet")
    assert arrow.read_table(tmp_path / "out.parquet").num_rows == 0


def test_parquet_goes_to_a_file_only(store: Store) -> None:
    with pytest.raises(ConfigError):
        export(store, "parquet", io.BytesIO())


def test_rows_are_written_in_several_row_groups(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrow = pytest.importorskip("pyarrow.parquet")
    export(store, "parquet", tmp_path / "one.parquet")
    monkeypatch.setattr(parquet, "ROW_GROUP_TOKENS", 10)
    export(store, "parquet", tmp_path / "several.parquet")
    assert arrow.ParquetFile(tmp_path / "several.parquet").metadata.num_row_groups > 1
    tables = [arrow.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("one", "several")]
    assert tables[0] == tables[1]
