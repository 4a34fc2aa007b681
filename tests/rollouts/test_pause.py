"""Pauses of a batch: rollouts survive a weight update, lose no time, and end at once when they are cancelled."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paddock.limits import RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.batch import Batch, BatchResult
from paddock.rollouts.config import RunConfig
from paddock.rollouts.context import open_run
from paddock.rollouts.rollout import Rollout
from paddock.store import Store
from paddock.store.outcome import Outcome
from rollouts.played import SOLVES, a_task, needs_bwrap, own_children, run, speaker

pytestmark = needs_bwrap


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as opened:
        yield opened
        assert opened.count(finished=False) == 0
        assert opened.open_sandboxes() == []
    assert own_children() == []


class Progress:
    """A batch, and a condition on its rollouts to wait for."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Rollout] = {}
        self._changed = asyncio.Event()

    def follow(self, rollout: Rollout) -> None:
        self.rollouts[rollout.id] = rollout
        self._changed.set()

    async def until(self, condition: Callable[[Rollout], bool]) -> None:
        """Until all rollouts fulfill it."""
        while not (self.rollouts and all(map(condition, self.rollouts.values()))):
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def a_batch(store: Store, script: Any = SOLVES, **fields: Any) -> AsyncIterator[tuple[Any, Progress, Any]]:
    """A batch whose calls have the weight version 1, and its model."""
    async with ReplayServer(script) as server:
        endpoint = Endpoint(server.url, "replay", engine="vllm")
        options = {"agent": speaker(), "weight_version": 1, "retries": 0, **fields}
        task = options.pop("task", None) or a_task()
        async with open_run(RunConfig(model=endpoint, store=store, **options)) as context:
            progress = Progress()
            yield Batch([task], context, on_change=progress.follow), progress, server


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_rollouts_survive_a_weight_update(store: Store, in_flight: Any) -> None:
    counts = (2, 0) if in_flight == "abort" else (0, 2)

    async def body() -> BatchResult:
        slow = {"turn": 1, "hang": 30, "times": 2} if in_flight == "abort" else {"turn": 0, "delay": 1.0}
        async with a_batch(store, {**SOLVES, "faults": [slow]}, n=2, parallel=2) as (batch, progress, server):
            running = asyncio.create_task(batch.run())
            if in_flight == "abort":
                await progress.until(lambda rollout: rollout.record.call_count >= 1)
            while batch.context.gate.in_flight < 2:
                await asyncio.sleep(0.01)
            async with batch.paused(in_flight, weight_version=2) as report:
                assert (report.in_flight, report.aborted, report.finished) == (0, *counts)
                assert batch.is_paused
                await progress.until(lambda rollout: rollout.record.stage == "paused")
            result: BatchResult = await running
            assert len(server.log) == (6 if in_flight == "abort" else 4)
            return result

    result = run(body())
    for record in result.records:
        assert (record.outcome, record.reward, record.pauses["count"]) == (Outcome.OK, 1.0, 1)
        assert record.weight_version == "1"
        calls = store.calls(record.rollout_id)
        assert [(call.admitted_version, call.weight_version) for call in calls] == [("1", "1"), ("2", "2")]
        assert all(call.trainable for call in calls)


def test_a_pause_is_not_the_agents_time(store: Store) -> None:
    """The pause is longer than all that the agent has, and longer than a call may stall."""

    async def body() -> BatchResult:
        timeouts = RolloutTimeouts(install=20, sandbox=20, setup=10, agent=6, verifier=10, model_call=3)
        task = a_task(timeouts=timeouts)
        async with a_batch(store, task=task, stall_timeout=2) as (batch, progress, _):
            await batch.pause()
            running = asyncio.create_task(batch.run())
            await progress.until(lambda rollout: rollout.record.stage == "paused")
            await asyncio.sleep(6.5)
            batch.resume(2)
            return await running

    (record,) = run(body()).records
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)
    assert record.pauses["count"] == 1
    assert record.pauses["seconds"] >= 6.5
    assert store.calls(record.rollout_id)[0].paused_seconds >= 6.5


def test_an_agent_that_hangs_is_stopped_although_there_was_a_pause(store: Store) -> None:
    async def body() -> BatchResult:
        timeouts = RolloutTimeouts(install=20, sandbox=20, setup=10, agent=3, verifier=10)
        task = a_task(timeouts=timeouts)
        async with a_batch(store, task=task, agent=speaker("converse(); import time; time.sleep(60)")) as parts:
            batch, progress, _ = parts
            await batch.pause()
            running = asyncio.create_task(batch.run())
            await progress.until(lambda rollout: rollout.record.stage == "paused")
            await asyncio.sleep(0.5)
            batch.resume()
            return await running

    (record,) = run(body()).records
    assert (record.outcome, record.reward) == (Outcome.TIMEOUT, 1.0)
    assert 3.4 <= record.stages["agent"] < 20


def test_a_pause_that_is_too_long_ends_the_rollout_with_its_reason(store: Store) -> None:
    async def body() -> BatchResult:
        async with a_batch(store, pause_timeout=0.2) as (batch, _, server):
            await batch.pause()
            result: BatchResult = await batch.run()
            assert server.log == []
            return result

    (record,) = run(body()).records
    assert (record.outcome, record.reward) == (Outcome.MODEL, None)
    assert record.error == "the model was paused for longer than 0.2 s"
    assert record.pauses["count"] == 1


@pytest.mark.parametrize("way", ["cancel", "abort"])
def test_a_batch_ends_at_once_in_a_pause(store: Store, way: str) -> None:
    async def body() -> None:
        async with a_batch(store) as (batch, progress, _):
            await batch.pause()
            running = asyncio.create_task(batch.run())
            await progress.until(lambda rollout: rollout.record.stage == "paused")
            began = time.monotonic()
            if way == "cancel":
                running.cancel()
            else:
                for rollout in progress.rollouts.values():
                    await rollout.abort("enough")
            await asyncio.gather(running, return_exceptions=True)
            assert time.monotonic() - began < 8

    run(body())
    (record,) = store.list()
    assert record.outcome is Outcome.CANCELLED
    assert record.stage == "done"


def test_a_block_that_fails_resumes_with_the_old_version(store: Store) -> None:
    async def body() -> None:
        async with a_batch(store) as (batch, _, _server):
            with pytest.raises(ValueError, match="broken"):
                async with batch.paused(weight_version=2):
                    raise ValueError("broken")
            assert not batch.is_paused
            assert batch.context.weights.current() == "1"

    run(body())
