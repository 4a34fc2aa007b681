"""`paddock fleet` as a person uses it: a plane in one process, eight tasks in another, and kills in between."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.plane_process import PlaneProcess, adds, note_task, plain_environment, plane_process, played
from paddock.rollouts.sandboxes import recover
from paddock.store import Store
from paddock.store.outcome import Outcome
from rollouts.played import children_of, wait_until

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(90, func_only=True)]

TITLES = [f"note{number}" for number in range(8)]
SLOW = [{"turn": 1, "hang": 60}]
"""The model says nothing for long once its first call was carried out."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneProcess]:
    with plane_process(tmp_path_factory.mktemp("plane"), "--warm", "4", "--gate") as started:
        yield started


class FleetCommands:
    """A folder with eight tasks, a model and a store, and commands that run on them."""

    def __init__(self, folder: Path, plane: PlaneProcess, **script: Any) -> None:
        self.folder = folder
        self.plane = plane
        self.started: list[subprocess.Popen[str]] = []
        self.store = folder / "store"
        (folder / "tasks.json").write_text(json.dumps({"tasks": [note_task(title) for title in TITLES]}))
        right, wrong = TITLES[:6], TITLES[6:]
        turns = played(*right, **script)
        turns["tasks"] += [
            {"when": f"called {title}.", "turns": [adds("else"), {"text": "Done."}]} for title in wrong
        ]
        (folder / "script.json").write_text(json.dumps(turns))

    def start(self, *options: str) -> subprocess.Popen[str]:
        run = ["run", "tasks.json", "--model", "replay:script.json", "--parallel", "8", "--store", str(self.store)]
        return self.process(*run, *options)

    def process(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "paddock", "fleet", *arguments, "--state", str(self.plane.state)]
        piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.started.append(subprocess.Popen(command, cwd=self.folder, env=plain_environment(), **piped))
        return self.started[-1]

    def __enter__(self) -> "FleetCommands":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def done(self, *arguments: str) -> tuple[int, str, str]:
        process = self.process(*arguments)
        stdout, stderr = process.communicate(timeout=60)
        return process.returncode, stdout, stderr

    def wait_until_at_work(self) -> None:
        """Until every rollout has made a call."""

        def at_work() -> bool:
            if not self.store.exists():
                return False
            with Store.open(self.store) as store:
                return sum(record.call_count > 0 for record in store.list()) == len(TITLES)

        wait_until(at_work, 40)

    def outcomes(self) -> list[Outcome | None]:
        with Store.open(self.store) as store:
            return [record.outcome for record in store.list(limit=1000)]


def test_eight_tasks_in_parallel_get_the_right_rewards(plane: PlaneProcess, tmp_path: Path) -> None:
    with FleetCommands(tmp_path, plane) as commands:
        running = commands.start("--json")
        stdout, stderr = running.communicate(timeout=80)
        assert running.returncode == 0, stderr
        result = {line["task_id"]: line for line in map(json.loads, stdout.splitlines())}
        assert [result[f"note-{title}"]["reward"] for title in TITLES] == [1.0] * 6 + [0.0] * 2
        assert all(line["outcome"] == "ok" and line["trainable"] for line in result.values())
        assert len({line["metadata"]["instance_id"] for line in result.values()}) == 8
        assert plane.alive() == []


def test_ctrl_c_ends_everything_soon_and_the_batch_can_go_on(plane: PlaneProcess, tmp_path: Path) -> None:
    with FleetCommands(tmp_path, plane, faults=SLOW) as commands:
        running = commands.start()
        commands.wait_until_at_work()
        assert len(plane.alive()) == 8
        began = time.monotonic()
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=30)
        assert time.monotonic() - began < 10
        assert running.returncode == 130
        assert plane.alive() == []
        assert commands.outcomes() == [Outcome.CANCELLED] * 8
        batch = stderr.rpartition("--resume ")[2].strip()
        (tmp_path / "script.json").write_text(json.dumps(played(*TITLES)))
        again = commands.start("--resume", batch)
        assert again.communicate(timeout=60)
        assert again.returncode == 0
        assert commands.outcomes().count(Outcome.OK) == 8


def test_what_a_killed_run_leaves_is_swept_by_its_run(plane: PlaneProcess, tmp_path: Path) -> None:
    with FleetCommands(tmp_path, plane, faults=SLOW) as commands:
        running = commands.start()
        commands.wait_until_at_work()
        running.kill()
        _, stderr = running.communicate(timeout=10)
        run_id = stderr.rpartition("paddock fleet rm --run ")[2].split()[0]
        left = plane.alive(run_id=run_id)
        assert len(left) == 8
        code, stdout, _ = commands.done("rm", "--run", run_id)
        assert (code, sorted(stdout.split())) == (0, sorted(left))
        assert plane.alive() == []
        with Store.open(commands.store) as store:
            recover(store)
        assert commands.outcomes() == [Outcome.CANCELLED] * 8


def test_a_plane_that_is_killed_breaks_rollouts_and_leaves_no_process(tmp_path: Path) -> None:
    with (
        plane_process(tmp_path, "--warm", "2", ends_with=-signal.SIGKILL) as plane,
        FleetCommands(tmp_path, plane, faults=[{"turn": 1, "delay": 4}]) as commands,
    ):
        running = commands.start("--retries", "0", "--json", "--timeout", "8")
        commands.wait_until_at_work()
        processes = children_of(plane.pid)
        assert len(processes) >= 8
        os.kill(plane.pid, signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), 10)
        stdout, _ = running.communicate(timeout=80)
    assert running.returncode == 1
    assert [json.loads(line)["outcome"] for line in stdout.splitlines()] == ["environment"] * 8


def test_a_terminal_sees_a_picture_and_then_the_table(plane: PlaneProcess, tmp_path: Path) -> None:
    import pty

    commands = FleetCommands(tmp_path, plane)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paddock", "fleet", "run", "tasks.json", "--model", "replay:script.json"]
    running = subprocess.Popen(
        [*command, "--store", str(commands.store), "--state", str(plane.state)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        cwd=tmp_path,
        env=plain_environment(TERM="xterm", COLUMNS="120"),
    )
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:
        pass  # a terminal whose other end is closed
    finally:
        os.close(ours)
    stdout, _ = running.communicate(timeout=30)
    assert running.returncode == 0
    assert b"8/8" in seen or b"7/8" in seen
    assert b"note-note0" in stdout
