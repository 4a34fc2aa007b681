"""Short jobs run in batches; nothing is lost, and nothing waits for a job that hangs."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paddock.server.fastpath import threads as fastpath_threads
from paddock.server.fastpath.threads import (
    LATE_SECONDS,
    MAX_BATCH_ANSWERS,
    MAX_HELD_SECONDS,
    SAMPLE_EVERY,
    SMOOTHING,
    BatchedCompletions,
    BatchingPool,
    JobLength,
    Relay,
    RelayThread,
    SelfAnsweringJob,
)
from paddock.sessions.threads import FunctionJob
from sessions.conftest import until

pytestmark = pytest.mark.anyio


def pool_of(limit: int) -> BatchingPool:
    return BatchingPool(limit, BatchedCompletions())


def job(function: Callable[[], Any], ended: list[Any]) -> FunctionJob:
    return FunctionJob(function, lambda value, error: ended.append(error or value))


async def test_short_jobs_of_one_turn_share_a_thread() -> None:
    threads, names = pool_of(64), list[str]()
    for turn in range(50):
        for _ in range(20):
            threads.submit(job(lambda: names.append(threading.current_thread().name), []))
        await until(lambda turn=turn: len(names) == 20 * (turn + 1))  # type: ignore[misc]
    # A busy machine may hold one up for long enough to bring in another.
    assert len(set(names)) < 10
    threads.close()


async def test_an_unawaited_answer_is_delivered_by_the_next_check() -> None:
    class Quiet(FunctionJob, SelfAnsweringJob):
        def is_awaited(self) -> bool:
            return False

    completions, ended = BatchedCompletions(), list[Any]()
    threads = BatchingPool(1, completions)
    threads.submit(Quiet(lambda: 1, lambda value, _: ended.append(value)))
    await asyncio.sleep(0.2)
    assert not ended
    completions.deliver()
    assert ended == [1]
    threads.close()


# -- answers that leave together ------------------------------------------------------------------


class Answering(SelfAnsweringJob):
    """Is answered by a thread, and notes when."""

    def __init__(self, function: Callable[[], Any], sent: list[Any]) -> None:
        self.call = function  # type: ignore[method-assign]
        self._sent = sent

    def send(self) -> None:
        self._sent.append(self.value)

    def is_awaited(self) -> bool:
        return False

    def finish(self) -> None:
        pass


async def test_the_answers_of_one_turn_leave_together_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine the jobs may take longer than answers are held.
    monkeypatch.setattr(fastpath_threads, "MAX_HELD_SECONDS", 60.0)
    monkeypatch.setattr(fastpath_threads, "LATE_SECONDS", 60.0)
    threads, sent = pool_of(4), list[Any]()
    after_each = []
    for number in range(5):
        threads.submit(Answering(lambda n=number: after_each.append(len(sent)) or n, sent))  # type: ignore[misc]
    await until(lambda: len(sent) == 5)
    assert sent == list(range(5))
    assert after_each == [0] * 5
    threads.close()


async def test_no_more_than_some_answers_wait_for_each_other() -> None:
    threads, sent = pool_of(1), list[Any]()
    most_held = []
    for number in range(3 * MAX_BATCH_ANSWERS):
        threads.submit(Answering(lambda n=number: most_held.append(n - len(sent)), sent))  # type: ignore[misc]
    await until(lambda: len(sent) == 3 * MAX_BATCH_ANSWERS)
    assert max(most_held) < MAX_BATCH_ANSWERS
    threads.close()


async def test_an_answer_does_not_wait_for_slow_ones() -> None:
    threads, sent = pool_of(1), list[Any]()
    held = []

    def slow() -> None:
        held.append(len(sent))
        time.sleep(2 * MAX_HELD_SECONDS)

    for _ in range(4):
        threads.submit(Answering(slow, sent))
    await until(lambda: len(sent) == 4)
    assert held == [0, 1, 2, 3]
    threads.close()


@pytest.mark.parametrize("limit", [1, 4])
async def test_an_answer_leaves_although_the_next_job_hangs(limit: int) -> None:
    threads, sent, release = pool_of(limit), list[Any](), threading.Event()
    began = time.monotonic()
    threads.submit(Answering(lambda: "quick", sent))
    threads.submit(Answering(lambda: release.wait(20), sent))
    await until(lambda: sent)
    assert sent == ["quick"]
    assert time.monotonic() - began < 1 + LATE_SECONDS
    release.set()
    await until(lambda: len(sent) == 2)
    threads.close()


# -- how long jobs are ----------------------------------------------------------------------------

QUICK = lambda: None  # noqa: E731
WAITING = lambda: time.sleep(0.003)  # noqa: E731


def sampled(length: JobLength, function: Callable[[], None], count: int) -> int:
    return sum(length.run(FunctionJob(function, lambda *_: None), number) for number in range(count))


def test_few_of_many_alike_are_sampled() -> None:
    assert sampled(JobLength(), QUICK, 20 * SAMPLE_EVERY) < 40


@pytest.mark.parametrize(("before", "now"), [(QUICK, WAITING), (WAITING, QUICK)], ids=["long", "short"])
def test_a_change_is_noticed_soon(before: Callable[[], None], now: Callable[[], None]) -> None:
    """Five milliseconds each, on the one thread that short jobs share: a hundred and more would be a standstill."""
    length, enough = JobLength(), SAMPLE_EVERY + 2 * SMOOTHING
    sampled(length, before, enough)
    assert length.is_long() is (before is WAITING)
    sampled(length, now, enough)
    assert length.is_long() is (now is WAITING)


# -- own threads ----------------------------------------------------------------------------------


def team(size: int) -> list[RelayThread]:
    relay = Relay(BatchedCompletions())
    return [RelayThread(relay) for _ in range(size)]


def disband(threads: list[RelayThread]) -> None:
    for thread in threads:
        thread.close()


async def test_every_job_runs_on_its_own_thread() -> None:
    threads, names = team(5), [set[int]() for _ in range(5)]
    for _ in range(30):
        await asyncio.gather(
            *(
                thread.call(lambda own=own: own.add(threading.get_ident()))  # type: ignore[misc]
                for thread, own in zip(threads, names, strict=True)
            )
        )
    assert [len(own) for own in names] == [1] * 5
    assert len(set.union(*names)) == 5
    disband(threads)


async def test_short_jobs_run_one_after_the_other() -> None:
    threads, inside, together = team(16), list[int](), 0
    threads[0].relay.length.is_long = lambda: False  # type: ignore[method-assign]

    def work(number: int) -> None:
        nonlocal together
        inside.append(number)
        # Lets go of the GIL, so that another thread would be seen in here if it were awake.
        time.sleep(0)
        together += len(inside) > 1
        inside.remove(number)

    for _ in range(50):
        await asyncio.gather(*(thread.call(lambda n=n: work(n)) for n, thread in enumerate(threads)))  # type: ignore[misc]
    # A busy machine may hold one up for long enough to begin the others.
    assert together < 80
    disband(threads)


async def test_jobs_that_wait_run_side_by_side() -> None:
    threads, together = team(8), threading.Barrier(8)
    for _ in range(40):
        await asyncio.gather(*(thread.call(lambda: time.sleep(0.002)) for thread in threads))
    await asyncio.wait_for(asyncio.gather(*(thread.call(lambda: together.wait(5)) for thread in threads)), 6)
    disband(threads)


async def test_a_job_that_hangs_holds_up_neither_the_others_nor_the_loop() -> None:
    threads, release, longest = team(4), threading.Event(), 0.0
    await asyncio.gather(*(thread.call(lambda: None) for thread in threads))
    hung = asyncio.create_task(threads[0].call(lambda: release.wait(20)))
    began = time.monotonic()
    for _ in range(20):
        turn = time.monotonic()
        await asyncio.gather(*(thread.call(lambda: None) for thread in threads[1:]))
        longest = max(longest, time.monotonic() - turn)
    assert time.monotonic() - began < 2
    assert longest < 0.5
    release.set()
    assert await hung
    disband(threads)


async def test_a_relay_loses_no_result_under_load() -> None:
    threads, ended, sent = team(12), list[Any](), 0
    dice = random.Random(7)
    for turn in range(200):
        for thread in dice.sample(threads, dice.randint(1, 12)):
            thread.submit(job(lambda n=sent: n, ended))  # type: ignore[misc]
            sent += 1
        if turn % 3:
            await asyncio.sleep(0)
        if turn == 150:
            disband([threads.pop() for _ in range(11)])
            threads *= 12
    await until(lambda: len(ended) == sent)
    assert sorted(ended) == list(range(sent))
    threads[0].close()


async def test_a_thread_alone_keeps_the_order() -> None:
    threads, ended = team(1), list[int]()
    for n in range(100):
        threads[0].submit(job(lambda n=n: n, ended))  # type: ignore[misc]
    await until(lambda: len(ended) == 100)
    assert ended == list(range(100))
    disband(threads)


@pytest.mark.parametrize("size", [1, 3])
async def test_a_relay_returns_whatever_is_raised(size: int) -> None:
    threads = team(size)

    def fail() -> None:
        raise SystemExit(2)

    with pytest.raises(RuntimeError, match="SystemExit"):
        await threads[0].call(fail)
    assert await threads[0].call(lambda: "alive") == "alive"
    disband(threads)


async def test_threads_end_when_closed_and_still_do_what_comes_late() -> None:
    threads = team(3)
    alive = await asyncio.gather(*(thread.call(threading.current_thread) for thread in threads))
    assert len(set(alive)) == 3
    disband(threads)
    await until(lambda: not any(thread.is_alive() for thread in alive))
    late = await asyncio.wait_for(threads[0].call(threading.current_thread), 2)
    await until(lambda: not late.is_alive())


@pytest.mark.parametrize("size", [1, 3])
async def test_a_thread_that_cannot_be_started_is_reported(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = team(size)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            await asyncio.wait_for(threads[0].call(lambda: 1), 2)
    assert await asyncio.wait_for(threads[0].call(lambda: 1), 2) == 1
    disband(threads)


async def test_a_thread_that_finds_its_own_next_job_begins_that_alone() -> None:
    threads, begun = team(3), list[int]()
    relay = threads[0].relay
    for n, thread in enumerate(threads):
        thread.begin = lambda _, n=n: begun.append(n)  # type: ignore[method-assign, misc]
    relay._runner = threads[0]
    relay.waiting.extend((thread, job(lambda: None, [])) for thread in (threads[0], threads[1]))
    relay.start_next(threads[0])
    assert begun == [0]
    disband(threads)


async def test_what_takes_long_to_build_can_still_be_quick_to_step() -> None:
    relay = Relay(BatchedCompletions())
    for _ in range(40):
        thread = RelayThread(relay)
        await thread.call(lambda: time.sleep(0.002))
        for _ in range(6):
            await thread.call(lambda: None)
        thread.close()
    assert not relay.length.is_long()
