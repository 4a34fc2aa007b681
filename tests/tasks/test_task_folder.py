import os
from pathlib import Path

import pytest

from paddock.errors import TaskError
from paddock.limits import GIBIBYTE, MEBIBYTE, RolloutTimeouts, SandboxLimits
from paddock.sandbox.images.image import HealthCheck
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.tasks.settings import (
    PUBLIC,
    Artifact,
    CollectCommand,
    EnvironmentSettings,
    Machine,
    McpServer,
    TaskImage,
    TaskNetwork,
    VerifierSettings,
)
from paddock.tasks.task import LINK_MODE, Task

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
[environment]
build_timeout_sec = 60.0
cpus = 2
memory_mb = 512
storage = "1.5G"
gpus = 0
gpu_count = 1
[agnt]
timeout_sec = 5
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
    assert task.timeouts == RolloutTimeouts(agent=120, verifier=30.5, setup=60)
    assert task.sandbox == SandboxLimits(cpus=2, memory_bytes=512 * MEBIBYTE, disk_bytes=3 * GIBIBYTE // 2)
    assert task.metadata == {
        "difficulty": "easy",
        "written": "2024-05-01",
        "description": "Count.",
        "unknown_keys": ["environment.gpu_count", "agnt (did you mean agent?)"],
        "misspelled_tables": ["[agnt] (did you mean [agent]?)"],
    }


HARBOR = """
schema_version = "1.4"
source = "set/one"
artifacts = ["/app/out", { source = "/app/db", destination = "db", exclude = ["*.tmp"] }]
multi_step_reward_strategy = "final"
[environment]
build_timeout_sec = 90.0
docker_image = "python:3.12"
os = "Linux"
cpus = 1.5
gpus = 1
gpu_types = ["T4"]
tpu = { type = "v6e", topology = "2x4" }
env = { A = "${A:-1}" }
skills_dir = "/skills"
workdir = "/srv"
network_mode = "allowlist"
allowed_hosts = ["example.org"]
[[environment.mcp_servers]]
name = "tools"
transport = "http"
url = "http://127.0.0.1:1/mcp"
[environment.healthcheck]
command = "true"
retries = 5
[agent]
user = 1000
network_mode = "no-network"
[verifier]
env = { B = "2" }
user = "root"
environment_mode = "separate"
[[verifier.collect]]
command = "dump"
timeout_sec = 5
[verifier.environment]
memory_mb = 256
[solution]
env = { C = "3" }
[[steps]]
name = "one"
min_reward = 0.5
[steps.agent]
timeout_sec = 7
[[steps]]
name = "two"
min_reward = { speed = 1.0 }
artifacts = ["/two"]
[steps.healthcheck]
command = "true"
[steps.verifier]
environment_mode = "shared"
timeout_sec = 8
"""


def test_every_key_of_harbor_is_read(folder: Path) -> None:
    write(folder / "task.toml", HARBOR)
    write(folder / "instruction.md", "\n")
    write(folder / "tests" / "Dockerfile", "FROM scratch")
    for name in ("one", "two"):
        write(folder / "steps" / name / "instruction.md", f"Do {name}.")
        write(folder / "steps" / name / "tests" / "test.sh", "true")
    write(folder / "steps" / "one" / "workdir" / "a.txt", "a")
    task = Task.from_folder(folder)
    check = HealthCheck(("/bin/sh", "-c", "true"), 5.0, 30.0, 0.0, 5.0, 5)
    assert (task.instruction, task.image, task.metadata) == ("Do one.", TaskImage("python:3.12"), {})
    assert task.network == TaskNetwork(NetworkPolicy("allowlist", ("example.org",)), NetworkPolicy(), PUBLIC)
    assert task.timeouts.verifier == 600
    assert task.sandbox == SandboxLimits(cpus=2, disk_bytes=10 * GIBIBYTE)
    settings = task.settings
    assert settings.environment == EnvironmentSettings(
        env={"A": "${A:-1}"},
        workdir="/srv",
        build_timeout=90.0,
        health_check=check,
        mcp_servers=(McpServer("tools", "streamable-http", "http://127.0.0.1:1/mcp"),),
        skills_dir="/skills",
        machine=Machine(1, ("T4",), "v6e 2x4"),
    )
    assert settings.verifier == VerifierSettings(
        "separate",
        {"B": "2"},
        "root",
        image=TaskImage(dockerfile="FROM scratch"),
        environment=EnvironmentSettings(),
        limits=SandboxLimits(memory_bytes=256 * MEBIBYTE, disk_bytes=10 * GIBIBYTE),
        collect=(CollectCommand("dump", timeout=5),),
    )
    assert (settings.agent.user, settings.solution_env, settings.reward_strategy) == ("1000", {"C": "3"}, "final")
    assert settings.artifacts == (Artifact("/app/out"), Artifact("/app/db", "db", ("*.tmp",)))
    one, two = task.steps
    assert (one.files, one.min_reward, one.agent.timeout) == ({"a.txt": b"a"}, {"reward": 0.5}, 7)
    assert (two.min_reward, two.verifier.mode, two.verifier.timeout) == ({"speed": 1.0}, None, 8)
    assert (two.artifacts, two.health_check and two.health_check.retries) == ((Artifact("/two"),), 3)
    assert Task.from_json(task.to_json()) == task


def test_a_dockerfile_is_an_image_with_the_other_files_as_its_context(folder: Path) -> None:
    write(folder / "environment" / "Dockerfile", "FROM scratch\nCOPY . /app")
    write(folder / "environment" / "setup.sh", "true")
    task = Task.from_folder(folder)
    assert task.image == TaskImage(dockerfile="FROM scratch\nCOPY . /app")
    assert (sorted(task.files), task.setup) == (["data/a.txt", "setup.sh"], "")


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        ("*.log", ["keep.txt", "sub/b.txt", "test.sh"]),
        ("sub/", ["a.log", "keep.txt", "test.sh"]),
        ("/a.log\n# b\n", ["keep.txt", "sub/b.txt", "sub/c.log", "test.sh"]),
        ("**/*.txt\n!keep.txt", ["a.log", "keep.txt", "sub/c.log", "test.sh"]),
        ("sub/**", ["a.log", "keep.txt", "test.sh"]),
        ("[ak]*.[lt]*", ["sub/b.txt", "sub/c.log", "test.sh"]),
    ],
)
def test_harborignore_leaves_files_out_of_the_tests(folder: Path, patterns: str, left: list[str]) -> None:
    for name in ("a.log", "keep.txt", "sub/b.txt", "sub/c.log"):
        write(folder / "tests" / name, "")
    write(folder / "tests" / ".harborignore", patterns)
    assert list(Task.from_folder(folder).tests) == left


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


def test_the_context_of_a_dockerfile_may_have_links(folder: Path) -> None:
    write(folder / "environment" / "Dockerfile", "FROM scratch")
    (folder / "environment" / "data" / "link").symlink_to("a.txt")
    task = Task.from_folder(folder)
    assert (task.files["data/link"], task.mode("data/link")) == (b"a.txt", LINK_MODE)
    assert Task.from_json(task.to_json()).modes == task.modes
    (folder / "environment" / "data" / "link").unlink()
    write(folder / "environment" / "data" / "link", "a.txt")
    assert Task.from_folder(folder).hash != task.hash


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
        ("agent = 5", "agent is 5, not an object"),
        ('[agent]\ntimeout_sec = "10"', r"task.toml: agent.timeout_sec is '10', not a number"),
        ("[agent]\ntimeout_sec = 0", "timeout_sec is 0"),
        ("[agent]\ntimeout_sec = inf", "timeout_sec is inf"),
        ("[verifier]\ntimeout_sec = true", "timeout_sec is True"),
        ('[environment]\nmemory = "much"', "environment.memory is 'much'"),
        ("[environment]\nmemory = 4", "environment.memory is 4, not text"),
        ('[environment]\nmemory = "4G"\nmemory_mb = 4', "both memory and memory_mb"),
        ('[environment]\nallowed_hosts = ["a.org"]', "allowed_hosts is given, but network_mode is"),
        ('[verifier]\nnetwork_mode = "open"', "verifier.network_mode is 'open'"),
        ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]', "environment_mode is 'shared', but"),
        ('[[environment.mcp_servers]]\nname = "x"', "MCP server 'x' has no url"),
        ('artifacts = ["../x"]', "source of an artifact is '../x'"),
        ('[[steps]]\nname = "../x"', "'../x' is not a name"),
        ('[[steps]]\nname = "one"', "step one has no"),
        ("[environment.healthcheck]\ninterval_sec = 5", "environment.healthcheck: command is missing"),
        ("[task]\nname = 5", "task.name is 5"),
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
