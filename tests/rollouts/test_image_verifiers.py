"""Artifacts, collect commands and verifiers of tasks with an image, in whole rollouts."""

import io
import shlex
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from click.testing import CliRunner

from paddock.agents.command import CommandAgent
from paddock.cli.commands import paddock
from paddock.config import PADDOCK_IMAGES
from paddock.errors import SandboxError, TaskError
from paddock.limits import MEBIBYTE
from paddock.rollouts import artifacts
from paddock.rollouts.api import reverify
from paddock.rollouts.sandboxes import pack_files
from paddock.sandbox.images.image import HealthCheck
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.settings import (
    Artifact,
    CollectCommand,
    EnvironmentSettings,
    TaskImage,
    TaskNetwork,
    TaskSettings,
    VerifierSettings,
)
from paddock.tasks.task import Task
from paddock.testing.task import TaskCheck
from sandbox.image_roots import make_image

from .played import a_task, needs_bwrap, rolled, run

NAME = "small"
OWN_DOCKERFILE = b"""FROM small
COPY . /tests/
ENV COLOUR=green
WORKDIR /own
"""
REPORT = """
exec 2>&1
pwd; echo "$COLOUR"; ls /app /opt/agent /logs/artifacts
if [ "$(cat /app/out/answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLVE = """
mkdir -p out /opt/agent
echo 42 > out/answer.txt
echo hidden > secret.txt
echo note > /logs/artifacts/note.txt
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("artifacts")
        patch.setenv(PADDOCK_IMAGES.name, str(folder / "images"))
        make_image(folder, workdir=PurePosixPath("/app"))
        yield


pytestmark = [needs_bwrap, pytest.mark.usefixtures("images")]


def agent(script: str) -> CommandAgent:
    return CommandAgent(shlex.join(["/bin/sh", "-c", script]))


def image_task(tests: str = REPORT, *, test_files: dict[str, bytes] | None = None, **settings: Any) -> Task:
    files = {"test.sh": tests.encode(), **(test_files or {})}
    network = TaskNetwork(settings.pop("network", None))
    return a_task("", tests=files, image=TaskImage(NAME), network=network, settings=TaskSettings(**settings))


def warnings_of(store: Store, record: RolloutRecord) -> list[str]:
    events = store.events(record.rollout_id)
    return [str(event.data["warning"]) for _, event in events if event.kind == "warning"]


def unpacked(store: Store, record: RolloutRecord) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(store.get_blob(str(record.artifact_blob)))) as archive:
        members = [member for member in archive if member.isreg()]
        return {member.name: archive.extractfile(member).read().decode() for member in members}  # type: ignore[union-attr]


# -- artifacts ----------------------------------------------------------------------------------------------


def test_artifacts_are_in_the_record_and_the_store(tmp_path: Path) -> None:
    listed = (
        Artifact("out"),
        Artifact("/opt/data", destination="data", exclude=("*.tmp", "cache")),
        Artifact("/app/out/answer.txt"),
        Artifact("/app/missing"),
    )
    data = "mkdir -p /opt/data/cache; cd /opt/data; echo 1 > x.tmp; echo 2 > x; echo 3 > cache/y"
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(f"{SOLVE}\n{data}"), task=image_task(artifacts=listed))
        files, warnings = unpacked(store, record), warnings_of(store, record)
    expected = {"logs/artifacts/note.txt": "note\n", "app/out/answer.txt": "42\n", "data/x": "2\n"}
    assert (record.outcome, record.reward, files) == (Outcome.OK, 1.0, expected), record.error
    assert {row["path"]: row["size"] for row in record.artifacts} == {
        path: len(text) for path, text in expected.items()
    }
    assert [row["source"] for row in record.artifacts] == ["/logs/artifacts", "/app/out", "/opt/data"]
    assert warnings == ["the artifact /app/missing does not exist"]


def test_hostile_artifacts_stay_inside(tmp_path: Path) -> None:
    script = """
    mkdir -p out/deep /opt/agent
    ln -s /etc out/absolute; ln -s ../../etc out/upwards; ln -s deep/../../.. out/later; ln -s deep out/inside
    ln -s ../inside out/deep/sideways; echo 42 > out/answer.txt; ln -s /proc/1 proc; ln -s loop loop
    """
    listed = (Artifact("out"), Artifact("proc"), Artifact("loop"))
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(script), task=image_task(artifacts=listed))
        archive = store.get_blob(str(record.artifact_blob))
        warnings = warnings_of(store, record)
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        assert [member.name for member in packed if member.issym()] == ["app/out/deep/sideways", "app/out/inside"]
    assert "out are left out: absolute, later, upwards" in warnings[0]
    assert [warning.split(" is not kept")[0] for warning in warnings[1:]] == [
        "the artifact /app/proc",
        "the artifact /app/loop",
    ]


def test_artifacts_beyond_the_limit_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "LARGEST_ARTIFACTS", MEBIBYTE)
    script = f"{SOLVE}\ndd if=/dev/zero of=out/large bs=1M count=2"
    tasks = [
        image_task(artifacts=(Artifact("out"),), verifier=VerifierSettings(mode=mode)) for mode in (None, "separate")
    ]
    with Store.open(tmp_path) as store:
        record, separate = (rolled(store, agent(script), task=task) for task in tasks)
        warnings = warnings_of(store, record)
    assert (record.reward, [row["path"] for row in record.artifacts]) == (1.0, ["logs/artifacts/note.txt"])
    reason = "with /app/out, the artifacts have more than 1 MiB or 100,000 files together"
    assert warnings == [f"the artifact /app/out is not kept: {reason}"]
    # A score without it would be a false 0.
    assert (separate.outcome, separate.reward) == (Outcome.VERIFIER, None)
    assert "more than 1 MiB" in str(separate.reward_reason)


def test_artifacts_are_written_to_a_new_folder(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        record = rolled(store, agent(f"{SOLVE}\nln -s . out/link"), task=image_task(artifacts=(Artifact("out"),)))
        nothing = rolled(store, agent("true"), task=image_task())

    def show(rollout_id: str, folder: Path) -> Any:
        command = ["trace", "show", rollout_id, "--store", str(tmp_path / "store"), "--artifacts", str(folder)]
        return CliRunner().invoke(paddock, command, standalone_mode=False)

    output = show(record.rollout_id, tmp_path / "written")
    assert (tmp_path / "written/app/out/answer.txt").read_text() == "42\n"
    assert "artifacts: logs/artifacts/note.txt, app/out/answer.txt\n" in output.stdout
    assert "verifier:  sealed: no process was running when the agent ended\n" in output.stdout
    for rollout_id, reason in ((record.rollout_id, "is not empty"), (nothing.rollout_id, "has no artifacts")):
        assert reason in str(show(rollout_id, tmp_path / "written").exception)


def test_an_archive_of_too_many_files_is_refused() -> None:
    archive = pack_files({"a": b"", "b": b""})
    assert artifacts.check_archive(archive, 2).members == 2
    with pytest.raises(SandboxError) as caught:
        artifacts.check_archive(archive, 1)
    assert caught.value.data == {"limit": 1}


# -- collect commands -----------------------------------------------------------------------------------------


def test_collect_commands_run_beside_the_processes_that_are_left(tmp_path: Path) -> None:
    collect = (
        CollectCommand("ls -d /proc/[0-9]* > /logs/artifacts/processes.txt"),
        CollectCommand("echo half; echo broken >&2; exit 3"),
        CollectCommand("sleep 30", timeout=0.3),
        CollectCommand("id > /logs/artifacts/id.txt; echo $http_proxy > /logs/artifacts/proxy.txt"),
    )
    task = image_task(verifier=VerifierSettings(mode="sealed", collect=collect))
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(f"{SOLVE}\nsleep 300 &"), task=task)
        files, warnings = unpacked(store, record), warnings_of(store, record)
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.error
    assert record.verifier == {"mode": "sealed", "reason": "the task says so"}
    assert "uid=0(root)" in files["logs/artifacts/id.txt"]
    assert len(files["logs/artifacts/processes.txt"].splitlines()) >= 2
    assert ["exit code 3: broken" in warnings[0], "did not end in time" in warnings[1], len(warnings)] == [
        True,
        True,
        2,
    ]


def test_a_sandbox_that_was_ended_is_scored_without_its_collect_commands(tmp_path: Path) -> None:
    task = image_task(verifier=VerifierSettings(collect=(CollectCommand("true"),)), network=NetworkPolicy("public"))
    task = replace(task, sandbox=replace(task.sandbox, disk_bytes=8 * MEBIBYTE))
    script = f"{SOLVE}\ndd if=/dev/zero of=large bs=1M count=16; sleep 30"
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(script), task=task)
        files, warnings = unpacked(store, record), warnings_of(store, record)
    assert (record.outcome, record.reward, files) == (Outcome.BUDGET, 1.0, {"logs/artifacts/note.txt": "note\n"})
    assert "used too much disk" in warnings[0]


# -- separate verifiers -----------------------------------------------------------------------------------------


def test_a_separate_verifier_sees_only_the_artifacts(tmp_path: Path) -> None:
    task = image_task(artifacts=(Artifact("out"),), verifier=VerifierSettings(mode="separate"))
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(SOLVE), task=task)
        nothing = rolled(store, agent("true"), task=task)
    assert (record.outcome, record.reward, nothing.reward) == (Outcome.OK, 1.0, 0.0), record.verifier_stdout
    assert "note.txt" in record.verifier_stdout
    assert "secret.txt" not in record.verifier_stdout
    assert "/opt/agent" in record.verifier_stdout.partition("No such file")[0]
    assert record.verifier == {"mode": "separate", "reason": "the task says so"}
    assert record.verifier_image == record.image


def test_a_separate_verifier_has_an_image_environment_and_limits_of_its_own(tmp_path: Path) -> None:
    environment = EnvironmentSettings(
        env={"COLOUR": "${NO_SUCH:-blue}"},
        workdir="/tests",
        health_check=HealthCheck(("/bin/sh", "-c", "test -e /own")),
    )
    task = image_task(test_files={"Dockerfile": OWN_DOCKERFILE}, artifacts=(Artifact("out"),))
    own = VerifierSettings(mode="separate", environment=environment)
    with_environment = replace(task, settings=replace(task.settings, verifier=own))
    with Store.open(tmp_path) as store:
        plain = rolled(store, agent(SOLVE), task=task, verifier_mode="separate")
        changed = rolled(store, agent(SOLVE), task=with_environment)
    assert (plain.reward, changed.reward) == (1.0, 1.0), plain.error or changed.error
    assert plain.verifier_stdout.splitlines()[:2] == ["/own", "green"]
    assert changed.verifier_stdout.splitlines()[:2] == ["/tests", "blue"]
    assert plain.verifier["reason"] == "chosen for this run"
    assert plain.verifier_image["digest"] != plain.image["digest"]
    assert "COPY . /tests/" in plain.verifier_build_log


def test_an_agent_cannot_replace_the_tests_of_a_separate_verifier(tmp_path: Path) -> None:
    script = "mkdir -p /tests out; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; ln -s /tests out/link"
    listed = (Artifact("/tests"), Artifact("out", destination="a"), Artifact("out/link", destination="b"))
    task = image_task(
        test_files={"Dockerfile": OWN_DOCKERFILE}, artifacts=listed, verifier=VerifierSettings(mode="separate")
    )
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(script), task=task)
        warnings = warnings_of(store, record)
    assert record.reward == 0.0
    assert "the verifier does not get the artifact /tests, which would replace its tests" in warnings


def test_a_broken_image_of_the_verifier_ends_the_rollout_before_the_agent(tmp_path: Path) -> None:
    files = {"Dockerfile": b"FROM small\nRUN exit 7\n"}
    task = image_task(test_files=files, verifier=VerifierSettings(mode="separate"))
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(SOLVE), task=task)
    assert (record.outcome, record.reward, "agent" in record.stages) == (Outcome.TASK, None, False)
    assert "exit 7" in record.verifier_build_log


def test_a_check_uses_the_separate_verifier() -> None:
    task = image_task(
        test_files={"Dockerfile": OWN_DOCKERFILE},
        artifacts=(Artifact("out"),),
        verifier=VerifierSettings(mode="separate", collect=(CollectCommand("echo 42 > out/answer.txt"),)),
    )
    unsolved = replace(task, solution={"solve.sh": b"mkdir -p out"})
    results = {result.name: result for result in run(TaskCheck(unsolved).run())}
    assert results["the solution scores 1.0"].outcome == "passed", results
    # Without the solution there is no folder to collect into.
    assert results["doing nothing scores below 1.0"].outcome == "passed"


def test_work_on_an_image_is_not_scored_again_without_it(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        record = rolled(store, agent(SOLVE), task=image_task())
        with pytest.raises(TaskError, match="was run on an image"):
            run(reverify(record.rollout_id, {"test.sh": b"exit 0"}, store=store))
        assert store.scores(record.rollout_id) == []
