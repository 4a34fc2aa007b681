import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import TaskError
from paddock.tasks.requirements import check_can_run
from paddock.tasks.shipped import shipped
from paddock.tasks.task import Task
from paddock.tasks.taskset import TaskSet, load_tasks


def folder_of(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "instruction.md").write_text(f"Do {name}.")
    return root


def lines(path: Path, *items: object) -> Path:
    path.write_text("\n".join(item if isinstance(item, str) else json.dumps(item) for item in items))
    return path


def test_a_folder_of_tasks_is_a_sequence(tmp_path: Path) -> None:
    tasks = TaskSet.from_folder(folder_of(tmp_path, "b", "a", "c"))
    (tmp_path / "README.md").write_text("not a task")
    assert tasks.ids == ("a", "b", "c")
    assert [task.instruction for task in tasks] == ["Do a.", "Do b.", "Do c."]
    assert [task.id for task in tasks[1:]] == ["b", "c"]
    assert tasks[-1].id == "c"
    assert Task("Do a.", id="a") in tasks


def test_one_task_folder_is_a_set_of_one(tmp_path: Path) -> None:
    assert TaskSet.from_folder(folder_of(tmp_path, "a") / "a").ids == ("a",)


def test_the_files_of_a_task_are_read_when_it_is_asked_for(tmp_path: Path) -> None:
    tasks = TaskSet.from_folder(folder_of(tmp_path, "a"))
    (tmp_path / "a" / "instruction.md").write_text("Do it again.")
    assert tasks[0].instruction == "Do it again."
    (tmp_path / "a" / "task.toml").write_text('[task]\nname = "other"')
    with pytest.raises(TaskError, match="now holds 'other', not 'a'"):
        tasks[0]


def test_lines_are_tasks(tmp_path: Path) -> None:
    file = lines(tmp_path / "t.jsonl", {"instruction": "é", "id": "a"}, "", {"instruction": "two"})
    tasks = TaskSet.from_jsonl(file)
    assert [task.instruction for task in tasks] == ["é", "two"]
    assert tasks.ids == ("a", Task("two").id)
    assert tasks[1].source == f"{file}:3"
    assert [task.id for task in pickle.loads(pickle.dumps(tasks))] == list(tasks.ids)


def test_tasks_are_selected_by_id_in_the_order_asked_for() -> None:
    tasks = TaskSet(Task(name, id=name) for name in ("one", "two", "three"))
    assert tasks.select(["three", "one"]).ids == ("three", "one")
    with pytest.raises(TaskError, match="no task 'tow'") as caught:
        tasks.select(["tow"])
    assert "two" in str(caught.value.hint)


def numbered(count: int) -> TaskSet:
    return TaskSet(Task(f"Do {number}.", id=f"task-{number:02}") for number in reversed(range(count)))


@pytest.mark.parametrize("pattern", ["task-0[13]", "/-0[13]$/"])
def test_tasks_are_filtered_by_glob_or_regex(pattern: str) -> None:
    assert numbered(12).select(pattern=pattern).ids == ("task-03", "task-01")
    assert numbered(12).select(pattern="0[13]").ids == ()


@pytest.mark.parametrize("count", [1, 3, 4, 20])
def test_shards_are_disjoint_complete_and_independent_of_the_order(count: int) -> None:
    tasks = numbered(11)
    shards = [tasks.select(shard=f"{number}/{count}").ids for number in range(1, count + 1)]
    assert sorted(id for shard in shards for id in shard) == sorted(tasks.ids)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    reordered = tasks.select(sorted(tasks.ids)).select(shard=f"1/{count}").ids
    assert sorted(reordered) == sorted(shards[0])


def test_the_limit_comes_after_filter_and_shard() -> None:
    selected = numbered(12).select(pattern="task-0*", shard="2/2", limit=2)
    assert selected.ids == ("task-09", "task-07")
    assert numbered(2).select(limit=5).ids == ("task-01", "task-00")


@pytest.mark.parametrize(
    ("options", "says"),
    [({"shard": text}, "the shard is") for text in ("0/4", "5/4", "1", "1/0", "a/b", "-1/4", "1/4x")]
    + [({"pattern": "/(/"}, "not a regular expression"), ({"limit": 0}, "the limit is 0")],
)
def test_a_selection_that_cannot_be_read_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        numbered(3).select(**options)
    assert caught.value.hint


def test_two_tasks_with_one_id_are_named_by_their_places(tmp_path: Path) -> None:
    file = lines(tmp_path / "t.jsonl", {"instruction": "x", "id": "a"}, {"instruction": "y", "id": "a"})
    with pytest.raises(TaskError, match=r"id 'a': .*t\.jsonl:1 and .*t\.jsonl:2"):
        TaskSet.from_jsonl(file)
    root = folder_of(tmp_path / "set", "a", "b")
    (root / "b" / "task.toml").write_text('[task]\nname = "a"')
    with pytest.raises(TaskError, match=r"id 'a': .*/a and .*/b"):
        TaskSet.from_folder(root)


@pytest.mark.parametrize(
    ("item", "says"),
    [
        ("{", "t.jsonl:2 is not valid JSON"),
        ({"instruction": ""}, "t.jsonl:2: the instruction"),
        ("[" * 9000, "t.jsonl:2"),
    ],
    ids=["broken", "empty", "deep"],
)
def test_a_wrong_line_is_named(tmp_path: Path, item: object, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        TaskSet.from_jsonl(lines(tmp_path / "t.jsonl", {"instruction": "x"}, item))


# -- what a user names ----------------------------------------------------------------------------


def test_everything_a_user_may_name_is_loaded(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "set", "a", "b")
    one = tmp_path / "one.json"
    one.write_text('{"instruction": "x", "id": "x"}')
    many = tmp_path / "many.json"
    many.write_text('[{"instruction": "x", "id": "x"}, {"instruction": "y", "id": "y"}]')
    file = lines(tmp_path / "t.jsonl", {"instruction": "z", "id": "z"})
    task_ids = [[task.id for task in load_tasks(spec)] for spec in (root, str(root / "a"), one, str(many), file)]
    assert task_ids == [["a", "b"], ["a"], ["x"], ["x", "y"], ["z"]]


def test_shipped_tasks_are_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_of(tmp_path, "refactor"))
    assert [task.id for task in load_tasks("shipped")] == list(shipped())
    assert load_tasks("refactor")[0].is_scored
    assert load_tasks("./refactor")[0].instruction == "Do refactor."


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("refacter", "refactor"),
        ("shiped", "shipped"),
        ("{root}/tusks", "{root}/tasks"),
        ("zzz", "shipped: data-work"),
    ],
)
def test_an_unknown_name_brings_the_nearest(tmp_path: Path, spec: str, hint: str) -> None:
    (tmp_path / "tasks").mkdir()
    with pytest.raises(TaskError, match="there is no task") as caught:
        load_tasks(spec.format(root=tmp_path))
    assert hint.format(root=tmp_path) in str(caught.value.hint)


def test_what_holds_no_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "task.yaml").write_text("")
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "none.json").write_text("[]")
    for name in ("empty", "task.yaml", "none.jsonl", "none.json"):
        with pytest.raises(TaskError, match=r"holds no task|is not a task") as caught:
            load_tasks(tmp_path / name)
        assert caught.value.hint


def test_a_folder_that_cannot_be_read_is_refused_when_it_is_run(tmp_path: Path) -> None:
    for name, toml in (("bad", "[agent"), ("good", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "instruction.md").write_text("Do it.")
        (tmp_path / name / "task.toml").write_text(toml)
    bad, good = load_tasks(tmp_path)
    check_can_run(good, "bwrap")
    for task in (bad, *load_tasks(tmp_path / "bad")):
        with pytest.raises(TaskError, match=r"task bad cannot be read: .*not valid TOML"):
            check_can_run(task, "bwrap")
