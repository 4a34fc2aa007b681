"""Snapshots of a work folder that lies in an image, whose files several users may own."""

import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from paddock.agents.command import CommandAgent
from paddock.config import PADDOCK_IMAGES
from paddock.rollouts.folder_changes import make_history
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.snapshots import SnapshotHistory
from paddock.tasks.settings import TaskImage, TaskSettings, TaskStep
from paddock.tasks.task import Task
from rollouts.played import LIMITS, SPEAKING, TIMEOUTS, needs_bwrap, run, spoken
from sandbox.image_roots import make_image, make_root

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120), needs_bwrap]

PYTHON = "/run/paddock/runtime/bin/python3"
CALLS_BETWEEN_LINES = """
import subprocess
for line in sys.stdin.read().splitlines():
    status, text = post({"model": "policy", "messages": [{"role": "user", "content": line}]})
    assert status == 200, text
    subprocess.run(["/bin/sh", "-c", line])
"""
AGENT = CommandAgent(shlex.join([PYTHON, "-c", SPEAKING + CALLS_BETWEEN_LINES]))
ANSWERS = {"turns": [{"text": "Yes."}]}
TEST = {"test.sh": b"echo 1 > /logs/verifier/reward.txt"}


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(PADDOCK_IMAGES.name, str(folder / "store"))
        (make_root(folder / "root") / "app" / "lower.txt").write_text("lower")
        make_image(folder, workdir=PurePosixPath("/app"))
        yield


def saved(store: Store, task: Task) -> tuple[RolloutRecord, SnapshotHistory]:
    record, _ = run(spoken(store, ANSWERS, AGENT, task=task, snapshots=True), seconds=90)
    assert (record.outcome, record.error) == (Outcome.OK, None)
    calls = [(call.id, call.snapshot) for call in store.calls(record.rollout_id)]
    return record, make_history(calls, record.snapshots, store.get_blob)


def paths(history: SnapshotHistory, name: str) -> list[tuple[str, str]]:
    return [(change.kind, change.path) for change in history.changes(name) or ()]


def test_files_of_the_image_and_of_other_users_are_seen(tmp_path: Path) -> None:
    lines = "echo upper > lower.txt; echo 1 > one.txt; chown bob one.txt; chmod 600 one.txt\nrm lower.txt"
    task = Task(lines, "image", image=TaskImage("small"), tests=TEST, sandbox=LIMITS, timeouts=TIMEOUTS)
    with Store.open(tmp_path) as store:
        record, history = saved(store, task)
        assert sorted(history.folder("c0") or ()) == ["lower.txt"]
        assert paths(history, "c0") == [("changed", "lower.txt"), ("added", "one.txt")]
        assert paths(history, "c1") == [("removed", "lower.txt")]
        owned = (history.folder("c1") or {})["one.txt"]
    assert record.snapshots["problems"] == {}
    assert owned.digest is not None or "cannot be read" in (owned.reason or "")


def test_a_step_continues_the_snapshots_of_the_one_before(tmp_path: Path) -> None:
    steps = [TaskStep(name, f"echo 1 > {name}.txt", tests=TEST) for name in ("first", "second")]
    task = Task(
        "unused", "steps", image=TaskImage("small"), steps=tuple(steps), sandbox=LIMITS, timeouts=TIMEOUTS,
        settings=TaskSettings(),
    )  # fmt: skip
    with Store.open(tmp_path) as store:
        record, history = saved(store, task)
        assert list(record.snapshots["ends"]) == ["end of first", "end of second"]
        assert paths(history, "c0") == [("added", "first.txt")]
        assert paths(history, "c1") == [("added", "second.txt")]
        assert sorted(history.folder("c1") or ()) == ["first.txt", "lower.txt"]
