import os
from pathlib import Path

import pytest

from paddock.errors import TaskError
from paddock.rollouts.limits import GIBIBYTE, MEBIBYTE, SandboxLimits, Timeouts
from paddock.rollouts.task import Task

TOML = """
version = "1.0"
[task]
name = "shop/count"
description = "Count."
[metadata]
difficulty = "easy"
written = 2024-05-01
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 30.5
env = { KEY = "x" }
[environment]
build_timeout_sec = 60.0
cpus = 2
memory_mb = 512
storage = "1.5G"
docker_image = "python:3.12"
gpus = 0
[steps]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "count"
    write(root / "instruction.md", "Count the lines.\n")
    write(root / "environment" / "data" / "a.txt", "1\n")
    write(root / "tests" / "test.sh", "exit 0\n")
    return root


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refused(folder: Path, says: str) -> TaskError:
    with pytest.raises(TaskError, match=says) as caught:
        Task.from_folder(folder)
    assert caught.value.hint
    return caught.value


def test_a_folder_needs_no_more_than_an_instruction(tmp_path: Path) -> None:
    write(tmp_path / "hello" / "instruction.md", "Say hello.")
    task = Task.from_folder(tmp_path / "hello")
    assert (task.id, task.instruction, task.files, task.is_scored) == ("hello", "Say hello.", {}, False)


def test_the_whole_layout_is_read(folder: Path) -> None:
    write(folder / "task.toml", TOML)
    write(folder / "environment" / "Dockerfile", "FROM scratch")
    write(folder / "environment" / "docker-compose.yaml", "")
    write(folder / "environment" / "sub" / "Dockerfile", "FROM kept")
    write(folder / "environment" / "setup.sh", "touch ready\n")
    write(folder / "environment" / "run.sh", "true").chmod(0o700)
    write(folder / "solution" / "solve.sh", "wc -l data/a.txt\n")
    task = Task.from_folder(folder)
    assert task.id == "shop/count"
    assert task.files == {"data/a.txt": b"1\n", "run.sh": b"true", "sub/Dockerfile": b"FROM kept"}
    assert task.modes == {"run.sh": 0o755}
    assert task.setup == "touch ready\n"
    assert task.tests == {"test.sh": b"exit 0\n"}
    assert task.has_solution
    assert task.timeouts == Timeouts(agent=120, verifier=30.5, setup=60)
    assert task.sandbox == SandboxLimits(cpus=2, memory_bytes=512 * MEBIBYTE, disk_bytes=3 * GIBIBYTE // 2)
    assert task.metadata == {
        "difficulty": "easy",
        "written": "2024-05-01",
        "description": "Count.",
        "not_built": ["Dockerfile", "docker-compose.yaml", "docker_image"],
        "docker_image": "python:3.12",
        "unknown_keys": ["environment.gpus", "verifier.env"],
    }


def test_the_set_up_may_stand_in_the_configuration(folder: Path) -> None:
    write(folder / "task.toml", '[environment]\nsetup = "touch ready"\n')
    assert Task.from_folder(folder).setup == "touch ready"
    write(folder / "environment" / "setup.sh", "true")
    refused(folder, "both environment/setup.sh and")


def test_what_python_leaves_behind_is_not_part_of_the_task(folder: Path) -> None:
    before = Task.from_folder(folder).hash
    write(folder / "environment" / "__pycache__" / "a.pyc", "x")
    assert Task.from_folder(folder).hash == before


def test_the_hash_knows_only_whether_a_file_can_be_run(folder: Path) -> None:
    file = folder / "environment" / "data" / "a.txt"
    hashes = []
    for mode in (0o600, 0o664, 0o700, 0o755):
        file.chmod(mode)
        hashes.append(Task.from_folder(folder).hash)
    assert hashes[0] == hashes[1] != hashes[2] == hashes[3]


@pytest.mark.parametrize(
    "link", ["instruction.md", "task.toml", "tests", "environment/data/link", "solution/solve.sh"]
)
def test_links_are_refused(folder: Path, link: str, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    path = folder / link
    path.parent.mkdir(exist_ok=True)
    if path.is_dir():
        path.rename(tmp_path / "moved")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    refused(folder, f"{link} is a symlink")


def test_a_pipe_is_refused_and_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "environment" / "pipe")
    refused(folder, "pipe is not a plain file")


def test_a_folder_in_place_of_a_file_is_refused(folder: Path) -> None:
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").mkdir()
    refused(folder, "instruction.md is not a plain file")


def test_too_large_a_file_is_refused_unread(folder: Path) -> None:
    with (folder / "environment" / "big").open("wb") as file:
        file.truncate(65 * MEBIBYTE)
    refused(folder, "big has 68157440 bytes")


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ("[agent", "not valid TOML"),
        ("agent = 5", "agent is 5, not a section"),
        ('[agent]\ntimeout_sec = "10"', r"task.toml: \[agent\] timeout_sec is '10', not a number"),
        ("[agent]\ntimeout_sec = 0", "timeout_sec is 0"),
        ("[agent]\ntimeout_sec = inf", "timeout_sec is inf"),
        ("[verifier]\ntimeout_sec = true", "timeout_sec is True"),
        ('[environment]\nmemory = "much"', r"\[environment\] memory is 'much'"),
        ("[environment]\nmemory = 4", r"\[environment\] memory is 4, not text"),
        ('[environment]\nmemory = "4G"\nmemory_mb = 4', "both memory and memory_mb"),
        ("[task]\nname = 5", r"\[task\] name is 5"),
    ],
)
def test_a_wrong_configuration_is_named(folder: Path, toml: str, says: str) -> None:
    write(folder / "task.toml", toml)
    assert "task.toml" in refused(folder, says).message


@pytest.mark.parametrize(
    ("size", "expected"),
    [("4G", 4 * GIBIBYTE), ("512MiB", 512 * MEBIBYTE), ("0.5 gb", GIBIBYTE // 2), ("1000", 1000)],
)
def test_sizes_are_read_with_their_unit(folder: Path, size: str, expected: int) -> None:
    write(folder / "task.toml", f'[environment]\nmemory = "{size}"')
    assert Task.from_folder(folder).sandbox.memory_bytes == expected


def test_a_missing_or_empty_instruction_is_refused(folder: Path) -> None:
    write(folder / "instruction.md", "\n")
    refused(folder, "instruction is missing or empty")
    (folder / "instruction.md").unlink()
    refused(folder, "has no instruction.md")
    refused(folder / "nowhere", "is not a folder")


def test_text_that_is_not_utf8_is_refused(folder: Path) -> None:
    (folder / "instruction.md").write_bytes(b"\xff")
    refused(folder, "instruction.md is not UTF-8")
