"""Paddock is killed, or told to stop, in the middle of eight rollouts. Nothing is lost and nothing stays."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from paddock.store import Store
from rollouts.played import SPEAKING, children_of, needs_bwrap, wait_until, working_in

from .processes import quiet_environment

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(90, func_only=True), needs_bwrap]

ROLLOUTS = 8
TEST = """
mkdir -p /logs/verifier
sleep 0.3
if [ "$(cat answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SCRIPT = {
    "turns": [{"tool": "bash", "arguments": {"command": "echo 42 > answer.txt; sleep 0.3"}}, {"text": "word " * 20}],
    "faults": [{"turn": 1, "per_token_delay": 0.02}],
}


class Place:
    """A store, a task and a model, and commands that run on them in a folder of temporary files of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        task = folder / "task"
        (task / "tests").mkdir(parents=True)
        (task / "instruction.md").write_text("Write 42 to answer.txt.")
        (task / "tests" / "test.sh").write_text(TEST)
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        # Its processes are told from all others on this machine by this word.
        self.mark = f"mark-{os.urandom(8).hex()}"
        agent = f"MARK = '{self.mark}'\n{SPEAKING}\nsys.exit(converse())"
        self.options = [
            *("--agent", f"command:{shlex.join(['python3', '-c', agent])}"),
            *("--model", f"replay:{folder / 'script.json'}", "-n", str(ROLLOUTS), "--parallel", str(ROLLOUTS)),
        ]

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "paddock", *words, "--store", str(self.store)]

    @property
    def environment(self) -> dict[str, str]:
        return {**quiet_environment(), "TMPDIR": str(self.temporary)}

    def start(self) -> subprocess.Popen[bytes]:
        command = self.command("rollout", str(self.folder / "task"), *self.options, "--json")
        log = (self.folder / "log").open("ab")
        with log:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, env=self.environment, cwd=self.folder
            )

    def run(self, *words: str, code: int = 0) -> Any:
        done = subprocess.run(
            self.command(*words, "--json"),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def begun(self) -> int:
        """How many rollouts the store knows."""
        try:
            with Store.open(self.store, read_only=True) as store:
                return store.count()
        except Exception:
            return 0

    def survivors(self) -> list[str]:
        """What runs of it: the agents bear our mark, and whatever is still on its way in sits in our folder."""
        result = working_in(self.folder)
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if self.mark.encode() in words:
                result.append(f"{entry.name}: {words[:60]!r}")
        return result


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def wait_gone(pids: list[int]) -> None:
    def gone() -> bool:
        return not any(alive(pid) for pid in pids)

    wait_until(gone, 10)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def interrupted_after(place: Place, seconds: float, number: int) -> tuple[subprocess.Popen[bytes], list[int]]:
    """Start, wait until the rollouts are under way and a moment longer, signal. Its processes come along."""
    before = place.begun()
    process = place.start()
    wait_until(lambda: place.begun() > before, 20)
    time.sleep(seconds)  # the moment is the point: it is drawn at random
    below = children_of(process.pid)
    process.send_signal(number)
    return process, below


def test_a_kill_loses_nothing_and_leaves_nothing(place: Place) -> None:
    """Three times, each at another moment; what was recorded before is still there afterwards."""
    chance = random.Random(os.environ.get("PADDOCK_SEED") or 7)
    finished: dict[str, Any] = {}
    for _ in range(3):
        process, below = interrupted_after(place, chance.uniform(0.0, 1.2), signal.SIGKILL)
        process.communicate(timeout=20)
        wait_gone(below)
        with Store.open(place.store, read_only=True) as store:
            open_before = {record.rollout_id for record in store.list(finished=False, limit=999)}
        (cleaned,) = place.run("doctor", "--clean")
        assert set(cleaned["rollouts"]) == open_before
        (again,) = place.run("doctor", "--clean")
        assert (again["rollouts"], again["sandboxes"]) == ([], [])
        records = place.run("trace", "list", "--limit", "999")
        expected = {record["rollout_id"]: (record["outcome"], record["reward"]) for record in records}
        assert all(outcome is not None for outcome, _ in expected.values())
        assert all(outcome == "cancelled" for name, (outcome, _) in expected.items() if name in open_before)
        assert finished.items() <= expected.items()
        finished = expected
        assert list(place.temporary.iterdir()) == []
        assert place.survivors() == []
    with Store.open(place.store) as store:
        assert store.open_sandboxes() == []
        for record in store.list(limit=999):
            for call in store.calls(record.rollout_id):
                assert not call.trainable or call.finish_reason is not None


def test_a_kill_while_the_sandboxes_start_leaves_no_process(place: Place) -> None:
    """A program that waits for the one that started it must not wait for ever."""
    chance = random.Random(3)
    for _ in range(3):
        process, _ = interrupted_after(place, chance.uniform(0.0, 0.12), signal.SIGKILL)
        process.communicate(timeout=20)
        place.run("doctor", "--clean")
        wait_until(lambda: place.survivors() == [], 3)


def test_a_kill_while_the_verifier_starts_leaves_no_folder(place: Place) -> None:
    """The moment at which a folder of the host is in use, and perhaps nobody has written that down yet."""
    for _ in range(2):
        process = place.start()
        wait_until(lambda: any(place.temporary.iterdir()), 20)
        below = children_of(process.pid)
        process.kill()
        process.communicate(timeout=20)
        wait_gone(below)
        place.run("doctor", "--clean")
        assert list(place.temporary.iterdir()) == []
        assert place.survivors() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cancels_and_records_all_of_them(place: Place, number: signal.Signals) -> None:
    process = place.start()
    wait_until(lambda: place.begun() == ROLLOUTS, 20)
    below = children_of(process.pid)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == 130, (place.folder / "log").read_text()[-2000:]
    wait_gone(below)
    records = place.run("trace", "list")
    assert [record["outcome"] for record in records] == ["cancelled"] * ROLLOUTS
    assert list(place.temporary.iterdir()) == []
    assert place.survivors() == []
    (cleaned,) = place.run("doctor", "--clean")
    assert (cleaned["rollouts"], cleaned["sandboxes"]) == ([], [])
    assert "--resume" in (place.folder / "log").read_text()


def test_two_signals_in_a_row_leave_nothing_either(place: Place) -> None:
    process = place.start()
    wait_until(lambda: place.begun() == ROLLOUTS, 20)
    below = children_of(process.pid)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    process.communicate(timeout=20)
    wait_gone(below)
    place.run("doctor", "--clean")
    assert [record["outcome"] for record in place.run("trace", "list")] == ["cancelled"] * ROLLOUTS
    assert list(place.temporary.iterdir()) == []
    assert place.survivors() == []


def test_a_stopped_batch_goes_on_and_every_member_is_rewarded(place: Place) -> None:
    place.options += ["--batch-id", "b-crash"]
    process, below = interrupted_after(place, 0.5, signal.SIGKILL)
    process.communicate(timeout=20)
    wait_gone(below)
    summaries = place.run("rollout", str(place.folder / "task"), *place.options)
    assert len(summaries) == ROLLOUTS
    assert {summary["member"] for summary in summaries} == set(range(ROLLOUTS))
    assert [summary["reward"] for summary in summaries] == [1.0] * ROLLOUTS
    with Store.open(place.store) as store:
        assert store.count(finished=False) == 0
    assert list(place.temporary.iterdir()) == []


def test_the_temporary_folder_stays_empty() -> None:
    """All of this left nothing behind that a later look could find."""
    mine = [
        path for path in Path(tempfile.gettempdir()).glob("paddock-sb-*") if path.stat().st_mtime > time.time() - 60
    ]
    wait_until(lambda: not any(path.exists() for path in mine), 20)
