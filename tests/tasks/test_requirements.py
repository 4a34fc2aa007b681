"""Tasks that need what no sandbox here has are not scored."""

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddock.cli.rollout import read_tests
from paddock.errors import TaskError
from paddock.rollouts.api import reverify
from paddock.rollouts.rollout import Rollout
from paddock.sandbox import BACKENDS
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.tasks.requirements import check_can_run, find_warnings, missing_parts
from paddock.tasks.settings import TaskImage
from paddock.tasks.task import Task
from paddock.testing.task import TaskCheck
from rollouts.loop.fake_session import FakeSession, a_rollout
from rollouts.played import IS_DONE, rolled, run, shell

NEEDS: dict[str, tuple[str, str, str]] = {
    "a compose file": ("environment/docker-compose.yaml", "services: {}", "docker-compose.yaml"),
    "a GPU": ("task.toml", "[environment]\ngpus = 1", "environment.gpus"),
    "Windows": ("task.toml", '[environment]\nos = "windows"', "environment.os"),
    "steps": ("steps/first/instruction.md", "Do it.", "steps"),
    "a user": ("task.toml", '[agent]\nuser = "nobody"', "agent.user"),
    "variables": ("task.toml", '[environment]\nenv = { A = "1" }', "environment.env"),
    "a live verifier": ("task.toml", '[verifier]\nmode = "live"', "verifier.environment_mode"),
    "a separate verifier": ("task.toml", '[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode"),
}
MEANT = "agent.timeout (did you mean timeout_sec?)"
DOCKERFILE = ("environment/Dockerfile", "FROM python:3.12-slim")
IMAGE_NAME = ("task.toml", '[environment]\ndocker_image = "org/image:1"')
HARMLESS = {
    "a Dockerfile": DOCKERFILE,
    "an image's name": IMAGE_NAME,
    "a network": ("task.toml", '[environment]\nnetwork_mode = "public"'),
    "no GPU": ("task.toml", "[environment]\ngpus = 0\nmcp_servers = []"),
    "Linux": ("task.toml", '[environment]\nos = "linux"'),
    "a file for the agent": ("environment/app/Dockerfile", "FROM scratch"),
    "what a Dockerfile would ignore": ("environment/.dockerignore", "*.pyc"),
}


def written(folder: Path, path: str, text: str) -> Path:
    if path.startswith("steps/"):
        (folder).mkdir(parents=True)
        (folder / "task.toml").write_text('[[steps]]\nname = "first"')
    for name, content in (("instruction.md", "Write 42."), ("tests/test.sh", IS_DONE), (path, text)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize(("path", "text", "names"), NEEDS.values(), ids=NEEDS)
def test_a_task_that_needs_more_than_a_sandbox_has_no_reward(
    tmp_path: Path, path: str, text: str, names: str
) -> None:
    """The agent, which would have solved it, is not started."""
    task = Task.from_folder(written(tmp_path / "task", path, text))
    stages: list[str] = []

    def watch(rollout: Rollout) -> None:
        stages.append(rollout.record.stage)

    with Store.open(tmp_path / "store") as store:
        record = rolled(store, shell("echo 42 > answer.txt"), task=task, retries=2, on_change=watch)
        assert store.count() == 1
    assert (record.outcome, record.reward, set(stages)) == (Outcome.TASK, None, {"done"})
    assert f"it needs {names}" in (record.error or "")
    assert record.reward_reason


@pytest.mark.parametrize(("path", "text"), HARMLESS.values(), ids=HARMLESS)
def test_a_task_that_needs_nothing_more_can_be_run(tmp_path: Path, path: str, text: str) -> None:
    check_can_run(Task.from_folder(written(tmp_path / "task", path, text)), "bwrap")


def test_a_check_fails_with_what_is_needed_and_a_hint(tmp_path: Path) -> None:
    task = Task.from_folder(written(tmp_path / "task", *NEEDS["a compose file"][:2]))
    _, result = asyncio.run(TaskCheck(task).run())
    assert (result.outcome, "needs docker-compose.yaml" in result.detail) == ("failed", True)
    assert "take these parts out" in (result.hint or "")


def test_tests_of_such_a_task_score_nothing_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "task", *NEEDS["a compose file"][:2])
    tests, task = read_tests(None, str(folder))
    with pytest.raises(TaskError, match="docker-compose"):
        asyncio.run(reverify("r0", tests, task=task, store=tmp_path / "store"))


def test_the_need_survives_json(tmp_path: Path) -> None:
    task = Task.from_folder(written(tmp_path / "task", *NEEDS["a compose file"][:2]))
    with pytest.raises(TaskError):
        check_can_run(Task.from_json(task.to_json()), "bwrap")


def test_a_backend_without_images_refuses_and_names_those_that_have_them(tmp_path: Path) -> None:
    named = Task.from_folder(written(tmp_path / "task", *IMAGE_NAME))
    built = replace(named, image=TaskImage(dockerfile="FROM scratch"))
    needs = {backend: (missing_parts(named, backend), missing_parts(built, backend)) for backend in BACKENDS}
    assert needs["bwrap"] == needs["docker"] == ([], [])
    assert needs["process"] == (["docker_image"], ["Dockerfile"])
    with pytest.raises(TaskError, match="it needs docker_image") as caught:
        check_can_run(named, "process")
    assert "--sandbox bwrap or docker" in (caught.value.hint or "")


SEPARATE = """artifacts = ["/app/out"]
[verifier]
environment_mode = "separate"
[verifier.environment]
memory_mb = 256
[[verifier.collect]]
command = "true"
"""


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (SEPARATE, []),
        ('[[artifacts]]\nsource = "/x"\nservice = "db"', ["artifacts.service"]),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"', ["verifier.collect.service"]),
        ("[verifier.environment]\ngpus = 1", ["verifier.environment.gpus"]),
    ],
)
def test_what_a_separate_verifier_and_artifacts_need_on_an_image(tmp_path: Path, text: str, names: list[str]) -> None:
    folder = written(tmp_path / "task", "task.toml", text)
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text(DOCKERFILE[1])
    task = Task.from_folder(folder)
    assert missing_parts(task, "bwrap") == names
    assert find_warnings(task) == []


def test_the_loop_refuses_it_too_if_tests_score_it(tmp_path: Path) -> None:
    task = Task.from_folder(written(tmp_path / "task", *NEEDS["a compose file"][:2]))

    async def played(scene: FakeSession, store: Store) -> Any:
        from paddock.capture.upstream import Upstream

        async with Upstream() as upstream:
            rollout = a_rollout(scene, store, upstream)
            rollout.task = task
            return await rollout.run()

    scene = FakeSession()
    with closing(Store.open(tmp_path / "store")) as store:
        record = run(played(scene, store))
    assert (record.outcome, record.reward, scene.story) == (Outcome.TASK, None, [])


def test_a_key_that_means_nothing_is_reported_with_the_one_that_was_meant(tmp_path: Path) -> None:
    task = Task.from_folder(written(tmp_path / "task", "task.toml", "[agent]\ntimeout = 5"))
    result = asyncio.run(TaskCheck(task).run())[0]
    assert (result.outcome, MEANT in result.detail) == ("warning", True)
    with Store.open(tmp_path / "store") as store:
        record = rolled(store, shell("echo 42 > answer.txt"), task=task)
        warnings = [event.data for _, event in store.events(record.rollout_id) if event.kind == "warning"]
    assert record.reward == 1.0
    assert MEANT in str(warnings)
    assert record.metadata["unknown_keys"] == [MEANT]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_task_with_a_misspelled_table_is_refused(tmp_path: Path, as_json: bool) -> None:
    task = Task.from_folder(written(tmp_path / "task", "task.toml", "[agnt]\ntimeout_sec = 5"))
    with Store.open(tmp_path / "store") as store:
        record = rolled(
            store, shell("echo 42 > answer.txt"), task=Task.from_json(task.to_json()) if as_json else task
        )
    assert (record.outcome, record.reward) == (Outcome.TASK, None)
    assert "task.toml has [agnt] (did you mean [agent]?) (correct the name" in (record.error or "")
    assert asyncio.run(TaskCheck(task).run())[-1].fault == "unknown-key"


def test_a_table_of_another_program_stops_nothing(tmp_path: Path) -> None:
    task = Task.from_folder(written(tmp_path / "task", "task.toml", "[tests]\nkind = 5\n[build]\nfast = true"))
    check_can_run(task, "bwrap")
    assert task.metadata["unknown_keys"] == ["tests (did you mean steps?)", "build"]


def test_a_solution_gets_its_variables(tmp_path: Path) -> None:
    folder = written(tmp_path / "task", "task.toml", '[solution]\nenv = { ANSWER = "${NONE:-42}" }')
    (folder / "solution").mkdir()
    (folder / "solution" / "solve.sh").write_text('echo "$ANSWER" > answer.txt')
    results = asyncio.run(TaskCheck(Task.from_folder(folder)).run())
    assert [result.outcome for result in results if "solution" in result.name] == ["passed"], results
