import shutil
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import TaskError
from paddock.tasks.datasets.resolve import SetOptions
from paddock.tasks.requirements import check_can_run
from paddock.tasks.task import Task
from paddock.tasks.taskset import TASK_SET, load_tasks, set_hash
from tasks.datasets.repositories import (
    commit_files,
    git,
    make_repository,
    serve_folder,
    serve_repositories,
    task_files,
)

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


def origin(task: Task) -> dict[str, Any]:
    values: dict[str, Any] = task.metadata[TASK_SET]
    return values


def test_a_set_in_a_repository_states_its_commit_and_hash(tmp_path: Path) -> None:
    commit = make_repository(tmp_path / "r", task_files("a", "b"))
    spec = f"git+file://{tmp_path}/r#tasks"
    tasks = load_tasks(spec)
    assert [task.id for task in tasks] == ["a", "b"]
    assert origin(tasks[0]) == {"set": spec, "commit": commit, "hash": set_hash(tasks)}
    local = load_tasks(tmp_path / "r/tasks")
    assert [task.hash for task in local] == [task.hash for task in tasks]
    assert origin(local[0])["hash"] == origin(tasks[0])["hash"]


def test_a_revision_is_a_branch_a_tag_or_a_commit(tmp_path: Path) -> None:
    first = make_repository(tmp_path / "r", task_files("a"))
    git(tmp_path / "r", "tag", "--annotate", "v1", "--message", "one")
    second = commit_files(tmp_path / "r", task_files("b"))
    address = f"git+file://{tmp_path}/r"
    for revision, commit in (("v1", first), (first, first), ("main", second), ("refs/heads/main", second)):
        tasks = load_tasks(f"{address}@{revision}#tasks")
        assert {origin(task)["commit"] for task in tasks} == {commit}
        assert len(tasks) == (1 if commit == first else 2)


def test_a_second_run_needs_no_network_and_pull_refreshes(tmp_path: Path) -> None:
    first = make_repository(tmp_path / "r", task_files("a"))
    spec = f"git+file://{tmp_path}/r@main#tasks"
    load_tasks(spec)
    second = commit_files(tmp_path / "r", task_files("b"))
    assert origin(load_tasks(spec)[0])["commit"] == first
    assert origin(load_tasks(spec, SetOptions(refresh=True))[0])["commit"] == second
    shutil.rmtree(tmp_path / "r")
    assert [task.id for task in load_tasks(spec)] == ["a", "b"]
    with pytest.raises(TaskError, match="cannot be read with git"):
        load_tasks(spec, SetOptions(refresh=True))


def test_only_what_was_named_is_fetched(tmp_path: Path, cache: Path) -> None:
    make_repository(
        tmp_path / "r", {**task_files("a", "b"), "big/data": "x", "more.jsonl": '{"instruction": "Line."}'}
    )
    git(tmp_path / "r", "config", "uploadpack.allowFilter", "true")
    assert [task.id for task in load_tasks(f"git+file://{tmp_path}/r#tasks/b")] == ["b"]
    files = {path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"}
    assert files >= {"instruction.md", "submodules.json"}
    assert not files & {"data", "HEAD", "config"}
    assert load_tasks(f"git+file://{tmp_path}/r#more.jsonl")[0].instruction == "Line."


@pytest.mark.parametrize("serve", [serve_folder, serve_repositories], ids=["dumb", "smart"])
def test_repositories_are_fetched_over_http(tmp_path: Path, serve: Any) -> None:
    commit = make_repository(tmp_path / "r", task_files("a"))
    git(tmp_path, "clone", "--quiet", "--bare", "r", "served/r.git")
    git(tmp_path / "served/r.git", "update-server-info")
    with serve(tmp_path / "served") as url:
        (task,) = load_tasks(f"git+{url}/r.git#tasks")
    assert (task.id, origin(task)["commit"]) == ("a", commit)


def test_hooks_filters_and_submodules_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_repository(tmp_path / "other", {"f": "x"})
    make_repository(tmp_path / "r", {**task_files("a", "b"), ".gitattributes": "*.bin filter=lfs\n"})
    git(tmp_path / "r", "submodule", "add", "--quiet", f"{tmp_path}/other", "tasks/a/environment/lib")
    commit_files(tmp_path / "r", {"tasks/b/environment/data.bin": POINTER})
    ran = tmp_path / "ran"
    hook = tmp_path / "template/hooks/post-checkout"
    hook.parent.mkdir(parents=True)
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    settings = f"[init]\ntemplateDir = {tmp_path}/template\n[core]\nhooksPath = {hook.parent}\n"
    (tmp_path / "settings").write_text(f'{settings}[filter "lfs"]\nsmudge = touch {ran}\nrequired = true\n')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    first, second = load_tasks(f"git+file://{tmp_path}/r#tasks")
    assert not ran.exists()
    for task, words in ((first, "environment/lib is a git submodule"), (second, "data.bin is a Git LFS pointer")):
        with pytest.raises(TaskError, match=words) as caught:
            check_can_run(task, "bwrap")
        assert "clone" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("ending", "says", "hint"),
    [
        ("@nope#tasks", "no branch or tag 'nope'", "ls-remote"),
        ("@0123abc#tasks", "not a whole commit", "40 digits"),
        ("@" + "0" * 40, "cannot be read with git", "revision"),
        ("#nothing", "has no 'nothing'", "folder or file"),
        ("", "holds no task", "#tasks"),
    ],
)
def test_what_cannot_be_read_is_named_and_nothing_is_left(
    tmp_path: Path, cache: Path, ending: str, says: str, hint: str
) -> None:
    make_repository(tmp_path / "r", task_files("a"))
    with pytest.raises(TaskError, match=says) as caught:
        load_tasks(f"git+file://{tmp_path}/r{ending}")
    assert hint in str(caught.value.hint)
    assert not list(cache.rglob("*.partial"))


def test_a_link_out_of_the_repository_is_refused(tmp_path: Path) -> None:
    make_repository(tmp_path / "r", task_files("a"))
    (tmp_path / "r/out").symlink_to(tmp_path)
    commit_files(tmp_path / "r", {})
    with pytest.raises(TaskError, match="a link out of the repository"):
        load_tasks(f"git+file://{tmp_path}/r#out")


def test_passwords_of_addresses_are_in_no_message_and_no_record(tmp_path: Path) -> None:
    make_repository(tmp_path / "r", task_files("a"))
    with serve_folder(tmp_path / "r") as url, pytest.raises(TaskError) as caught:
        load_tasks(f"git+{url.replace('://', '://me:secret@')}/nothing.git")
    assert "secret" not in f"{caught.value} {caught.value.hint}"
