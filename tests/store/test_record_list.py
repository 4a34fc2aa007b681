"""Listings hold all that match, in little memory, whatever happens to the store meanwhile."""

import time

import pytest

from paddock.capture.trace import Event
from paddock.errors import StoreError
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.rows import PAGE_ROWS

MANY = 2 * PAGE_ROWS + 51


def fill(store: Store, count: int = MANY, first: int = 0) -> list[str]:
    names = [f"r-{number:04}" for number in range(first, first + count)]
    for name in names:
        record = RolloutRecord(name, "t", started_at=time.time(), outcome=Outcome.OK)
        store.finish(record)
    return names


def test_a_listing_has_no_silent_end(store: Store) -> None:
    names = fill(store)
    assert [record.rollout_id for record in store.list(newest_first=False)] == names
    assert [record.rollout_id for record in store.list(finished=True)] == names[::-1]
    assert len(store.list()) == store.count() == MANY


def test_a_listing_is_a_sequence(store: Store) -> None:
    names = fill(store, 5)
    records = store.list(newest_first=False)
    assert (records[0].rollout_id, records[-1].rollout_id) == (names[0], names[-1])
    assert [record.rollout_id for record in records[1:3]] == names[1:3]
    assert store.list(task_id="none") == []
    assert store.list() == store.list()
    assert [record.rollout_id for record in store.list(limit=2, offset=3, newest_first=False)] == names[3:]
    assert list(store.list(limit=0)) == []


def test_rollouts_that_begin_meanwhile_change_nothing(store: Store) -> None:
    names = fill(store)
    seen = []
    for record in store.list():
        if len(seen) % 50 == 0:
            fill(store, 3, first=1000 + len(seen))
        seen.append(record.rollout_id)
    assert seen == names[::-1]


def test_rollouts_that_are_deleted_meanwhile_are_left_out(store: Store) -> None:
    fill(store)
    records = store.list()
    seen = [next(iter(records)).rollout_id]
    store.prune(max_bytes=1)
    assert list(records) == []
    assert len(seen) == 1
    with pytest.raises(StoreError, match="deleted"):
        records[0]


def test_one_page_is_read_at_a_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    pages: list[int] = []
    read = store._read_records
    monkeypatch.setattr(store, "_read_records", lambda keys: pages.append(len(keys)) or read(keys))
    next(iter(store.list()))
    assert pages == [PAGE_ROWS]


def test_a_limit_below_zero_is_refused(store: Store) -> None:
    for wrong in ({"limit": -1}, {"offset": -1}):
        with pytest.raises(StoreError, match="-1"):
            store.list(**wrong)


def test_all_events_are_read(store: Store) -> None:
    store.begin(RolloutRecord("r-one", "t"))
    for number in range(1001):
        store.add_event("r-one", Event(0.0, "said", {"number": number}))
    assert len(store.events("r-one")) == 1001
    assert len(store.events("r-one", limit=7)) == 7
