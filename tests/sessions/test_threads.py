"""Threads: bounded, without starving anybody, results delivered on the loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paddock.server.fastpath.threads import BatchedCompletions, BatchingPool
from paddock.sessions.threads import Completions, FunctionJob, ThreadPool

from .conftest import until

pytestmark = pytest.mark.anyio
MakePool = Callable[[int], ThreadPool]


@pytest.fixture(params=["plain", "batching"])
def pool_of(request: pytest.FixtureRequest) -> MakePool:
    """Makes pools of both kinds: what holds for the plain one holds for the fast one."""
    if request.param == "plain":
        return lambda limit: ThreadPool(limit, Completions())
    return lambda limit: BatchingPool(limit, BatchedCompletions())


def job(function: Callable[[], Any], ended: list[Any]) -> FunctionJob:
    return FunctionJob(function, lambda value, error: ended.append(error or value))


async def test_a_call_returns_its_value(pool_of: MakePool) -> None:
    threads = pool_of(2)
    assert await threads.call(lambda: 3) == 3
    threads.close()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(2), GeneratorExit(), KeyboardInterrupt()])
async def test_whatever_is_raised_comes_back(pool_of: MakePool, error: BaseException) -> None:
    threads = pool_of(1)

    def fail() -> None:
        raise error

    with pytest.raises(Exception, match=r"no|SystemExit|GeneratorExit|KeyboardInterrupt"):
        await threads.call(fail)
    assert await threads.call(lambda: "alive") == "alive"
    threads.close()


async def test_results_arrive_on_the_loop(pool_of: MakePool) -> None:
    threads, seen = pool_of(4), []
    own = threading.current_thread()
    for _ in range(20):
        threads.submit(FunctionJob(lambda: None, lambda _v, _x: seen.append(threading.current_thread())))
    await until(lambda: len(seen) == 20)
    assert set(seen) == {own}
    threads.close()


async def test_no_result_is_lost_under_load(pool_of: MakePool) -> None:
    threads, ended = pool_of(8), []
    for n in range(5000):
        threads.submit(job(lambda n=n: n, ended))  # type: ignore[misc]
    await until(lambda: len(ended) == 5000)
    assert sorted(ended) == list(range(5000))
    threads.close()


async def test_threads_are_made_only_when_needed(pool_of: MakePool) -> None:
    threads = pool_of(16)
    for _ in range(20):
        await threads.call(lambda: None)
    # A thread may not wait again yet when the next call comes.
    assert threads.count <= 4
    threads.close()


async def test_jobs_run_side_by_side_up_to_the_bound(pool_of: MakePool) -> None:
    threads, ended = pool_of(3), []
    inside, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1

    for _ in range(9):
        threads.submit(job(work, ended))
    async with asyncio.timeout(5):
        while len(ended) < 9:
            threads.compensate()
            await asyncio.sleep(0.01)
    assert most == 3
    threads.close()


async def test_a_job_that_overstays_is_made_up_for(pool_of: MakePool) -> None:
    threads, ended, release = pool_of(1), [], threading.Event()
    threads.submit(job(lambda: release.wait(10), ended))
    threads.submit(job(lambda: "second", ended))
    async with asyncio.timeout(5):
        while "second" not in ended:
            threads.compensate()
            await asyncio.sleep(0.02)
    release.set()
    await until(lambda: len(ended) == 2)
    await threads.call(lambda: None)
    await until(lambda: threads.count == 1)
    threads.close()


async def test_closing_ends_every_idle_thread(pool_of: MakePool) -> None:
    before = threading.active_count()
    threads, ended = pool_of(4), []
    for _ in range(4):
        threads.submit(job(lambda: time.sleep(0.01), ended))
    await until(lambda: len(ended) == 4)
    threads.close()
    await until(lambda: threading.active_count() <= before)


async def test_a_job_handed_in_after_closing_is_still_done(pool_of: MakePool) -> None:
    threads = pool_of(2)
    await threads.call(lambda: None)
    threads.close()
    assert await asyncio.wait_for(threads.call(lambda: "late"), 2) == "late"


async def test_cancelling_a_call_does_not_affect_the_next(pool_of: MakePool) -> None:
    threads, release = pool_of(1), threading.Event()
    call = asyncio.create_task(threads.call(lambda: release.wait(5)))
    await asyncio.sleep(0.02)
    call.cancel()
    release.set()
    assert await asyncio.wait_for(threads.call(lambda: 1), 2) == 1
    threads.close()


async def test_short_jobs_do_not_wait_behind_a_long_one(pool_of: MakePool) -> None:
    threads, ended, release = pool_of(8), [], threading.Event()
    for n in range(100):
        threads.submit(job(lambda n=n: n, ended))  # type: ignore[misc]
    await until(lambda: len(ended) == 100)
    threads.submit(job(lambda: release.wait(20), ended))
    for n in range(20):
        threads.submit(job(lambda n=n: n, ended))  # type: ignore[misc]
    await until(lambda: len(ended) == 120)
    assert not release.is_set()
    release.set()
    await until(lambda: len(ended) == 121)
    threads.close()


async def test_jobs_that_wait_have_a_thread_each(pool_of: MakePool) -> None:
    threads, ended = pool_of(16), []
    for _ in range(20):
        threads.submit(job(lambda: time.sleep(0.01), ended))
    await until(lambda: len(ended) == 20)
    together = threading.Barrier(16)
    for _ in range(16):
        threads.submit(job(lambda: together.wait(5), ended))
    await until(lambda: len(ended) == 36)
    assert all(isinstance(value, int) for value in ended[20:])
    threads.close()


class Refusing:
    """A system that grants threads while `grants` lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, grants: int) -> None:
        self.grants, start = grants, threading.Thread.start

        def granted(thread: threading.Thread) -> None:
            if self.grants <= 0:
                raise RuntimeError("can't start new thread")
            self.grants -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", granted)


async def test_without_any_thread_a_call_fails_and_the_next_may_succeed(
    pool_of: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, threads = Refusing(monkeypatch, 0), pool_of(2)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="start new thread"):
            await asyncio.wait_for(threads.call(lambda: 3), 5)
    assert threads.count == 0
    system.grants = 1
    assert await asyncio.wait_for(threads.call(lambda: 3), 5) == 3
    threads.close()


async def test_the_threads_that_there_are_do_the_work_of_those_that_cannot_be_had(
    pool_of: MakePool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Refusing(monkeypatch, 1)
    threads = pool_of(4)
    for _ in range(3):
        slow = [asyncio.ensure_future(threads.call(lambda: time.sleep(0.02))) for _ in range(4)]
        await asyncio.wait_for(asyncio.gather(*slow), 5)
    assert threads.count == 1
    assert await asyncio.wait_for(threads.call(lambda: 3), 5) == 3
    threads.close()


async def test_hung_jobs_hold_up_only_the_first_that_comes_behind_them(pool_of: MakePool) -> None:
    threads, release = pool_of(2), threading.Event()
    for _ in range(2):
        threads.submit(job(lambda: release.wait(20), []))
    first = asyncio.create_task(threads.call(lambda: 1))
    while not first.done():
        await asyncio.sleep(0.05)
        threads.compensate()
    began = time.monotonic()
    for _ in range(20):
        assert await asyncio.wait_for(threads.call(lambda: 2), 2) == 2
    assert time.monotonic() - began < 1
    release.set()
    threads.close()


async def test_a_function_that_runs_out_of_items_comes_back_as_an_error(pool_of: MakePool) -> None:
    threads = pool_of(1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(threads.call(lambda: next(iter(()))), 2)
    threads.close()
