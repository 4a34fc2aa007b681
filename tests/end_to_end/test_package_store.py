"""Harbor's own client publishes tasks to a store on loopback, and Paddock fetches and checks them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from scripts.peers import find_interpreter, peer_python

from paddock.tasks.taskset import TASK_SET, load_tasks
from rollouts.played import needs_bwrap
from tasks.datasets.package_stores import API_KEY, KEY, Store, serve_store

needs_harbor = pytest.mark.skipif(find_interpreter("harbor") is None, reason="Harbor needs Python 3.12")
pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(300), needs_harbor]

PROGRAM_SECONDS = 120
FILES = {
    "instruction.md": "Write 1 into done.",
    "environment/.keep": "",
    "solution/solve.sh": "echo 1 > done",
    "tests/test.sh": "if grep -q 1 done; then echo 1; else echo 0; fi > /logs/verifier/reward.txt",
    "tests/data-set": "sorted before a folder",
    "tests/data/é.txt": "sorted by its code point",
    "notes.md": "Not published.",
}
TOML = 'schema_version = "1.4"\n[task]\nname = "acme/{name}"\n[agent]\ntimeout_sec = 30.0\n'


def harbor(*words: str, folder: Path, variables: Mapping[str, str]) -> str:
    program = peer_python("harbor").with_name("harbor")
    done = subprocess.run(
        [program, *words],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "HARBOR_TELEMETRY": "0", "HOME": str(folder), **variables},
        input="y\n" * 9,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def variables(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The variables of Harbor's client; Paddock reads them too."""
    monkeypatch.setenv("PADDOCK_TASKS", str(tmp_path / "cache"))
    with serve_store(store) as url:
        variables = {"HARBOR_SUPABASE_URL": url, "HARBOR_SUPABASE_PUBLISHABLE_KEY": KEY}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables


@pytest.fixture
def published(tmp_path: Path, variables: dict[str, str]) -> Path:
    """A dataset of two tasks, published with the tag 1.0. Its folder has the dataset.toml that Harbor made."""
    folder = tmp_path / "set"
    for name in ("one", "two"):
        for path, text in {**FILES, "task.toml": TOML.format(name=name)}.items():
            place = folder / name / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    (folder / "one/tests/test.sh").chmod(0o755)
    harbor("dataset", "init", "acme/sums", "-o", ".", folder=folder, variables=variables)
    key = {"HARBOR_API_KEY": API_KEY}
    harbor("publish", ".", "--public", "--yes", "-t", "1.0", folder=folder, variables={**variables, **key})
    return folder


def test_what_harbor_publishes_is_fetched_as_harbor_does(
    published: Path, tmp_path: Path, variables: dict[str, str]
) -> None:
    tasks = load_tasks("acme/sums@1.0")
    assert [task.id for task in tasks] == ["acme/one", "acme/two"]
    harbor("download", "acme/sums@1.0", "-o", str(tmp_path / "theirs"), folder=tmp_path, variables=variables)
    for task in tasks:
        ours, theirs = Path(task.source), tmp_path / "theirs/sums" / task.id.partition("/")[2]
        assert contents(ours) == contents(theirs)
        assert "notes.md" not in contents(ours)


def contents(folder: Path) -> dict[str, tuple[bytes, bool]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.read_bytes(), os.access(path, os.X_OK)) for path in files}


def test_a_manifest_of_harbor_names_the_published_tasks(published: Path, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    manifest = (published / "dataset.toml").rename(tmp_path / "alone/dataset.toml")
    packages = [task.metadata[TASK_SET]["package"] for task in load_tasks(manifest)]
    assert packages == [task.metadata[TASK_SET]["package"] for task in load_tasks("acme/sums@latest")]


@needs_bwrap
def test_the_commands_take_a_package(published: Path) -> None:
    listed = paddock("tasks", "pull", "acme/sums@1.0", "--json")
    assert (listed["tasks"], len(listed["digests"])) == (2, 1)
    report = paddock("tasks", "check", "acme/sums@1.0", "--json")
    assert report["counts"] == {"passed": 2, "failed": 0}


def paddock(*words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "paddock", *words], capture_output=True, text=True, timeout=PROGRAM_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
