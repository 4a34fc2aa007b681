"""The clock that stands still in pauses."""

import asyncio
import time

import pytest

from capture.harness import run
from paddock.capture.paused_time import AgentDeadline, PausedTime, merge


def test_overlapping_times_count_once() -> None:
    assert merge([(5, 6), (1, 3), (2, 4), (4, 4.5)]) == [(1, 4.5), (5, 6)]


def test_the_clock_stands_still_while_a_call_waits() -> None:
    changes: list[bool] = []
    paused = PausedTime(lambda: changes.append(paused.is_paused))
    now = time.monotonic()
    with paused.hold(now - 10), paused.hold(now - 5):
        assert paused.working_time(now) == pytest.approx(now - 10)
        assert paused.working_time(now - 20) == now - 20
    assert paused.count == 1
    assert paused.seconds == pytest.approx(10, abs=1)
    assert changes == [True, False]


def test_a_deadline_waits_for_the_end_of_a_pause() -> None:
    async def body() -> None:
        paused = PausedTime()
        deadline = AgentDeadline(time.monotonic(), 0.1, paused)
        with paused.hold(time.monotonic()):
            waiting = asyncio.create_task(deadline.wait())
            await asyncio.sleep(0.3)
            assert not waiting.done()
        await waiting
        assert deadline.seconds_left == 0.0
        with pytest.raises(TimeoutError):
            async with deadline.limit():
                await asyncio.sleep(10)

    run(body())
