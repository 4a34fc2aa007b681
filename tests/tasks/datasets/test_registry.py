import json
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import TaskError
from paddock.tasks.datasets.resolve import SetOptions
from paddock.tasks.taskset import TASK_SET, is_task_set, load_tasks
from tasks.datasets.repositories import commit_files, make_repository, serve_folder, task_files


def registry(folder: Path, *datasets: dict[str, Any]) -> str:
    (folder / "registry.json").write_text(json.dumps(datasets))
    return str(folder / "registry.json")


def dataset(version: str, *tasks: dict[str, Any]) -> dict[str, Any]:
    return {"name": "org/set", "version": version, "description": "", "tasks": list(tasks), "metrics": []}


def in_repository(folder: Path, name: str, commit: str | None) -> dict[str, Any]:
    return {"name": name, "git_url": f"file://{folder}", "git_commit_id": commit, "path": f"tasks/{name}"}


def test_a_dataset_has_tasks_of_repositories_and_folders(tmp_path: Path) -> None:
    commit = make_repository(tmp_path / "r", task_files("a", "b"))
    (tmp_path / "here").mkdir()
    (tmp_path / "here/instruction.md").write_text("Do here.")
    rows = [in_repository(tmp_path / "r", "b", commit), in_repository(tmp_path / "r", "a", "HEAD")]
    place = registry(tmp_path, dataset("1.0", *rows, {"name": "here", "path": "here"}))
    tasks = load_tasks("org/set@1.0", SetOptions(registry=place))
    assert [task.id for task in tasks] == ["b", "a", "here"]
    assert [task.metadata[TASK_SET].get("commit") for task in tasks] == [commit, commit, None]
    assert {task.metadata[TASK_SET]["set"] for task in tasks} == {"org/set@1.0"}


@pytest.mark.parametrize("place", ["", "#lists", "#lists/registry.json", "@main#lists/other.json"])
def test_a_registry_in_a_repository_has_tasks_of_it(tmp_path: Path, place: str) -> None:
    other = make_repository(tmp_path / "other", task_files("b"))
    rows = [{"name": "a", "path": "tasks/a"}, in_repository(tmp_path / "other", "b", other)]
    text = json.dumps([dataset("1.0", *rows)])
    folder = "lists/" if place else ""
    names = {f"{folder}registry.json": text, f"{folder}other.json": text}
    commit = make_repository(tmp_path / "r", {**names, **task_files("a", "not listed", below=f"{folder}tasks/")})
    tasks = load_tasks("org/set@1.0", SetOptions(registry=f"git+file://{tmp_path}/r{place}"))
    assert [task.instruction for task in tasks] == ["Do a.", "Do b."]
    assert [task.metadata[TASK_SET]["commit"] for task in tasks] == [commit, other]


def test_a_registry_in_a_repository_is_asked_again_with_refresh(tmp_path: Path) -> None:
    place = f"git+file://{tmp_path}/r"
    first = {"registry.json": json.dumps([dataset("1.0", {"name": "a", "path": "tasks/a"})])}
    make_repository(tmp_path / "r", {**first, **task_files("a", "b")})
    assert [task.id for task in load_tasks("org/set", SetOptions(registry=place))] == ["a"]
    rows = [{"name": name, "path": f"tasks/{name}"} for name in ("a", "b")]
    commit_files(tmp_path / "r", {"registry.json": json.dumps([dataset("1.1", *rows)])})
    assert [task.id for task in load_tasks("org/set", SetOptions(registry=place))] == ["a"]
    assert [task.id for task in load_tasks("org/set", SetOptions(registry=place, refresh=True))] == ["a", "b"]


def test_a_folder_is_a_registry_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/instruction.md").write_text("Do here.")
    registry(tmp_path, dataset("1.0", {"name": "here", "path": "here"}))
    assert load_tasks("org/set@1.0", SetOptions(registry=str(tmp_path)))[0].instruction == "Do here."


@pytest.mark.parametrize(
    ("versions", "newest"),
    [(["1.9", "1.10", "1.2"], "1.10"), (["2.0", "head"], "head"), (["1.0", "1.0rc1"], "1.0"), (["beta", "v1"], "v1")],
)
def test_without_a_version_the_newest_is_taken(tmp_path: Path, versions: list[str], newest: str) -> None:
    for version in versions:
        (tmp_path / version).mkdir()
        (tmp_path / version / "instruction.md").write_text(version)
    place = registry(tmp_path, *(dataset(version, {"name": "t", "path": version}) for version in versions))
    assert load_tasks("org/set", SetOptions(registry=place))[0].instruction == newest


def test_a_registry_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = make_repository(tmp_path / "r", task_files("a"))
    registry(tmp_path, dataset("1.0", in_repository(tmp_path / "r", "a", commit)))
    with serve_folder(tmp_path) as url:
        monkeypatch.setenv("PADDOCK_TASK_REGISTRY", f"{url}/registry.json")
        assert is_task_set("org/set")
        assert load_tasks("org/set@1.0")[0].id == "a"
    assert load_tasks("org/set@1.0")[0].id == "a"
    with pytest.raises(TaskError, match="cannot be read"):
        load_tasks("org/set@1.0", SetOptions(refresh=True))


@pytest.mark.parametrize(
    ("row", "name", "says"),
    [
        (dataset("1.0", {"name": "t", "path": "../x"}), "org/set@1.0", "the path of t is '../x'"),
        (dataset("1.0", {"name": "t", "path": "x", "git_url": "ext::id"}), "org/set@1.0", "the git_url of t"),
        (dataset("1.0", {"name": "t"}), "org/set@1.0", "path is missing"),
        (dataset("1.0"), "org/set@1.0", "lists no task"),
        (dataset("1.0", {"name": "t", "path": "x"}), "org/set@2.0", "no version '2.0'"),
        (dataset("1.0", {"name": "t", "path": "x"}), "org/sat@1.0", "no dataset 'org/sat'"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, row: dict[str, Any], name: str, says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks(name, SetOptions(registry=registry(tmp_path, row)))
    assert caught.value.hint


def test_a_name_with_a_version_needs_a_registry() -> None:
    with pytest.raises(TaskError, match="no registry is named") as caught:
        load_tasks("org/set@1.0")
    assert "--registry" in str(caught.value.hint)
