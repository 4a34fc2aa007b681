import dataclasses
import pickle
from typing import Any

import pytest

from paddock.errors import TaskError
from paddock.limits import RolloutTimeouts, SandboxLimits
from paddock.tasks.task import Task


def test_text_is_kept_as_bytes() -> None:
    task = Task("do it", files={"a.txt": "é"}, verifier="exit 0")  # type: ignore[dict-item]
    assert task.files == {"a.txt": "é".encode()}
    assert task.tests == {"test.sh": b"exit 0"}
    assert task.is_scored
    assert not task.has_solution


def test_a_task_without_an_id_is_named_after_its_hash() -> None:
    task = Task("do it")
    assert task.id == f"task-{task.hash[:8]}"


def test_the_hash_is_the_same_on_every_machine() -> None:
    task = Task(
        "do it",
        files={"b": b"2", "a": b"1"},
        modes={"a": 0o755},
        setup="true",
        verifier="exit 0",
        sandbox=SandboxLimits(cpus=1),
        timeouts=RolloutTimeouts(agent=60),
    )
    assert task.hash == "7dc46c926960a3f22d0a57351e08277f85e9fb68df23f063b222a17bc39d5fc3", (
        "stored batches could not be resumed: leave a new field out of the hash where it has its default"
    )
    assert (
        dataclasses.replace(task, files={"a": b"1", "b": b"2"}, timeouts=RolloutTimeouts(agent=60.0)).hash
        == task.hash
    )


@pytest.mark.parametrize(
    "change",
    [
        {"instruction": "do that"},
        {"files": {"a": b"2"}},
        {"files": {"b": b"1"}, "modes": {}},
        {"modes": {}},
        {"setup": "true"},
        {"tests": {"test.sh": b"exit 1"}},
        {"sandbox": SandboxLimits(processes=3)},
        {"timeouts": RolloutTimeouts(agent=1)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_matters_changes_the_hash(change: dict[str, Any]) -> None:
    task = Task("do it", files={"a": b"1"}, modes={"a": 0o755}, verifier="exit 0")
    assert dataclasses.replace(task, **change).hash != task.hash


def test_what_does_not_matter_leaves_the_hash() -> None:
    task = Task("do it", verifier="exit 0")
    other = Task("do it", id="x", verifier="exit 0", solution={"solve.sh": b""}, metadata={"a": 1}, source="here")
    assert other.hash == task.hash
    assert other != task


def test_a_task_is_a_value() -> None:
    task = Task("do it", files={"a": b"1"}, verifier="exit 0", source="here")
    assert pickle.loads(pickle.dumps(task)) == task
    assert len({task, dataclasses.replace(task, source="there")}) == 1


def test_the_files_are_not_those_of_the_caller() -> None:
    given = {"a": b"1"}
    task = Task("do it", files=given)
    given["b"] = b"2"
    assert list(task.files) == ["a"]


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../../b", "a//b", "./a", "", ".", "a\n", "a/" + "x" * 300, "\udcff"]
)
@pytest.mark.parametrize("where", ["files", "tests", "solution"])
def test_a_path_that_leads_elsewhere_is_refused(path: str, where: str) -> None:
    with pytest.raises(TaskError, match=where) as caught:
        Task("do it", **{where: {path: b""}})  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"instruction": " \n"}, "instruction is missing"),
        ({"instruction": "\ud800"}, "UTF-8"),
        ({"instruction": "x" * 1_100_000}, "over 1 MiB"),
        ({"files": {"a": b"", "a/b": b""}}, "'a' is a file and also a folder"),
        ({"files": {"a": 5}}, "holds int"),
        ({"files": {f"f{n}": b"" for n in range(10_001)}}, "10001 files"),
        ({"modes": {"a": 0o755}}, "not among files"),
        ({"files": {"a": b""}, "modes": {"a": 755}}, "mode of 'a' is 755"),
        ({"id": " x"}, "cannot be an id"),
        ({"id": "x" * 201}, "cannot be an id"),
        ({"verifier": "exit 0", "tests": {"test.sh": b""}}, "both a verifier"),
        ({"image": "python:3.12"}, "image has a value of type str"),
        ({"network": "public"}, "network has a value of type str"),
        ({"timeouts": 60}, "timeouts has a value of type int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_used_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        Task(**{"instruction": "do it", **given})
    assert caught.value.hint


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.tasks.task.LARGEST_FILE", 10)
    monkeypatch.setattr("paddock.tasks.task.LARGEST_TOTAL", 15)
    with pytest.raises(TaskError, match="big has 11 bytes"):
        Task("do it", files={"big": b"x" * 11})
    with pytest.raises(TaskError, match="together"):
        Task("do it", files={"a": b"x" * 8, "b": b"x" * 8})


# -- JSON -----------------------------------------------------------------------------------------


def test_a_task_survives_json() -> None:
    task = Task(
        "do it",
        id="one",
        files={"text": "é\n".encode(), "binary": b"\xff\x00"},
        modes={"binary": 0o755},
        setup="true",
        verifier="exit 0",
        solution={"solve.sh": b"true"},
        sandbox=SandboxLimits(cpus=2),
        timeouts=RolloutTimeouts(agent=5),
        metadata={"level": [1, 2]},
    )
    assert Task.from_json(task.to_json()) == task
    assert Task.from_json(task.to_json()).hash == task.hash


def test_the_other_names_of_the_keys_are_understood() -> None:
    other = {"task_id": 7, "instruction": "x", "setup_shell": "true", "test_script": "exit 0", "solution": "true"}
    plain = {
        "id": "7",
        "instruction": "x",
        "setup": "true",
        "tests": {"test.sh": "exit 0"},
        "solution": {"solve.sh": "true"},
    }
    assert Task.from_json(other) == Task.from_json(plain)


def test_a_file_may_be_written_in_three_ways() -> None:
    files = {"a": "one", "b": {"text": "two", "mode": "755"}, "c": {"base64": "AP8="}}
    task = Task.from_json({"instruction": "x", "files": files})
    assert task.files == {"a": b"one", "b": b"two", "c": b"\x00\xff"}
    assert (task.mode("a"), task.mode("b")) == (0o644, 0o755)


@pytest.mark.parametrize(
    ("data", "says", "hint"),
    [
        ({}, "instruction is missing", None),
        ({"instruction": 5}, "instruction is a number", None),
        ({"instruction": "x", "fiels": {}}, "unknown key 'fiels'", "'files'"),
        ({"instruction": "x", "id": "a", "task_id": "b"}, "given twice", None),
        ({"instruction": "x", "id": True}, "id is True", None),
        ({"instruction": "x", "files": ["a"]}, "files is a list", None),
        ({"instruction": "x", "files": {"a": 5}}, "files: a is a number", None),
        ({"instruction": "x", "files": {"a": {"txt": ""}}}, "unknown key 'txt'", "'text'"),
        ({"instruction": "x", "files": {"a": {"text": "", "base64": ""}}}, "no content, or two", None),
        ({"instruction": "x", "files": {"a": {"base64": "?"}}}, "base64 text is broken", None),
        ({"instruction": "x", "files": {"a": {"text": "", "mode": 493}}}, "mode is 493", "755"),
        ({"instruction": "x", "files": {"a": {"text": "", "mode": "7777"}}}, "mode of 'a'", None),
        ({"instruction": "x", "files": {"a": "\ud800"}}, "UTF-8", None),
        ({"instruction": "x", "limits": {"memory": 5}}, "limits: unknown key 'memory'", None),
        ({"instruction": "x", "limits": {"cpus": 1.5}}, "cpus is 1.5, not a whole number", None),
        ({"instruction": "x", "timeouts": {"agent": 0}}, "timeouts: agent is 0", "above 0"),
        ({"instruction": "x", "timeouts": {"agnet": 1}}, "unknown key 'agnet'", "'agent'"),
        ({"instruction": "x", "metadata": []}, "metadata is a list", None),
        ({"instruction": "x", "tests": {"../test.sh": ""}}, "does not stay below", None),
        ([], "an object, not a list", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json_that_is_wrong_is_refused_by_name(data: Any, says: str, hint: str | None) -> None:
    with pytest.raises(TaskError, match=says) as caught:
        Task.from_json(data, source="tasks.jsonl:3")
    assert caught.value.message.startswith("tasks.jsonl:3")
    assert (hint or "") in str(caught.value.hint)
