import asyncio
import time
from typing import Any

import pytest

from environments import Adder, Alone, Watched, alive
from paddock.errors import CapacityReached, ConcurrencyConfigurationError, QueueTimeout
from paddock.protocol.episode import Reset, Step
from paddock.sessions.session import Origin
from paddock.sessions.spec import EnvironmentSpec

from .conftest import settled, until

pytestmark = pytest.mark.anyio


class Place:
    """A client in the queue."""

    def __init__(self, harness: Any, wait: float) -> None:
        self.places: list[int] = []
        self.task = asyncio.create_task(harness.manager.open(Origin.SOCKET, wait=wait, on_place=self.places.append))


async def test_a_full_server_refuses_at_once(harness: Any) -> None:
    one = harness(Adder, max_sessions=2)
    for _ in range(2):
        (await one.manager.open(Origin.SOCKET)).attach(_Connection())
    with pytest.raises(CapacityReached) as refused:
        await one.manager.open(Origin.SOCKET)
    assert refused.value.data == {"active_sessions": 2, "max_sessions": 2}
    assert one.manager.metrics.sessions_refused == 1


async def test_a_closed_session_gives_its_slot_back(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    first = await one.manager.open(Origin.SOCKET)
    first.close("test")
    assert (await one.manager.open(Origin.SOCKET)).token != first.token


async def test_closing_twice_gives_back_one_slot(harness: Any) -> None:
    one = harness(Adder, max_sessions=2)
    first = await one.manager.open(Origin.SOCKET)
    await one.manager.open(Origin.SOCKET)
    first.close("test")
    first.close("again")
    await first.ended
    assert one.manager.slots.in_use() == 1


async def test_a_factory_that_fails_gives_its_slot_back(harness: Any) -> None:
    class Broken(Adder):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    one = harness(Broken, max_sessions=1)
    for _ in range(3):
        with pytest.raises(Exception, match="no database"):
            await one.manager.open(Origin.SOCKET)
        await until(lambda: one.manager.slots.in_use() == 0)


async def test_the_queue_is_first_come_first_served(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(Origin.SOCKET)
    queue = []
    for _ in range(3):
        queue.append(Place(one, 60))
        await settled()
    for number, place in enumerate(queue):
        session.close("test")
        session = await place.task
        if number < 2:
            await until(lambda: queue[2].places[-1] == 2 - number)  # noqa: B023
    assert [place.places[0] for place in queue] == [1, 2, 3]
    assert queue[2].places == [3, 2, 1]


async def test_a_place_is_sent_only_when_it_changes(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    await one.manager.open(Origin.SOCKET)
    first = Place(one, 60)
    await settled()
    others = [Place(one, 60) for _ in range(3)]
    await settled()
    assert first.places == [1]
    for place in (first, *others):
        place.task.cancel()


async def test_a_new_client_does_not_overtake_the_queue(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(Origin.SOCKET)
    waiting = Place(one, 60)
    await settled()
    session.close("test")
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)
    assert (await waiting.task).closed is False


async def test_waiting_ends_at_its_deadline(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    await one.manager.open(Origin.SOCKET)
    short, long = Place(one, 5), Place(one, 50)
    await settled()
    await one.pass_time(4.9)
    assert not short.task.done()
    await one.pass_time(0.2)
    with pytest.raises(QueueTimeout) as late:
        await short.task
    assert late.value.data["max_sessions"] == 1
    assert long.places[-1] == 1
    long.task.cancel()


async def test_the_server_may_queue_everybody(harness: Any) -> None:
    one = harness(Adder, max_sessions=1, queue_timeout=5)
    session = await one.manager.open(Origin.SOCKET)
    waiting = asyncio.create_task(one.manager.open(Origin.SOCKET))
    await settled()
    session.close("test")
    assert await waiting


async def test_a_client_may_refuse_to_wait(harness: Any) -> None:
    one = harness(Adder, max_sessions=1, queue_timeout=5)
    await one.manager.open(Origin.SOCKET)
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET, wait=0)


async def test_who_leaves_the_queue_is_passed_over(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(Origin.SOCKET)
    gone, stays = Place(one, 60), Place(one, 60)
    await settled()
    gone.task.cancel()
    await settled()
    assert stays.places[-1] == 1
    session.close("test")
    assert await stays.task
    assert one.manager.slots.in_use() == 1


async def test_who_leaves_just_as_the_slot_comes_gives_it_back(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(Origin.SOCKET)
    gone = Place(one, 60)
    await settled()
    session.close("test")
    gone.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    await settled()
    assert one.manager.slots.in_use() == 0
    assert await one.manager.open(Origin.SOCKET)


async def test_who_leaves_just_as_the_slot_comes_lets_the_next_in(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(Origin.SOCKET)
    gone, stays = Place(one, 60), Place(one, 60)
    await settled()
    session.close("test")
    gone.task.cancel()
    assert await asyncio.wait_for(stays.task, 2)


@pytest.mark.parametrize("origin", [Origin.SOCKET, Origin.CREATED, Origin.MCP])
async def test_a_connected_session_is_not_evicted(harness: Any, origin: Origin) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(origin)
    await one.dispatch.execute(session, Reset())
    one.clock.advance(1000)
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)
    assert not session.closed


async def test_an_http_session_that_is_about_to_begin_does_not_give_way(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    await one.manager.open(Origin.HTTP)
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)


@pytest.mark.parametrize("origin", [Origin.CREATED, Origin.MCP, Origin.HTTP])
async def test_a_session_that_never_acted_gives_way_after_a_minute(harness: Any, origin: Origin) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(origin)
    one.clock.advance(59)
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)
    one.clock.advance(2)
    assert await one.manager.open(Origin.SOCKET)
    assert session.closed


async def test_an_http_episode_gives_way_after_a_minute_without_a_request(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(Origin.HTTP)
    await one.dispatch.execute(session, Reset())
    session.was_continued = True
    one.clock.advance(59)
    session.record_activity()
    one.clock.advance(59)
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)
    one.clock.advance(2)
    assert await one.manager.open(Origin.SOCKET)


async def test_a_new_client_waits_for_a_close_that_is_under_way(harness: Any, lives: list[Watched]) -> None:
    class Slow(Alone):
        def close(self) -> None:
            time.sleep(0.05)
            super().close()

    one = harness(Slow, max_sessions=1)
    for _ in range(5):
        (await one.manager.open(Origin.MCP)).close("its client left")
    await until(lambda: all(life.closes for life in lives))


async def test_a_dropped_session_gives_way_after_five_seconds(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session, connection = await one.manager.open(Origin.SOCKET), _Connection()
    session.attach(connection)
    session.detach(connection, dropped=True)
    one.clock.advance(4.9)
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)
    one.clock.advance(0.2)
    assert await one.manager.open(Origin.SOCKET)
    assert session.closed


async def test_the_session_dropped_first_gives_way_first(harness: Any) -> None:
    one = harness(Adder, max_sessions=2)
    sessions = [await one.manager.open(Origin.SOCKET) for _ in range(2)]
    for session in sessions:
        connection = _Connection()
        session.attach(connection)
        session.detach(connection, dropped=True)
        one.clock.advance(1)
    one.clock.advance(10)
    await one.manager.open(Origin.SOCKET)
    assert [session.closed for session in sessions] == [True, False]


async def test_a_session_is_evicted_only_for_a_waiting_client(harness: Any) -> None:
    one = harness(Adder, max_sessions=2)
    session, connection = await one.manager.open(Origin.SOCKET), _Connection()
    session.attach(connection)
    session.detach(connection, dropped=True)
    one.clock.advance(10)
    await one.manager.open(Origin.SOCKET)
    assert not session.closed


async def test_a_dropped_session_gives_way_to_the_queue(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session, connection = await one.manager.open(Origin.SOCKET), _Connection()
    session.attach(connection)
    session.detach(connection, dropped=True)
    waiting = Place(one, 60)
    await settled()
    await one.pass_time(5.1)
    assert await asyncio.wait_for(waiting.task, 2)
    assert session.closed


async def test_an_http_episode_that_was_not_continued_is_evicted_at_once(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    tentative = await one.manager.open(Origin.HTTP)
    await one.dispatch.execute(tentative, Reset())
    assert await one.manager.open(Origin.SOCKET)
    assert tentative.closed


async def test_an_http_episode_that_goes_on_keeps_its_slot_until_it_is_done(harness: Any) -> None:
    one = harness(Adder, max_sessions=1)
    session = await one.manager.open(Origin.HTTP)
    session.was_continued = True
    with pytest.raises(CapacityReached):
        await one.manager.open(Origin.SOCKET)
    await one.execute(session, Reset({"seed": 9}))
    await one.execute(session, Step(one.spec.action_type(amount=1)))
    assert await one.manager.open(Origin.SOCKET)


async def test_a_class_that_cannot_share_gets_one_session() -> None:
    spec = EnvironmentSpec(Alone)
    spec.require_concurrency(1)
    with pytest.raises(ConcurrencyConfigurationError, match="Alone") as refused:
        spec.require_concurrency(2)
    assert "concurrent_sessions" in (refused.value.hint or "")


async def test_instances_of_a_class_that_cannot_share_never_overlap(harness: Any, lives: list[Watched]) -> None:
    class Slow(Alone):
        def close(self) -> None:
            self.release.wait(5)
            super().close()

    one = harness(Slow, max_sessions=1)
    first = await one.manager.open(Origin.SOCKET)
    first.close("test")
    waiting = asyncio.create_task(one.manager.open(Origin.SOCKET, wait=60))
    await asyncio.sleep(0.05)
    assert len(lives) == 1
    lives[0].release.set()
    await until(waiting.done)
    assert alive() == 1


async def test_room_is_made_without_overlap(harness: Any, lives: list[Watched]) -> None:
    one = harness(Alone, max_sessions=1)
    await one.dispatch.execute(await one.manager.open(Origin.HTTP), Reset())
    await one.manager.open(Origin.SOCKET)
    assert [life.closes for life in lives] == [1, 0]


async def test_a_cancelled_build_does_not_overlap_with_the_next(harness: Any, lives: list[Watched]) -> None:
    class Slow(Alone):
        def __init__(self) -> None:
            super().__init__()
            time.sleep(0.15)

    one = harness(Slow, max_sessions=1)
    leaving = asyncio.create_task(one.manager.open(Origin.SOCKET))
    await until(lambda: lives)
    leaving.cancel()
    await settled()
    staying = asyncio.create_task(one.manager.open(Origin.SOCKET, wait=60))
    most = 0
    while not staying.done():
        most = max(most, alive())
        await asyncio.sleep(0.005)
    assert most == 1


async def test_a_borrowed_environment_does_not_overlap_with_a_session(harness: Any, lives: list[Watched]) -> None:
    one = harness(Alone, max_sessions=1)
    (await one.manager.open(Origin.SOCKET)).attach(_Connection())
    with pytest.raises((CapacityReached, TimeoutError)):
        async with asyncio.timeout(0.2), one.manager.borrow():
            pass
    assert len(lives) == 1


class _Connection:
    def is_blocked(self, work: object) -> bool:
        return False

    def send(self, frame: bytes) -> None: ...
    def on_session_closed(self, error: Exception) -> None: ...
