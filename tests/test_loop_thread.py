"""The event loop on a thread: calls, closing, forgetting to close, forking."""

import asyncio
import concurrent.futures
import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from paddock.errors import ClientError
from paddock.loop_thread import COLLECTED_SECONDS, LoopThread, RunningLoop
from running import wait_until

T = TypeVar("T")
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


async def double(value: int) -> int:
    await asyncio.sleep(0)
    return 2 * value


def test_calls_return_and_raise() -> None:
    thread = LoopThread()
    assert thread.call(double, 4) == 8
    with pytest.raises(TypeError):
        thread.call(double, object())
    thread.close()


def test_keywords_of_any_name_reach_the_function() -> None:
    async def keywords(**arguments: Any) -> dict[str, Any]:
        return arguments

    thread = LoopThread()
    assert thread.call(keywords, function=1, self=2) == {"function": 1, "self": 2}
    thread.close()


def test_a_closed_thread_may_be_used_again() -> None:
    thread = LoopThread()
    for _ in range(2):
        thread.call(double, 1)
        thread.close()


def test_the_cleanup_runs_on_the_loop_once() -> None:
    threads: list[threading.Thread] = []

    async def cleanup() -> None:
        threads.append(threading.current_thread())

    thread = LoopThread("named", cleanup=cleanup)
    thread.call(double, 1)
    thread.close()
    thread.close()
    assert [each.name for each in threads] == ["named"]


@pytest.mark.parametrize("delay", [0, 0.2], ids=["while the cleanup runs", "after the cleanup"])
def test_an_owner_that_never_closed_is_cleaned_up(monkeypatch: pytest.MonkeyPatch, delay: float) -> None:
    threads: list[threading.Thread] = []

    async def cleanup() -> None:
        threads.append(threading.current_thread())

    thread = LoopThread(cleanup=cleanup)
    thread.call(double, 1)
    submit = RunningLoop.submit

    def submit_and_sleep(self: RunningLoop, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        future = submit(self, work)
        time.sleep(delay)
        return future

    monkeypatch.setattr(RunningLoop, "submit", submit_and_sleep)
    del thread
    gc.collect()
    wait_until(lambda: len(threads) == 1)
    threads[0].join(COLLECTED_SECONDS)
    assert not threads[0].is_alive()


def test_closing_ends_the_calls_of_other_threads() -> None:
    thread = LoopThread()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            thread.call(asyncio.sleep, 60)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: thread._running is not None)
    time.sleep(0.05)
    thread.close()
    waiting.join(5)
    assert [type(error) for error in errors] == [ClientError]


def in_child(work: Callable[[], Any]) -> str:
    """What `work` raises in a forked child, within a few seconds."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child() -> None:
        try:
            work()
            sender.send("no error")
        except BaseException as error:
            sender.send(f"{type(error).__name__}: {error}")
        os._exit(0)

    process = FORK.Process(target=child)
    process.start()
    try:
        return str(receiver.recv()) if receiver.poll(8) else "it hangs"
    finally:
        process.kill()
        process.join()


def test_a_forked_child_is_refused_at_once() -> None:
    thread = LoopThread()
    thread.call(double, 1)
    assert "ClientError: the client was opened in another process" in in_child(lambda: thread.call(double, 1))
    assert in_child(thread.close) == "no error"
    thread.call(double, 1)
    thread.close()
