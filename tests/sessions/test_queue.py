"""The queue for slots: what one waiter costs does not depend on the others, and too many are refused."""

import asyncio
import time
from typing import Any

import pytest

from environments import Adder
from paddock.errors import CapacityReached, QueueTimeout
from paddock.sessions.capacity import NOTICES_PER_ITERATION, LocalSlotCount, Slots, Waiter, WaitingQueue
from paddock.sessions.session import Origin

from .conftest import settled, until

pytestmark = pytest.mark.anyio


def full(**limits: Any) -> Slots:
    slots = Slots(LocalSlotCount(1), time.monotonic, **limits)
    assert slots.take()
    return slots


async def leave(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_too_many_who_wait_are_refused_with_the_name_of_the_limit() -> None:
    slots = full(max_waiting=3)
    waiting = [asyncio.create_task(slots.wait(60)) for _ in range(3)]
    await settled()
    with pytest.raises(CapacityReached, match="max_waiting"):
        await slots.wait(60)
    await leave(waiting[:1])
    waiting.append(asyncio.create_task(slots.wait(60)))
    await settled()
    assert slots.waiting == 3
    await leave(waiting)
    assert slots.waiting == 0


async def test_one_connection_cannot_fill_the_queue() -> None:
    slots, connection = full(max_waiting=100, max_waiting_per_owner=2), object()
    waiting = [asyncio.create_task(slots.wait(60, owner=connection)) for _ in range(2)]
    await settled()
    with pytest.raises(CapacityReached, match="max_waiting_per_connection"):
        await slots.wait(60, owner=connection)
    other = asyncio.create_task(slots.wait(60, owner=object()))
    await settled()
    assert slots.waiting == 3
    slots.give_back()
    await until(lambda: waiting[0].done())
    again = asyncio.create_task(slots.wait(60, owner=connection))
    await settled()
    assert not again.done()
    await leave([*waiting, other, again])


async def test_places_are_sent_at_a_limited_rate() -> None:
    slots, reply = full(), list[int]()
    waiting = [asyncio.create_task(slots.wait(60)) for _ in range(200)]
    await settled()
    last = asyncio.create_task(slots.wait(60, reply.append))
    await settled()
    for task in waiting:
        await leave([task])
    await until(lambda: reply[-1] == 1)
    assert len(reply) <= 5
    await leave([last])


async def test_a_round_of_notices_lets_the_loop_go_on() -> None:
    slots, reply, turns = full(), dict[int, int](), 0
    waiting = [
        asyncio.create_task(slots.wait(60, lambda place, n=n: reply.__setitem__(n, place)))  # type: ignore[misc]
        for n in range(10 * NOTICES_PER_ITERATION)
    ]
    await settled()
    await until(lambda: len(reply) == 10 * NOTICES_PER_ITERATION)
    await leave(waiting[:1])
    while reply[10 * NOTICES_PER_ITERATION - 1] != 10 * NOTICES_PER_ITERATION - 1:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 1_000_000
    assert turns >= 5
    await leave(waiting)


async def test_those_who_left_take_no_memory() -> None:
    queue, stays = WaitingQueue(), Waiter(0, 1e9, None)
    queue.join(stays)
    for ticket in range(1, 5000):
        waiter = Waiter(ticket, 1e9, None)
        queue.join(waiter)
        assert queue.leave(waiter)
        assert not queue.leave(waiter)
    assert len(queue._by_ticket) + len(queue._by_deadline) < 4 * NOTICES_PER_ITERATION
    assert queue.first() is stays
    assert queue.in_order() == [stays]


async def test_deadlines_end_the_wait_in_any_order() -> None:
    now = 0.0
    slots = Slots(LocalSlotCount(1), lambda: now)
    assert slots.take()
    waiting = [asyncio.create_task(slots.wait(seconds)) for seconds in (5, 1, 3)]
    await settled()
    for now, over in ((2.0, 1), (4.0, 2), (6.0, 3)):
        slots.expire(now)
        await until(lambda over=over: sum(task.done() for task in waiting) == over)  # type: ignore[misc]
    assert all(isinstance(task.exception(), QueueTimeout) for task in waiting)
    assert slots.waiting == 0


async def test_a_refusal_counts_as_one(harness: Any) -> None:
    one = harness(Adder, max_sessions=1, max_waiting=1, queue_timeout=60)
    await one.manager.open(Origin.SOCKET)
    first = asyncio.create_task(one.manager.open(Origin.SOCKET))
    await settled()
    with pytest.raises(CapacityReached, match="max_waiting"):
        await one.manager.open(Origin.SOCKET)
    assert one.manager.metrics.sessions_refused == 1
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
