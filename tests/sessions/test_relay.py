"""Threads of their own: one at a time while jobs are short, side by side where they wait, nothing lost."""

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paddock.sessions.jobs import Call, Returns
from paddock.sessions.relay import OwnThread, Relay

from .conftest import until

pytestmark = pytest.mark.anyio


def team(size: int) -> list[OwnThread]:
    relay = Relay(Returns())
    return [OwnThread(relay) for _ in range(size)]


def disband(threads: list[OwnThread]) -> None:
    for thread in threads:
        thread.close()


def job(function: Callable[[], Any], ended: list[Any]) -> Call:
    return Call(function, lambda value, error: ended.append(error or value))


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
    threads[0]._relay.pace.is_long = lambda: False  # type: ignore[method-assign]

    def work(number: int) -> None:
        nonlocal together
        inside.append(number)
        # Lets go of the interpreter's lock, so that another thread would be seen in here if it were awake.
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


async def test_no_result_is_lost_under_load() -> None:
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
async def test_whatever_is_raised_comes_back(size: int) -> None:
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
async def test_a_thread_that_cannot_be_started_is_told(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    relay = threads[0]._relay
    for n, thread in enumerate(threads):
        thread.begin = lambda _, n=n: begun.append(n)  # type: ignore[method-assign, misc]
    relay._carrier = threads[0]
    relay.waiting.extend((thread, job(lambda: None, [])) for thread in (threads[0], threads[1]))
    relay.pass_on(threads[0])
    assert begun == [0]
    disband(threads)


async def test_what_takes_long_to_build_can_still_be_quick_to_step() -> None:
    relay = Relay(Returns())
    for _ in range(40):
        thread = OwnThread(relay)
        await thread.call(lambda: time.sleep(0.002))
        for _ in range(6):
            await thread.call(lambda: None)
        thread.close()
    assert not relay.pace.is_long()
