"""One order of all who wait, over several doors."""

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

from conftest import FakeClock
from paddock import SyncClient
from paddock.client.policy import Reconnect
from paddock.errors import QueueTimeout
from paddock.scale import turns as rules
from paddock.scale.turns import Turns
from paddock.sessions import slots
from running import wait_until
from scale.together import Together
from wire import Socket


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "LEASE_SECONDS", 60)


def turns(clock: FakeClock, *elsewhere: list[int]) -> Turns:
    found = Turns(clock)
    for number, tickets in enumerate(elsewhere):
        found.hear(found.meet(f"door {number}"), tickets, ())
    return found


def test_who_came_earlier_is_before_at_whichever_door(clock: FakeClock) -> None:
    found = turns(clock, [1, 5, 9], [2, 7])
    assert [found.before(ticket) for ticket in (0, 3, 6, 10)] == [0, 2, 3, 5]
    assert found.elsewhere == 5


def test_the_first_in_the_whole_line_have_the_free_slots(clock: FakeClock) -> None:
    found = turns(clock, [1, 5], [2])
    assert [found.comes(3, room) for room in (0, 1, 2, 3)] == [False, False, False, True]
    assert found.comes(0, 1)


def test_who_leaves_is_before_nobody(clock: FakeClock) -> None:
    found = Turns(clock)
    there = found.meet("door")
    found.hear(there, [1, 2, 3], [])
    found.hear(there, [4], [2, 17])
    assert found.before(10) == 3
    found.part("door", there)
    assert (found.before(10), found.doors) == (0, 0)


def test_the_end_of_an_old_line_does_not_end_a_new_one(clock: FakeClock) -> None:
    found = Turns(clock)
    old, new = found.meet("door"), found.meet("door")
    found.hear(new, [1], [])
    found.part("door", old)
    assert found.before(2) == 1


def test_who_asks_a_host_for_the_slot_is_still_ahead_of_those_behind(clock: FakeClock) -> None:
    found = turns(clock, [1])
    found.let_in(2)
    assert found.ahead(9) == 1
    found.join(2)
    found.let_in(2)
    assert (found.ahead(9), found.ahead(2)) == (2, 1)
    found.join(2)
    assert found.ahead(9) == 1
    found.let_in(2)
    found.leave(2)
    assert found.ahead(9) == 1


def test_a_slot_is_not_kept_forever_for_one_who_does_not_take_it(clock: FakeClock) -> None:
    found = turns(clock, [1])
    assert not found.comes(5, 1)
    clock.advance(rules.PASSED_OVER_AFTER)
    assert not found.comes(5, 1)
    clock.advance(0.1)
    assert found.comes(5, 1)


def test_a_slot_that_was_taken_meanwhile_is_kept_anew(clock: FakeClock) -> None:
    found = turns(clock, [1])
    assert not found.comes(5, 1)
    clock.advance(2 * rules.PASSED_OVER_AFTER)
    assert not found.comes(5, 0)
    assert not found.comes(5, 1)


# -- several doors ------------------------------------------------------------------------------------


def waiting(there: Together, count: int) -> None:
    """Until every door knows of so many."""
    wait_until(lambda: [each.door.waiting() for each in there.doors] == [count] * len(there.doors))


def url(there: Together, at: int) -> str:
    return f"http://127.0.0.1:{there.doors[at].port}"


def queued(there: Together, at: int, seconds: float = 30) -> Socket:
    return there.socket(at=at, session_resume="new", queue_timeout=str(seconds))


def places(socket: Socket, count: int) -> list[int]:
    return [socket.receive()["data"]["place"] for _ in range(count)]


def leave(socket: Socket) -> None:
    socket.connection.socket.close()


def full(there: Together) -> Any:
    """Take every slot; what is returned gives them back one by one."""
    taken = [there.call(there.door.place(0)) for _ in there.hosts]

    def free() -> None:
        host, lease = taken.pop()
        line = there.door.switchboard.lines[host.key]
        there.loop.call_soon_threadsafe(line.say, {"release": lease})

    return free


@pytest.mark.parametrize("doors", [1, 2, 3])
def test_who_waits_is_served_in_the_order_of_arrival_at_all_doors(doors: int) -> None:
    order: list[int] = []

    def wait(number: int) -> None:
        with SyncClient(url(there, number % doors), queue_timeout=30) as late:
            late.reset()
            order.append(number)

    with Together(1, 1, doors=doors) as there:
        free = full(there)
        threads = [threading.Thread(target=wait, args=(number,)) for number in range(12)]
        for count, thread in enumerate(threads, start=1):
            thread.start()
            waiting(there, count)
        free()
        for thread in threads:
            thread.join(30)
    assert order == list(range(12))


def test_the_place_told_is_the_place_in_the_whole_line() -> None:
    with Together(1, 1, doors=2) as there:
        free = full(there)
        sockets = []
        for number in range(4):
            sockets.append(queued(there, number % 2))
            waiting(there, number + 1)
            assert places(sockets[-1], 1) == [number + 1]
        leave(sockets[0])
        assert [places(socket, 1) for socket in sockets[1:]] == [[1], [2], [3]]
        free()
        assert sockets[1].receive()["type"] == "moved"
        assert [places(socket, 1) for socket in sockets[2:]] == [[1], [2]]


def test_a_newcomer_does_not_pass_those_who_wait_at_another_door() -> None:
    with Together(2, 1, doors=2) as there:
        free = full(there)
        first = queued(there, 0)
        waiting(there, 1)
        second = queued(there, 1)
        waiting(there, 2)
        free()
        assert places(first, 1) == [1]
        assert first.receive()["type"] == "moved"
        assert places(second, 2) == [2, 1]
        free()
        assert second.receive()["type"] == "moved"


def test_free_slots_are_taken_at_all_doors_at_once() -> None:
    with Together(2, 1, doors=2) as there:
        free = full(there)
        sockets = [queued(there, number) for number in range(2)]
        waiting(there, 2)
        free()
        free()
        for socket in sockets:
            while socket.receive()["type"] != "moved":
                pass


def test_deadlines_hold_at_every_door() -> None:
    with Together(1, 1, doors=2) as there:
        full(there)
        hasty = queued(there, 0, 0.5)
        waiting(there, 1)
        patient = queued(there, 1)
        assert places(patient, 2) == [2, 1]
        assert places(hasty, 1) == [1]
        assert hasty.receive()["data"]["kind"] == QueueTimeout.kind


def test_who_leaves_an_http_request_leaves_the_line() -> None:
    with Together(1, 1, doors=2, queue_timeout=30) as there:
        free = full(there)
        http = there.http(at=0)
        http.connection.request("POST", "/reset", b"{}")
        waiting(there, 1)
        other = queued(there, 1)
        waiting(there, 2)
        http.connection.close()
        assert places(other, 2) == [2, 1]
        free()
        assert other.receive()["type"] == "moved"


def test_with_a_door_go_only_those_who_waited_there() -> None:
    with Together(1, 1, doors=2) as there:
        free = full(there)
        queued(there, 1)
        waiting(there, 1)
        told: list[int] = []
        with SyncClient(url(there, 0), queue_timeout=30, on_queue=told.append) as other:
            thread = threading.Thread(target=other.reset)
            thread.start()
            waiting(there, 2)
            there.call(there.stop_door(1))
            wait_until(lambda: told == [2, 1])
            free_at(there, 0, free)
            thread.join(10)
            assert other.step({"amount": 3}).observation["total"] == 3


def free_at(there: Together, number: int, free: Any) -> None:
    wait_until(lambda: there.doors[number].door.roster.taken() == 1)
    free()


def test_a_door_that_starts_anew_lets_nobody_pass() -> None:
    with Together(1, 1, doors=2) as there:
        free = full(there)
        first = queued(there, 0)
        assert places(first, 1) == [1]
        there.call(there.stop_door(1))
        there.call(there.start_door(1))
        wait_until(lambda: there.doors[1].door.roster.hosts and there.doors[1].door.roster.turns.doors == 1)
        second = queued(there, 1)
        assert places(second, 1) == [2]
        free()
        assert first.receive()["type"] == "moved"
        assert places(second, 1) == [1]


def test_who_waits_at_a_door_that_dies_lines_up_at_the_next() -> None:
    with Together(1, 1) as there:
        there.call(there.door.place(0))
        told: list[int] = []
        policy = Reconnect(within=20)
        with SyncClient(there.url, queue_timeout=30, on_queue=told.append, reconnect=policy) as late:
            thread = threading.Thread(target=late.reset)
            thread.start()
            wait_until(lambda: told == [1])
            there.call(there.stop_door())
            there.call(there.start_door())
            wait_until(lambda: told == [1, 1])
            manager = there.hosts[0].service.manager
            there.loop.call_soon_threadsafe(lambda: [manager.release(lease) for lease in [*manager.leases._until]])
            thread.join(10)
            assert late.step({"amount": 3}).observation["total"] == 3


def test_a_door_that_does_not_take_its_turn_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PASSED_OVER_AFTER", 0.3)
    with Together(1, 1, doors=2) as there:
        free = full(there)
        stuck = there.doors[1].door.roster
        there.loop.call_soon_threadsafe(lambda: stuck.turns.join(stuck.new_ticket()))
        wait_until(lambda: there.door.waiting() == 1)
        other = queued(there, 0)
        assert places(other, 1) == [2]
        free()
        assert other.receive()["type"] == "moved"


def test_a_silent_door_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DOOR_SILENT_FOR", 0.3)

    async def say(there: Together, *lines: bytes) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(*there.doors[0].calls_at)
        writer.writelines(lines)
        return writer

    with Together(1, 1) as there:
        hello = b'{"secret": "%s", "door": "other"}\n' % there.config.secret.encode()
        writer = there.call(say(there, hello, b'{"joined": [1, 2]}\n'))
        wait_until(lambda: there.door.waiting() == 2)
        wait_until(lambda: there.door.waiting() == 0)
        there.loop.call_soon_threadsafe(writer.close)


def test_a_line_of_thousands_is_told_to_a_door_that_comes_later() -> None:
    with Together(1, 1, doors=2) as there:
        first = there.doors[0].door.roster
        there.loop.call_soon_threadsafe(lambda: [first.turns.join(first.new_ticket()) for _ in range(7000)])
        wait_until(lambda: there.doors[1].door.waiting() == 7000)
        there.call(there.stop_door(1))
        there.call(there.start_door(1))
        wait_until(lambda: there.doors[1].door.waiting() == 7000)


def test_nobody_without_the_secret_is_a_door() -> None:
    async def intrude(there: Together) -> bytes:
        reader, writer = await asyncio.open_connection(*there.doors[0].calls_at)
        writer.write(b'{"secret": "guessed", "door": "mine"}\n{"joined": [1]}\n')
        try:
            async with asyncio.timeout(10):
                with suppress(ConnectionResetError):
                    return await reader.read()
                return b""
        finally:
            writer.close()

    with Together(1, 1) as there:
        assert there.call(intrude(there)) == b""
        assert there.door.waiting() == 0
