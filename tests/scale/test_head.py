"""The head of a cluster, as far as one clock, one answer at a time and no Ray can tell."""

import asyncio
import logging
import socket
import threading
from pathlib import Path

import pytest

from paddock.errors import ClusterError
from paddock.scale import head as heads
from paddock.scale.head import Head, in_time, listens, patience_of_ray

pytestmark = pytest.mark.anyio


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Clock:
    return Clock()


@pytest.fixture
def head(time: Clock) -> Head:
    return Head("head:6379", lambda: "there", patience=40.0, clock=time)


def test_a_head_that_comes_back_in_time_is_no_loss(head: Head, time: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    head.note("away")
    time.now = 39.0
    head.note("away")
    assert (head.is_there, head.given_up) == (False, None)
    assert head.shown() == {"address": "head:6379", "away_seconds": 39.0}
    head.note("there")
    assert head.is_there
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "head:6379 does not answer" in caplog.text


def test_a_head_that_stays_away_is_given_up_by_name(head: Head, time: Clock) -> None:
    head.note("away")
    time.now = 40.0
    head.note("away")
    assert not head.is_there
    assert str(head.given_up) == "the Ray head at head:6379 has not answered for 40 s"
    assert head.given_up is not None
    assert "ray start" in str(head.given_up.hint)


@pytest.mark.parametrize(("seen", "words"), [("forgot", "was started anew"), ("cut off", "node that this process")])
def test_what_no_waiting_mends_is_given_up_at_once(head: Head, seen: heads.Seen, words: str) -> None:
    head.note(seen)
    assert words in str(head.given_up)
    assert "head:6379" in str(head.given_up)


async def test_a_block_whose_head_is_given_up_is_cancelled_and_says_why() -> None:
    cleaned = []

    async def work() -> None:
        async with Head("head:6379", lambda: "forgot").watched():
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(True)

    with pytest.raises(ClusterError, match="started anew"):
        await work()
    assert cleaned == [True]
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_a_block_that_is_cancelled_by_others_is_just_cancelled(head: Head) -> None:
    async def work() -> None:
        async with head.watched():
            await asyncio.sleep(60)

    working = asyncio.ensure_future(work())
    await asyncio.sleep(0.05)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_whoever_waits_hears_of_a_loss_and_of_a_return(head: Head) -> None:
    gone = asyncio.ensure_future(head.change())
    await asyncio.sleep(0)
    head.note("there")
    await asyncio.sleep(0)
    assert not gone.done()
    head.note("away")
    await asyncio.wait_for(gone, 5)
    back = asyncio.ensure_future(head.change())
    await asyncio.sleep(0)
    head.note("there")
    await asyncio.wait_for(back, 5)


async def test_a_call_that_does_not_return_keeps_nobody() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError):
        await in_time(release.wait, 0.05)
    release.set()
    assert await in_time(lambda: 42, 10) == 42
    with pytest.raises(ValueError, match="no"):
        await in_time(lambda: int("no"), 10)


def test_a_socket_without_its_process_is_known(tmp_path: Path) -> None:
    place = str(tmp_path / "raylet")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        assert listens(place)
    assert Path(place).exists()
    assert not listens(place)


def test_we_give_up_before_ray_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience_of_ray() == pytest.approx(40.0)
    for waits, patience in (("30", 10.0), ("6", 2.0), ("soon", 40.0)):
        monkeypatch.setenv(heads.RAY_WAITS_NAME, waits)
        assert patience_of_ray() == pytest.approx(patience)
