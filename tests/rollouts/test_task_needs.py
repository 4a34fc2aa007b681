"""Tasks that need what no sandbox here has are not scored."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddock.cli.rollout import read_tests
from paddock.errors import TaskError
from paddock.rollouts.check_task import TaskCheck
from paddock.rollouts.outcome import Outcome
from paddock.rollouts.rollout import Rollout
from paddock.rollouts.store import Store
from paddock.rollouts.task import Task
from paddock.rollouts.task_needs import check_can_run, missing_parts
from rollouts.loop.scenes import Stage, a_rollout
from rollouts.played import IS_DONE, rolled, run, shell

NEEDS: dict[str, tuple[str, str, str]] = {
    "a Dockerfile": ("environment/Dockerfile", "FROM python:3.12-slim", "Dockerfile"),
    "a compose file": ("environment/docker-compose.yaml", "services: {}", "docker-compose.yaml"),
    "an image's name": ("task.toml", '[environment]\ndocker_image = "org/image:1"', "docker_image"),
    "a GPU": ("task.toml", "[environment]\ngpus = 1", "environment.gpus"),
    "Windows": ("task.toml", '[environment]\nos = "windows"', "environment.os"),
    "servers": ("task.toml", '[[environment.mcp_servers]]\nname = "x"', "environment.mcp_servers"),
    "steps": ("task.toml", '[[steps]]\nname = "first"', "steps"),
    "a verifier's own image": ("tests/Dockerfile", "FROM scratch", "tests/Dockerfile"),
    "a separate verifier": ("task.toml", '[verifier]\nenvironment_mode = "separate"', "verifier.environment_mode"),
}
HARMLESS = {
    "no GPU": ("task.toml", "[environment]\ngpus = 0\nmcp_servers = []"),
    "Linux": ("task.toml", '[environment]\nos = "linux"'),
    "a file for the agent": ("environment/app/Dockerfile", "FROM scratch"),
    "what a Dockerfile would ignore": ("environment/.dockerignore", "*.pyc"),
}


def written(folder: Path, path: str, text: str) -> Path:
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
    task = Task.from_folder(written(tmp_path / "task", *NEEDS["a Dockerfile"][:2]))
    (result,) = asyncio.run(TaskCheck(task).run())
    assert (result.outcome, "needs Dockerfile" in result.detail) == ("failed", True)
    assert "setup.sh" in (result.hint or "")


def test_tests_of_such_a_task_score_nothing_again(tmp_path: Path) -> None:
    folder = written(tmp_path / "task", *NEEDS["a Dockerfile"][:2])
    with pytest.raises(TaskError, match="Dockerfile"):
        read_tests(None, str(folder), "bwrap")


def test_the_need_survives_json(tmp_path: Path) -> None:
    task = Task.from_folder(written(tmp_path / "task", *NEEDS["a Dockerfile"][:2]))
    with pytest.raises(TaskError):
        check_can_run(Task.from_json(task.to_json()), "bwrap")


def test_docker_with_that_very_image_may_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task.from_folder(written(tmp_path / "task", *NEEDS["an image's name"][:2]))
    monkeypatch.setenv("PADDOCK_DOCKER_IMAGE", "org/image:1")
    assert missing_parts(task, "docker") == []
    assert missing_parts(task, "bwrap") == ["docker_image"]
    monkeypatch.setenv("PADDOCK_DOCKER_IMAGE", "org/other")
    with pytest.raises(TaskError) as caught:
        check_can_run(task, "docker")
    assert "PADDOCK_DOCKER_IMAGE=org/image:1" in (caught.value.hint or "")


def test_the_loop_refuses_it_too_if_tests_score_it(tmp_path: Path) -> None:
    task = Task.from_folder(written(tmp_path / "task", *NEEDS["a Dockerfile"][:2]))

    async def played(scene: Stage, store: Store) -> Any:
        from paddock.rollouts.capture import Upstream

        async with Upstream() as upstream:
            rollout = a_rollout(scene, store, upstream)
            rollout.task = task
            return await rollout.run()

    scene = Stage()
    with closing(Store.open(tmp_path / "store")) as store:
        record = run(played(scene, store))
    assert (record.outcome, record.reward, scene.story) == (Outcome.TASK, None, [])
