"""Rows like those of SWE-bench, with the parsers of the `swebench` package, on a small image of their own."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripts.peers import peer_python

from paddock.rollouts.api import run_batch
from paddock.sandbox.images.build import build_image
from paddock.sandbox.images.store import default_store
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.store import Store
from paddock.tasks.task import Task
from paddock.tasks.taskset import load_tasks
from paddock.testing.task import TaskCheck
from rollouts.played import needs_bwrap

pytestmark = [pytest.mark.anyio, pytest.mark.end_to_end, pytest.mark.timeout(300), needs_bwrap]

IMAGE = "paddock-swebench-test:1"
DOCKERFILE = r"""
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends git python3-pytest
WORKDIR /testbed
RUN git init -q . \
 && printf 'def add(a, b):\n    return a - b\n' > calc.py \
 && printf 'from calc import add\n\ndef test_zero():\n    assert add(0, 0) == 0\n' > test_calc.py \
 && git add -A && git -c user.name=a -c user.email=a@example.com commit -qm base
"""
GOLD = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
TEST = """\
diff --git a/test_calc.py b/test_calc.py
--- a/test_calc.py
+++ b/test_calc.py
@@ -2,3 +2,6 @@
 
 def test_zero():
     assert add(0, 0) == 0
+
+def test_sum():
+    assert add(1, 2) == 3
"""
ROW: dict[str, Any] = {
    "instance_id": "local__calc-1",
    "repo": "local/calc",
    "version": "1.0",
    "base_commit": "HEAD",
    "problem_statement": "add(1, 2) must be 3.",
    "patch": GOLD,
    "test_patch": TEST,
    "FAIL_TO_PASS": json.dumps(["test_calc.py::test_sum"]),
    "PASS_TO_PASS": ["test_calc.py::test_zero"],
    "image": IMAGE,
    "test_cmd": "python3 -m pytest -rA -p no:cacheprovider",
    "log_parser": "parse_log_pytest",
}
FORGE = "echo 1 > /logs/verifier/reward.txt"
CHEATS = {
    "a test that writes the reward": f"cat >> calc.py <<'E'\nimport os; os.system('{FORGE}')\nE\n",
    "a failing test that is said to pass": "echo 'print(\"PASSED test_calc.py::test_sum\")' >> calc.py",
    "a repository that cannot be imported": "echo 'raise SystemExit(0)' > calc.py",
}


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_SWEBENCH_PYTHON", str(peer_python("swebench")))


async def make_image(folder: Path) -> None:
    if default_store().find(IMAGE) is None:
        await build_image(DOCKERFILE, folder, name=IMAGE, network=NetworkPolicy("public"), timeout=240)


def load(folder: Path, *changes: dict[str, Any]) -> list[Task]:
    lines = [json.dumps({**ROW, **change}) for change in changes or ({},)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return load_tasks(f"swebench:{folder}/rows.jsonl")


async def scores(task: Task) -> dict[str, str]:
    return {result.name: f"{result.outcome}: {result.detail}" for result in await TaskCheck(task).run()}


async def test_the_patch_of_a_row_scores_1_and_nothing_scores_0(tmp_path: Path) -> None:
    await make_image(tmp_path)
    results = await scores(load(tmp_path)[0])
    assert results["the solution scores 1.0"] == "passed: reward 1 (sealed)"
    assert results["doing nothing scores below 1.0"] == "passed: reward 0 (sealed)"


@pytest.mark.parametrize("script", CHEATS.values(), ids=CHEATS)
async def test_what_the_work_writes_or_prints_does_not_make_a_reward(tmp_path: Path, script: str) -> None:
    await make_image(tmp_path)
    task = replace(load(tmp_path)[0], solution={"solve.sh": f"cd /testbed\n{script}".encode()})
    result = (await scores(task))["the solution scores 1.0"]
    assert result.startswith("failed")
    assert "reward 0" in result or "no reward" in result


async def test_rows_that_cannot_be_scored_end_as_faults_of_the_task(tmp_path: Path) -> None:
    tasks = load(
        tmp_path,
        {"instance_id": "one", "log_parser": "nope"},
        {"instance_id": "two", "log_parser": None},
        {"instance_id": "three", "FAIL_TO_PASS": [], "PASS_TO_PASS": []},
    )
    store = Store.open(tmp_path / "store")
    try:
        records = (await run_batch(tasks, model="demo", store=store)).records
    finally:
        store.close()
    assert [(record.outcome, record.reward) for record in records] == [("task", None)] * 3
    for record, words in zip(records, ("no parser 'nope'", "no log_parser", "neither FAIL_TO_PASS"), strict=True):
        assert words in str(record.error)
        assert record.metadata["task_set"]["hash"]


def test_a_row_without_an_image_has_the_published_one(tmp_path: Path) -> None:
    (task,) = load(tmp_path, {"image": None})
    assert task.image is not None
    assert task.image.name.startswith("swebench/sweb.eval.")
    assert task.image.name.endswith(".local_1776_calc-1:latest")


def test_rows_in_parquet_are_the_same_tasks(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (task,) = load(tmp_path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), tmp_path / "rows.parquet")
    assert load_tasks(f"swebench:{tmp_path}/rows.parquet")[0].hash == task.hash
