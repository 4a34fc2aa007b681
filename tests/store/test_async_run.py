"""Async callers: in order, off the loop, and not undone by a cancellation."""

import asyncio
import logging
import threading

import pytest

from paddock.errors import StoreError
from paddock.store import Store
from paddock.store.record import RolloutRecord


def test_work_is_done_on_one_other_thread_in_order(store: Store) -> None:
    async def scenario() -> list[int | None]:
        names = [store.run(threading.get_ident) for _ in range(3)]
        await asyncio.gather(*(store.run(store.begin, RolloutRecord(f"r-{n}", "task")) for n in range(20)))
        return list(await asyncio.gather(*names))

    threads = asyncio.run(scenario())
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()
    assert [record.rollout_id for record in store.list(newest_first=False)] == [f"r-{n}" for n in range(20)]


def test_results_and_errors_come_back(store: Store) -> None:
    async def scenario() -> None:
        assert await store.run(store.list, limit=3) == []
        with pytest.raises(StoreError, match="no rollout"):
            await store.run(store.calls, "nobody")

    asyncio.run(scenario())


def test_a_cancelled_caller_leaves_at_once_and_loses_no_write(store: Store) -> None:
    held = threading.Event()

    async def scenario() -> None:
        blocked = asyncio.create_task(store.run(held.wait, 20))
        writing = asyncio.create_task(store.run(store.begin, RolloutRecord("r-one", "task")))
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        held.set()
        await blocked
        await store.run(store.count)

    asyncio.run(scenario())
    assert store.get("r-one") is not None


def test_closing_waits_for_what_a_closed_loop_left(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    held = threading.Event()

    async def scenario() -> None:
        tasks = [
            asyncio.create_task(store.run(held.wait, 20)),
            asyncio.create_task(store.run(store.begin, RolloutRecord("r-one", "task"))),
            asyncio.create_task(store.run(store.calls, "nobody")),
        ]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())
    held.set()
    with caplog.at_level(logging.WARNING):
        store.close()
    assert "no rollout nobody" in caplog.text
    with Store.open(store.path, read_only=True) as reader:
        assert reader.get("r-one") is not None


def test_a_closed_store_takes_no_work(store: Store) -> None:
    store.close()
    with pytest.raises(StoreError, match="closed"):
        asyncio.run(store.run(store.count))


def test_a_store_can_be_closed_from_its_own_thread(store: Store) -> None:
    asyncio.run(store.run(store.close))
    with pytest.raises(StoreError, match="closed"):
        store.count()
