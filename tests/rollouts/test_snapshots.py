"""Snapshots of the work folder: what each call changed, and whether a fork has the same files."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.masking import Mask
from paddock.capture.trace import Call
from paddock.errors import ConfigError, StoreError
from paddock.limits import SnapshotLimits
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts import snapshots
from paddock.rollouts.fork import fork
from paddock.rollouts.recorder import RolloutRecorder
from paddock.rollouts.snapshots import WorkFolderSnapshots
from paddock.sandbox.bwrap import BwrapSandbox
from paddock.sandbox.folder_scan import FileState, FolderScan, ScannedEntry
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.snapshots import SnapshotHistory
from rollouts.played import UPSTREAM_KEY, a_task, needs_bwrap, roll, rolled, run, shell, speaker, spoken

pytestmark = needs_bwrap


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened


def script(*commands: str) -> dict[str, Any]:
    turns = [{"tool": "bash", "arguments": {"command": command}} for command in commands]
    return {"turns": [*turns, {"text": "Done."}]}


def saved(store: Store, *commands: str, **options: Any) -> RolloutRecord:
    record, _ = run(spoken(store, script(*commands), snapshots=True, **options))
    assert (record.outcome, record.error) == (Outcome.OK, None)
    return record


def history(store: Store, record: RolloutRecord) -> SnapshotHistory:
    calls = [(call.id, call.snapshot) for call in store.calls(record.rollout_id)]
    return SnapshotHistory([*calls, *record.snapshots["ends"].items()], store.get_blob)


def changed(store: Store, record: RolloutRecord, call: str) -> list[tuple[str, str]]:
    changes = history(store, record).changes(call)
    assert changes is not None
    return [(change.kind, change.path) for change in changes]


def test_each_call_has_what_it_changed(store: Store) -> None:
    record = saved(
        store, "echo 4 > answer.txt; ln -s x l", "echo 42 > answer.txt; rm l", "true", "mkdir d; mv answer.txt d"
    )
    assert changed(store, record, "c0") == [("added", "answer.txt"), ("added", "l")]
    assert changed(store, record, "c1") == [("changed", "answer.txt"), ("removed", "l")]
    assert changed(store, record, "c2") == []
    assert changed(store, record, "c3") == [("removed", "answer.txt"), ("added", "d"), ("added", "d/answer.txt")]
    assert changed(store, record, "c4") == []
    (change, _) = history(store, record).changes("c1") or ()
    contents = [store.get_blob(state.digest) for state in (change.before, change.after) if state and state.digest]
    assert contents == [b"4\n", b"42\n"]


def test_the_last_call_is_compared_with_the_end(store: Store) -> None:
    record = rolled(store, shell("echo 42 > answer.txt"), snapshots=True)
    assert list(record.snapshots["ends"]) == ["end"]
    assert record.snapshots["saved"] == 1


def test_without_the_option_nothing_is_saved(store: Store) -> None:
    record, _ = run(spoken(store, script("echo 42 > answer.txt")))
    assert record.snapshots == {}
    assert [call.snapshot for call in store.calls(record.rollout_id)] == [{}, {}]


def test_files_of_the_task_are_in_the_first_snapshot(store: Store) -> None:
    task = a_task(files={"src/a.py": b"a = 1\n"}, modes={"src/a.py": 0o755})
    folder = history(store, saved(store, "true", task=task)).folder("c0")
    assert folder is not None
    assert sorted(folder) == ["src", "src/a.py"]
    assert folder["src/a.py"].mode == 0o755


def test_a_limit_and_a_secret_are_named(store: Store) -> None:
    limits = SnapshotLimits(file_bytes=100)
    record = saved(
        store, f"head -c 101 /dev/zero > big; echo {UPSTREAM_KEY} > key; mkdir venv", snapshot_limits=limits
    )
    assert record.snapshots["left_out"] == {
        "big": "it is larger than 100 bytes",
        "key": "it contains a secret of the run",
        "venv": "its content can be made again",
    }
    assert changed(store, record, "c0") == [("added", "big"), ("added", "key"), ("added", "venv")]


def test_a_folder_that_does_not_answer_holds_nothing_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "READ_SECONDS", 0.05)

    async def hang(*_: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(BwrapSandbox, "with_folder", hang)
    record = saved(store, "echo 42 > answer.txt", "true")
    assert record.reward == 1.0
    assert record.snapshots["saved"] == 0
    problems = [call.snapshot["problem"] for call in store.calls(record.rollout_id)]
    assert problems == [
        "the work folder was not read within 0.05 s",
        *["the snapshot before is still being read"] * 2,
    ]


def test_a_snapshot_that_cannot_be_stored_is_part_of_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put, failures = store.put_snapshot, iter([StoreError("the disk is full")])

    def fail_once(*args: Any) -> None:
        for failure in failures:
            raise failure
        put(*args)

    monkeypatch.setattr(store, "put_snapshot", fail_once)
    record = saved(store, "true", "echo 42 > answer.txt", task=a_task(files={"a.txt": b"a"}))
    recorded = history(store, record)
    assert recorded.folder("c0") is None
    assert sorted(recorded.folder("c2") or ()) == ["a.txt", "answer.txt"]
    assert record.snapshots["problems"] == {"the disk is full": 1}


class SlowSandbox:
    """Its work folder cannot be read before `ready` is set."""

    workdir = "work"

    def __init__(self) -> None:
        self.reads = 0
        self.ready = asyncio.Event()

    async def with_folder(self, path: str, work: Any) -> FolderScan:
        self.reads += 1
        await self.ready.wait()
        state = FileState("file", 0o644, self.reads)
        return FolderScan({"a": ScannedEntry(state, None)})


def test_calls_that_begin_during_a_scan_share_the_next_one(store: Store) -> None:
    async def play() -> None:
        sandbox: Any = SlowSandbox()
        record = RolloutRecord("r1", "task", started_at=1.0)
        store.begin(record)
        recorder = RolloutRecorder(store, record, Mask(()), lambda: None)
        folder_snapshots = WorkFolderSnapshots(lambda: sandbox, recorder, SnapshotLimits())
        calls = [Call(f"c{number}", number) for number in range(3)]
        begun = [folder_snapshots.begin(calls[0])]
        while not sandbox.reads:
            await asyncio.sleep(0)
        begun += map(folder_snapshots.begin, calls[1:])
        sandbox.ready.set()
        await asyncio.gather(*begun)
        for call in calls:
            await folder_snapshots.wait_saved(call)
        assert sandbox.reads == 2
        assert [(call.snapshot["since"], call.snapshot["count"]) for call in calls] == [
            (None, 1),
            ("c0", 1),
            ("c1", 0),
        ]

    run(play())


def test_where_there_is_no_folder_snapshots_are_refused(store: Store) -> None:
    with pytest.raises(ConfigError, match="the agent loop has none"):
        rolled(store, "loop", env="counter", snapshots=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="docker sandbox cannot be read"):
        rolled(store, shell("true"), sandbox="docker", snapshots=True)


def test_plain_processes_have_snapshots_too(store: Store) -> None:
    record = saved(store, "echo 42 > answer.txt", sandbox="process", consent=True)
    assert changed(store, record, "c0") == [("added", "answer.txt")]


# -- forks ------------------------------------------------------------------------------------------------


async def record_and_fork(store: Store, *commands: str, at: int, **options: Any) -> dict[str, Any]:
    """What the record of a fork says about its files."""
    async with ReplayServer(script(*commands), api_key=UPSTREAM_KEY) as server:
        model = Endpoint(server.url, "replay", api_key=UPSTREAM_KEY, engine="vllm")
        source = await roll(store, speaker(), model=model, **{"snapshots": True, **options})
        result = await fork(source, at=at, model=model, agent=speaker(), store=store, snapshots=True)
        (record,) = result.records
        files: dict[str, Any] = record.fork["fidelity"]["files"]
        return files


def test_a_fork_with_the_same_files_says_so(store: Store) -> None:
    files = run(record_and_fork(store, "echo 42 > answer.txt", "date +%H:%M:%S.%N > t", "true", at=2))
    assert (files["state"], files["compared_calls"], files["volatile"]) == ("volatile", 3, ["t"])
    files = run(record_and_fork(store, "echo 42 > answer.txt", "true", at=1))
    assert (files["state"], files["equal_calls"]) == ("equal", 2)


def test_a_fork_names_the_files_that_differ(store: Store) -> None:
    command = "head -c 8 /dev/urandom > random; [ $RANDOM -gt -1 ] && echo w$RANDOM$RANDOM > word; true"
    files = run(record_and_fork(store, "true", command, "true", at=3))
    assert (files["state"], files["equal_calls"], files["compared_calls"]) == ("different", 2, 4)
    assert [(each["path"], each["call"], each["kind"]) for each in files["paths"]] == [
        ("random", "c2", "different"),
        ("word", "c2", "different"),
    ]
    assert "-w" in files["paths"][1]["difference"]


def test_a_source_without_snapshots_is_the_reason(store: Store) -> None:
    files = run(record_and_fork(store, "true", at=1, snapshots=False))
    assert files["state"] is None
    assert "recorded without snapshots" in files["reason"]


# -- how long they are kept -----------------------------------------------------------------------------


def test_old_snapshots_are_deleted_and_the_rollout_stays(store: Store) -> None:
    record = saved(store, "echo 42 > answer.txt")
    assert store.expire_snapshots(3600.0) == 0
    assert history(store, record).folder("c0") is not None
    while time.time() <= (record.finished_at or 0):
        pass
    assert store.expire_snapshots(0.0) == 1
    with pytest.raises(StoreError, match="no blob"):
        history(store, record).folder("c1")
    assert store.get(record.rollout_id) is not None
    assert store.prune(max_age_seconds=0.0).rollouts == [record.rollout_id]


def test_a_deleted_rollout_leaves_the_snapshots_of_others(store: Store) -> None:
    first = saved(store, "echo 42 > answer.txt")
    second = saved(store, "echo 42 > answer.txt; echo 1 > more")
    store.delete([first.rollout_id])
    assert store.get(first.rollout_id) is None
    assert changed(store, second, "c0") == [("added", "answer.txt"), ("added", "more")]
