"""Blobs, and making room."""

import os
import time
from pathlib import Path

import pytest

from paddock.capture.trace import Call, Event
from paddock.errors import StoreError
from paddock.store import SandboxEntry, Store, blobs
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord


def rollout(store: Store, name: str, *, age: float, content: str = "", finish: bool = True) -> RolloutRecord:
    """A rollout with a bit of everything, and about 40 kB that no compression makes smaller."""
    record = RolloutRecord(name, "task", agent_log="line", started_at=time.time() - age - 1)
    store.begin(record)
    store.record_sandbox(SandboxEntry(f"box-{name}", "bwrap", name))
    store.end_sandbox(f"box-{name}")
    store.save_call(name, Call("c0", 0, request={"messages": [{"content": content or name * 300}]}))
    store.add_event(name, Event(0.0, "line"))
    store.rescore(name, 1.0, None, {}, "")
    record.workdir_blob = store.put_blob(name.encode() + os.urandom(40_000))
    if finish:
        record.outcome, record.finished_at = Outcome.OK, time.time() - age
        store.finish(record)
    else:
        store.update(record)
    return record


def rows_left(store: Store) -> dict[str, int]:
    tables = ("bodies", "calls", "sequences", "events", "scores", "blobs", "blob_references", "sandboxes")
    with store._database.read() as connection:
        return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}


def test_a_blob_is_its_bytes_stored_once(store: Store) -> None:
    for data in (b"", b"short", b"long" * 1000, os.urandom(5000)):
        digest = store.put_blob(data)
        assert store.put_blob(data) == digest
        assert store.get_blob(digest) == data
    assert rows_left(store)["blobs"] == 4


def test_an_unknown_blob_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="no blob beef"):
        store.get_blob("beef")


def test_a_damaged_blob_is_noticed(store: Store) -> None:
    digest = store.put_blob(b"right")
    with store._database.write() as connection:
        connection.execute("UPDATE blobs SET data = ?", (b"\0wrong",))
    with pytest.raises(StoreError, match="damaged"):
        store.get_blob(digest)


def test_old_rollouts_go_with_everything_of_theirs(store: Store) -> None:
    rollout(store, "old", age=1000)
    pruned = store.prune(max_age_seconds=500)
    assert pruned.rollouts == ["old"]
    assert pruned.blobs == 1
    assert set(rows_left(store).values()) == {0}
    assert store.get("old") is None


def test_what_is_young_or_running_stays(store: Store) -> None:
    rollout(store, "young", age=100)
    running = rollout(store, "running", age=1000, finish=False)
    assert store.prune(max_age_seconds=500).rollouts == []
    pruned = store.prune(max_bytes=0)
    assert pruned.rollouts == ["young"]
    assert running.workdir_blob is not None
    assert len(store.get_blob(running.workdir_blob)) > 40_000
    assert len(store.calls("running")) == 1


def test_a_shared_blob_goes_with_the_last_that_uses_it(store: Store) -> None:
    text = "shared " * 300
    for name, age in (("one", 3000.0), ("two", 2000.0), ("three", 1000.0)):
        rollout(store, name, age=age, content=text)
    assert store.prune(max_age_seconds=2500).blobs == 1
    assert store.calls("three")[0].request["messages"][0]["content"] == text
    assert store.prune(max_age_seconds=500).blobs == 3
    assert rows_left(store)["blobs"] == 0


def test_the_oldest_go_until_the_store_is_small_enough_and_the_file_shrinks(store: Store) -> None:
    for number in range(20):
        rollout(store, f"rollout-{number}", age=1000.0 - number)
    store.prune()
    before = store.size_bytes()
    pruned = store.prune(max_bytes=500_000)
    assert 400_000 < store.size_bytes() <= 500_000
    assert pruned.bytes_freed == before - store.size_bytes()
    left = sorted(int(record.rollout_id.split("-")[1]) for record in store.list())
    assert left == list(range(20 - len(left), 20))
    assert pruned.rollouts == [f"rollout-{number}" for number in range(20 - len(left))]


def test_a_blob_that_no_record_names_yet_is_held_for_a_day(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.put_blob(b"the same")
    store.put_blob(b"the same")
    record = RolloutRecord("r-one", "task", outcome=Outcome.OK, workdir_blob=first)
    store.finish(record)
    store.prune(max_bytes=0)
    assert store.get_blob(first) == b"the same"  # the second who put it has not named it yet
    monkeypatch.setattr(blobs, "HELD_SECONDS", -1.0)
    assert store.prune().blobs == 1


def test_pruning_an_empty_store_does_nothing(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        assert store.prune(max_age_seconds=0, max_bytes=0).rollouts == []


def test_other_processes_may_read_while_the_store_is_pruned(store: Store) -> None:
    rollout(store, "old", age=1000)
    with Store.open(store.path, read_only=True) as reader, reader._database.read() as connection:
        connection.execute("SELECT count(*) FROM rollouts").fetchone()
        assert store.prune(max_age_seconds=1).rollouts == ["old"]
        assert connection.execute("SELECT count(*) FROM calls").fetchone()[0] == 1
    assert store.count() == 0
