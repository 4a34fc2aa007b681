"""Requests to stop a running rollout, from any process that has the store open."""

import asyncio
import time
from pathlib import Path

import pytest

from paddock.errors import StoreError
from paddock.store import Store
from paddock.store.outcome import Outcome
from rollouts.played import needs_bwrap, roll, shell


@needs_bwrap
def test_a_running_rollout_stops_when_another_process_requests_it(tmp_path: Path) -> None:
    async def play() -> float:
        with Store.open(tmp_path) as store, Store.open(tmp_path, read_only=True) as other:
            rolling = asyncio.create_task(roll(store, shell("sleep 30")))
            async with asyncio.timeout(20):
                while not (running := other.list(finished=False)) or running[0].stage != "agent":
                    await asyncio.sleep(0.05)
            began = time.monotonic()
            other.aborts.request(running[0].rollout_id, "stopped from the page")
            record = await rolling
            took = time.monotonic() - began
            assert (record.outcome, record.error) == (Outcome.CANCELLED, "stopped from the page")
            assert store.aborts.requested_ids() == []
            return took

    assert asyncio.run(play()) < 5


def test_one_poller_serves_all_rollouts(tmp_path: Path) -> None:
    async def play() -> None:
        with Store.open(tmp_path) as store:
            stopped: list[tuple[str, str]] = []

            async def watch(name: str) -> None:
                over = asyncio.Event()

                async def abort(reason: str) -> None:
                    stopped.append((name, reason))
                    over.set()

                async with store.aborts.watch(name, abort):
                    await asyncio.wait_for(over.wait(), 5)

            running = [asyncio.create_task(watch(f"r-{number}")) for number in range(3)]
            await asyncio.sleep(0)
            store.aborts.request("r-1", "because")
            await running[1]
            assert stopped == [("r-1", "because")]
            for name in ("r-0", "r-2", "r-unknown"):
                store.aborts.request(name)
            await asyncio.gather(*running)
            assert sorted(name for name, _ in stopped) == ["r-0", "r-1", "r-2"]

    asyncio.run(play())


@pytest.mark.parametrize("name", ["", "..", "a/b", "../store.db", "a\0b"])
def test_only_an_id_can_be_asked_for(name: str, tmp_path: Path) -> None:
    with Store.open(tmp_path) as store, pytest.raises(StoreError):
        store.aborts.request(name)


def test_a_store_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        (tmp_path / "aborts").write_text("in the way")
        with pytest.raises(StoreError, match="cannot take the request"):
            store.aborts.request("r-one")
