import json
import sys
from pathlib import Path

import pytest

from paddock.errors import TaskError
from paddock.tasks.taskset import load_tasks

ROW = {"instance_id": "o__r-1", "problem_statement": "Fix it.", "repo": "o/r", "FAIL_TO_PASS": ["t"]}


def rows(folder: Path, *items: object) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, items)))
    return f"swebench:{folder}/rows.jsonl"


def test_without_the_package_a_hint_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An interpreter without any package.
    monkeypatch.setenv("PADDOCK_SWEBENCH_PYTHON", str(Path(sys.base_prefix, "bin/python3")))
    with pytest.raises(TaskError, match="has no Python package swebench") as caught:
        load_tasks(rows(tmp_path, ROW))
    assert "pip install --no-deps swebench unidiff" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"instance_id": ""}, "instance_id is missing"),
        ({"repo": None}, "repo is missing"),
        ({"patch": 1}, "patch is 1, not text"),
        ({"FAIL_TO_PASS": "[oops"}, "FAIL_TO_PASS is not valid JSON"),
        ({"PASS_TO_PASS": {"a": 1}}, "PASS_TO_PASS is not a list"),
        ({"test_cmd": 3}, "test_cmd is neither text nor a list"),
    ],
)
def test_a_wrong_column_is_named_with_its_line(tmp_path: Path, change: dict[str, object], says: str) -> None:
    with pytest.raises(TaskError, match=rf"rows\.jsonl:2: {says}") as caught:
        load_tasks(rows(tmp_path, ROW, {**ROW, **change}))
    assert caught.value.hint


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("no table")
    for spec, says in ((rows(tmp_path), "holds no row"), (f"swebench:{tmp_path}/rows.parquet", "is not a Parquet")):
        with pytest.raises(TaskError, match=says):
            load_tasks(spec)
