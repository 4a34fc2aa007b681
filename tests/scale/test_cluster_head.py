"""The head of a cluster, as far as one clock, one answer at a time and no Ray can tell."""

import asyncio
import logging
import socket
import threading
from pathlib import Path

import pytest

from paddock.config import RAY_RECONNECT_SECONDS
from paddock.errors import ClusterError
from paddock.scale import cluster
from paddock.scale.cluster import ClusterHead, call_ray, is_listening, max_absence_seconds

pytestmark = pytest.mark.anyio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Clock:
    return Clock()


@pytest.fixture
def head(time: Clock) -> ClusterHead:
    return ClusterHead("head:6379", lambda: "there", max_absence=40.0, clock=time)


def test_a_head_that_comes_back_in_time_is_no_loss(
    head: ClusterHead, time: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    head.record("away")
    time.now = 39.0
    head.record("away")
    assert (head.is_reachable, head.failure) == (False, None)
    assert head.describe() == {"address": "head:6379", "away_seconds": 39.0}
    head.record("there")
    assert head.is_reachable
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "head:6379 does not answer" in caplog.text


def test_a_head_that_stays_away_is_given_up_by_name(head: ClusterHead, time: Clock) -> None:
    head.record("away")
    time.now = 40.0
    head.record("away")
    assert not head.is_reachable
    assert str(head.failure) == "the Ray head at head:6379 has not answered for 40 s"
    assert head.failure is not None
    assert "ray start" in str(head.failure.hint)


@pytest.mark.parametrize(("seen", "words"), [("forgot", "was started anew"), ("cut off", "node that this process")])
def test_what_no_waiting_mends_is_given_up_at_once(head: ClusterHead, seen: cluster.HeadState, words: str) -> None:
    head.record(seen)
    assert words in str(head.failure)
    assert "head:6379" in str(head.failure)


async def test_a_block_whose_head_is_given_up_is_cancelled_and_says_why() -> None:
    cleaned = []

    async def work() -> None:
        async with ClusterHead("head:6379", lambda: "forgot").cancel_on_failure():
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(True)

    with pytest.raises(ClusterError, match="started anew"):
        await work()
    assert cleaned == [True]
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_a_block_that_is_cancelled_by_others_is_just_cancelled(head: ClusterHead) -> None:
    async def work() -> None:
        async with head.cancel_on_failure():
            await asyncio.sleep(60)

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0.05)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_waiters_see_a_loss_and_a_return(head: ClusterHead) -> None:
    gone = asyncio.ensure_future(head.wait_for_change())
    await asyncio.sleep(0)
    head.record("there")
    await asyncio.sleep(0)
    assert not gone.done()
    head.record("away")
    await asyncio.wait_for(gone, 5)
    back = asyncio.ensure_future(head.wait_for_change())
    await asyncio.sleep(0)
    head.record("there")
    await asyncio.wait_for(back, 5)


async def test_a_call_that_does_not_return_blocks_no_other() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        await call_ray(release.wait, 0.05)
    release.set()
    assert await call_ray(lambda: 42, 10) == 42
    with pytest.raises(ValueError, match="no"):
        await call_ray(lambda: int("no"), 10)


def test_a_socket_without_its_process_is_known(tmp_path: Path) -> None:
    place = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        assert is_listening(place)
    assert Path(place).exists()
    assert not is_listening(place)


def test_we_give_up_before_ray_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_absence_seconds() == pytest.approx(40.0)
    for waits, max_absence in (("30", 10.0), ("6", 2.0)):
        monkeypatch.setenv(RAY_RECONNECT_SECONDS.name, waits)
        assert max_absence_seconds() == pytest.approx(max_absence)
