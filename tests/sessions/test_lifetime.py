"""Reaping, closing and draining: every environment is closed exactly once (the `harness` fixture checks it)."""

import asyncio
import threading
import time
from typing import Any

import pytest

from environments import Add, Adder, AsyncScripted, InlineAdder, Script, Scripted, Watched
from paddock.errors import (
    CapacityReached,
    FactoryError,
    ServerDraining,
    SessionClosed,
    SessionNotFound,
    StepCancelled,
    StepTimeout,
)
from paddock.protocol.episode import GetState, Reset, Step
from paddock.sessions.session import Origin

from .conftest import settled, until

pytestmark = pytest.mark.anyio


class Connection:
    def is_blocked(self, work: object) -> bool:
        return False

    def __init__(self) -> None:
        self.told: list[Exception] = []
        self.frames: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)

    def on_session_closed(self, error: Exception) -> None:
        self.told.append(error)


# -- reaping --------------------------------------------------------------------------------------


async def test_an_idle_session_is_closed_after_its_time(harness: Any) -> None:
    one = harness(Adder, session_timeout=100)
    session = await one.manager.open(Origin.CREATED)
    await one.pass_time(99)
    assert not session.closed
    await one.pass_time(2)
    assert session.closed
    with pytest.raises(SessionNotFound):
        one.manager.find(session.token)


async def test_half_an_hour_is_the_default(harness: Any) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.CREATED)
    await one.pass_time(1799)
    assert not session.closed
    await one.pass_time(2)
    assert session.closed


async def test_without_a_timeout_nothing_is_reaped(harness: Any) -> None:
    one = harness(Adder, session_timeout=None)
    session = await one.manager.open(Origin.CREATED)
    await one.pass_time(1_000_000)
    assert not session.closed


@pytest.mark.parametrize("request_", [Reset(), Step(Add(amount=1)), GetState()])
async def test_every_request_keeps_a_session_alive(harness: Any, request_: Any) -> None:
    one = harness(Adder, session_timeout=100)
    session = await one.manager.open(Origin.CREATED)
    for _ in range(3):
        await one.pass_time(60)
        await one.execute(session, request_)
    assert not session.closed


async def test_a_session_with_a_socket_is_never_reaped(harness: Any) -> None:
    one = harness(Adder, session_timeout=100)
    session = await one.manager.open(Origin.SOCKET)
    session.attach(Connection())
    await one.pass_time(10_000)
    assert not session.closed


@pytest.mark.parametrize("make", [Scripted, AsyncScripted])
async def test_a_session_is_never_reaped_during_a_step(harness: Any, make: Any, lives: list[Watched]) -> None:
    one = harness(make, session_timeout=100, step_timeout=None)
    session = await one.manager.open(Origin.CREATED)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.pass_time(10_000)
    assert not session.closed
    step.cancel()
    lives[0].release.set()
    await until(lambda: not session.is_running)


async def test_a_session_whose_step_was_given_up_is_reaped_in_its_time(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, session_timeout=100, step_timeout=500)
    session = await one.manager.open(Origin.CREATED)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.pass_time(501)
    with pytest.raises(StepTimeout):
        await step
    await one.pass_time(99)
    assert not session.closed
    await one.pass_time(2)
    assert session.closed
    assert lives[0].closes == 0
    lives[0].release.set()
    await session.ended


async def test_the_time_counts_from_the_end_of_a_step(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, session_timeout=100, step_timeout=None)
    session = await one.manager.open(Origin.CREATED)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.pass_time(10_000)
    lives[0].release.set()
    await step
    await one.pass_time(99)
    assert not session.closed


async def test_a_dropped_session_is_kept_for_the_resume_window(harness: Any) -> None:
    one = harness(Adder, resume_window=60)
    session, connection = await one.manager.open(Origin.SOCKET), Connection()
    session.attach(connection)
    session.detach(connection, dropped=True)
    await one.pass_time(59)
    assert not session.closed
    await one.pass_time(2)
    assert session.closed


async def test_a_session_that_was_resumed_is_kept(harness: Any) -> None:
    one = harness(Adder, resume_window=60)
    session, connection = await one.manager.open(Origin.SOCKET), Connection()
    session.attach(connection)
    session.detach(connection, dropped=True)
    await one.pass_time(50)
    session.attach(Connection())
    await one.pass_time(50)
    assert not session.closed


async def test_an_http_episode_that_is_not_continued_is_reaped_early(harness: Any) -> None:
    one = harness(Adder, resume_window=60)
    tentative, real = await one.manager.open(Origin.HTTP), await one.manager.open(Origin.HTTP)
    real.was_continued = True
    await one.pass_time(61)
    assert (tentative.closed, real.closed) == (True, False)


# -- closing --------------------------------------------------------------------------------------


async def test_a_closed_session_notifies_its_connection(harness: Any) -> None:
    one = harness(Adder)
    session, connection = await one.manager.open(Origin.SOCKET), Connection()
    session.attach(connection)
    session.close("test")
    assert isinstance(connection.told[0], SessionClosed)
    assert session.attachment is None


async def test_a_closed_session_takes_no_requests(harness: Any) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.SOCKET)
    session.close("test")
    with pytest.raises(SessionClosed):
        await one.execute(session, Step(Add(amount=1)))


async def test_double_close_closes_once(harness: Any, lives: list[Watched]) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.SOCKET)
    session.close("test")
    session.close("again")
    await session.ended
    session.close("and again")
    assert lives[0].closes == 1


async def test_closing_answers_everybody_who_waits(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted)
    session = await one.manager.open(Origin.SOCKET)
    asks = [asyncio.create_task(one.execute(session, Step(Script(hang=True)))) for _ in range(3)]
    await until(lambda: lives[0].steps)
    session.close("test")
    answers = await asyncio.gather(*asks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [SessionClosed] * 3


async def test_a_thread_step_ends_before_its_environment_is_closed(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    session.close("test")
    with pytest.raises(SessionClosed):
        await step
    assert lives[0].closes == 0
    lives[0].release.set()
    await session.ended
    assert lives[0].closes == 1


async def test_the_slot_of_a_hung_step_is_free_at_once(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, max_sessions=1)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    session.close("test")
    assert await one.manager.open(Origin.SOCKET)
    with pytest.raises(SessionClosed):
        await step


async def test_an_async_step_is_cancelled_by_close(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    session.close("test")
    await asyncio.wait_for(session.ended, 1)
    assert (lives[0].cancelled, lives[0].closes) == (1, 1)
    with pytest.raises(SessionClosed):
        await step


async def test_an_async_close_is_awaited(harness: Any, lives: list[Watched]) -> None:
    class AsyncClose(Adder):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0.01)
            super().close()

    one = harness(AsyncClose)
    session = await one.manager.open(Origin.SOCKET)
    session.close("test")
    await session.ended
    assert lives[0].closes == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1), KeyboardInterrupt()])
async def test_a_close_that_fails_still_ends_the_session(harness: Any, error: BaseException) -> None:
    class Bad(Adder):
        def close(self) -> None:
            super().close()
            raise error

    one = harness(Bad)
    session = await one.manager.open(Origin.SOCKET)
    session.close("test")
    await asyncio.wait_for(session.ended, 1)
    assert one.manager.slots.in_use() == 0


async def test_a_slow_close_does_not_hold_the_loop(harness: Any) -> None:
    class Slow(Adder):
        def close(self) -> None:
            time.sleep(0.3)
            super().close()

    one = harness(Slow)
    session = await one.manager.open(Origin.SOCKET)
    started = time.monotonic()
    session.close("test")
    await settled()
    assert time.monotonic() - started < 0.1


async def test_a_build_without_a_waiting_client_is_closed(harness: Any, lives: list[Watched]) -> None:
    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.1)
            super().__init__()

    one = harness(Slow, max_sessions=1)
    opening = asyncio.create_task(one.manager.open(Origin.SOCKET))
    await asyncio.sleep(0.02)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await until(lambda: lives and lives[0].closes and one.manager.slots.in_use() == 0)


@pytest.mark.parametrize("moment", range(0, 30))
async def test_cancelling_a_build_at_any_moment_loses_nothing(
    harness: Any, lives: list[Watched], moment: int
) -> None:
    one = harness(Adder, max_sessions=1)
    opening = asyncio.create_task(one.manager.open(Origin.SOCKET))
    for _ in range(moment):
        await asyncio.sleep(0)
    if moment > 20:
        await until(lambda: lives)
    opening.cancel()
    answer = (await asyncio.gather(opening, return_exceptions=True))[0]
    if not isinstance(answer, BaseException):
        answer.close("test")
    await until(lambda: all(life.closes for life in lives) and one.manager.slots.in_use() == 0)


async def test_a_build_over_its_deadline_is_closed_when_it_comes(harness: Any, lives: list[Watched]) -> None:
    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.2)
            super().__init__()

    one = harness(Slow, step_timeout=0.05)
    with pytest.raises(FactoryError):
        await one.manager.open(Origin.SOCKET)
    await until(lambda: lives and lives[0].closes)


@pytest.mark.parametrize("error", [RuntimeError("password=hunter2"), SystemExit(1), KeyboardInterrupt()])
async def test_a_factory_that_raises_is_a_factory_error(harness: Any, error: BaseException) -> None:
    class Broken(Adder):
        def __init__(self) -> None:
            raise error

    one = harness(Broken)
    with pytest.raises(FactoryError, match="Environment factory 'Broken' failed") as failure:
        await one.manager.open(Origin.SOCKET)
    assert "hunter2" not in failure.value.message
    assert failure.value.data["factory_name"] == "Broken"
    assert one.manager.builds_ok is False


async def test_a_borrowed_session_is_closed_after_its_call(harness: Any, lives: list[Watched]) -> None:
    one = harness(Adder, max_sessions=1)
    async with one.manager.borrow() as session:
        await one.execute(session, Step(Add(amount=3)))
        assert one.manager.slots.in_use() == 0
    await session.ended
    assert lives[0].closes == 1


# -- cancelling -----------------------------------------------------------------------------------


async def test_cancelling_a_caller_cancels_its_async_step(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    step.cancel()
    await until(lambda: not session.is_running)
    assert lives[0].cancelled == 1
    assert (await one.execute(session, Step(Script(value=1)))).value == 1


async def test_cancelling_by_number_reaches_only_that_request(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted)
    session = await one.manager.open(Origin.SOCKET)
    running = asyncio.create_task(one.execute(session, Step(Script(sleep=0.05, value=1)), number=1))
    waiting = [asyncio.create_task(one.execute(session, Step(Script(value=n)), number=n)) for n in (2, 3)]
    await until(lambda: lives[0].steps)
    session.cancel(2)
    answers = await asyncio.gather(running, *waiting, return_exceptions=True)
    assert isinstance(answers[1], StepCancelled)
    assert (answers[0].value, answers[2].value) == (1, 3)
    assert lives[0].steps == 2


async def test_cancelling_an_unknown_number_does_nothing(harness: Any) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.SOCKET)
    session.cancel(99)
    assert (await one.execute(session, Step(Add(amount=1)))).total == 1


async def test_a_step_that_swallows_its_cancellation_does_not_block_for_ever(
    harness: Any, lives: list[Watched]
) -> None:
    class Stubborn(AsyncScripted):
        async def step(self, action: Script) -> Any:
            self.noted()
            while not self.release.is_set():
                try:
                    await asyncio.sleep(0.01)
                except asyncio.CancelledError:
                    self.cancelled += 1
            return await super().step(Script())

    one = harness(Stubborn)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script()), number=1))
    await until(lambda: lives[0].steps)
    session.cancel(1)
    with pytest.raises(StepCancelled):
        await step
    lives[0].release.set()
    await until(lambda: not session.is_running)
    assert lives[0].cancelled == 1


# -- draining -------------------------------------------------------------------------------------


async def test_a_draining_server_refuses_new_clients(harness: Any) -> None:
    one = harness(Adder)
    await one.drain(1)
    with pytest.raises(ServerDraining):
        await one.manager.open(Origin.SOCKET)


async def test_a_running_step_finishes_within_the_grace(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(sleep=0.1, value="done"))))
    await until(lambda: lives[0].steps)
    await one.drain(5)
    assert (await step).value == "done"
    assert lives[0].closes == 1


async def test_a_step_over_the_grace_is_cancelled(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.drain(0.1)
    with pytest.raises(SessionClosed):
        await step
    assert (lives[0].cancelled, lives[0].closes) == (1, 1)


async def test_a_hung_thread_does_not_keep_the_server_up(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    started = time.monotonic()
    await one.drain(0.1)
    assert time.monotonic() - started < 3
    assert lives[0].closes == 1
    with pytest.raises(SessionClosed):
        await step


async def test_draining_closes_idle_and_detached_sessions(harness: Any, lives: list[Watched]) -> None:
    one = harness(InlineAdder)
    for origin in Origin:
        await one.manager.open(origin)
    await one.drain(1)
    assert [life.closes for life in lives] == [1] * 4


async def test_draining_ends_the_queue(harness: Any, lives: list[Watched]) -> None:
    one = harness(Adder, max_sessions=1)
    await one.manager.open(Origin.SOCKET)
    waiting = asyncio.create_task(one.manager.open(Origin.SOCKET, wait=60))
    await settled()
    await one.drain(1)
    with pytest.raises(ServerDraining):
        await asyncio.wait_for(waiting, 1)
    assert len(lives) == 1


async def test_draining_waits_for_an_environment_that_is_being_built(harness: Any, lives: list[Watched]) -> None:
    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.2)
            super().__init__()

    one = harness(Slow)
    opening = asyncio.create_task(one.manager.open(Origin.SOCKET))
    await asyncio.sleep(0.05)
    await one.drain(5)
    assert [life.closes for life in lives] == [1]
    with pytest.raises(ServerDraining):
        await opening


async def test_draining_closes_a_borrowed_environment(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted)

    async def call() -> None:
        async with one.manager.borrow() as session:
            await one.execute(session, Step(Script(hang=True)))

    step = asyncio.create_task(call())
    await until(lambda: lives and lives[0].steps)
    await one.drain(0.1)
    assert lives[0].closes == 1
    with pytest.raises(SessionClosed):
        await asyncio.wait_for(step, 1)


@pytest.mark.parametrize("affinity", ["ANY", "OWN", "SHARED"])
async def test_draining_ends_the_threads(harness: Any, affinity: str) -> None:
    before = threading.active_count()
    wishes = {"thread_affine": affinity == "OWN", "REQUIRES_SINGLE_THREAD_EXECUTOR": affinity == "SHARED"}
    one = harness(type("Threaded", (Adder,), wishes))
    session = await one.manager.open(Origin.SOCKET)
    await one.execute(session, Step(Add(amount=1)))
    await one.drain(1)
    await until(lambda: threading.active_count() <= before)


async def test_a_slot_that_waits_for_a_close_is_not_lost(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    for _ in range(20):
        session = await one.manager.open(Origin.SOCKET)
        session.close("test")
        await session.ended
    assert one.manager.slots.in_use() == 0
    await one.manager.open(Origin.SOCKET)
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)
