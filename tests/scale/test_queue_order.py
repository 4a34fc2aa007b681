"""One order of all who wait, over several gateways."""

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

from conftest import FakeClock
from paddock import SyncClient
from paddock.client.reconnect import Reconnect
from paddock.errors import QueueTimeout
from paddock.scale import queue_order as rules
from paddock.scale.queue_order import QueueOrder
from paddock.sessions import capacity
from running import wait_until
from scale.together import Together
from wire import Socket


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "LEASE_SECONDS", 60)


def order_of(clock: FakeClock, *peers: list[int]) -> QueueOrder:
    order = QueueOrder(clock)
    for number, tickets in enumerate(peers):
        order.update_peer(order.add_peer(f"gateway {number}"), tickets, ())
    return order


def test_who_came_earlier_is_before_at_whichever_gateway(clock: FakeClock) -> None:
    order = order_of(clock, [1, 5, 9], [2, 7])
    assert [order.remote_before(ticket) for ticket in (0, 3, 6, 10)] == [0, 2, 3, 5]
    assert order.remote_count == 5


def test_the_first_in_the_whole_line_have_the_free_slots(clock: FakeClock) -> None:
    order = order_of(clock, [1, 5], [2])
    assert [order.is_turn(3, room) for room in (0, 1, 2, 3)] == [False, False, False, True]
    assert order.is_turn(0, 1)


def test_a_client_that_leaves_is_ahead_of_no_other(clock: FakeClock) -> None:
    order = QueueOrder(clock)
    there = order.add_peer("gateway")
    order.update_peer(there, [1, 2, 3], [])
    order.update_peer(there, [4], [2, 17])
    assert order.remote_before(10) == 3
    order.remove_peer("gateway", there)
    assert (order.remote_before(10), order.peers) == (0, 0)


def test_the_end_of_an_old_line_does_not_end_a_new_one(clock: FakeClock) -> None:
    order = QueueOrder(clock)
    old, new = order.add_peer("gateway"), order.add_peer("gateway")
    order.update_peer(new, [1], [])
    order.remove_peer("gateway", old)
    assert order.remote_before(2) == 1


def test_who_asks_a_host_for_the_slot_is_still_ahead_of_those_behind(clock: FakeClock) -> None:
    order = order_of(clock, [1])
    order.admit(2)
    assert order.count_before(9) == 1
    order.add(2)
    order.admit(2)
    assert (order.count_before(9), order.count_before(2)) == (2, 1)
    order.add(2)
    assert order.count_before(9) == 1
    order.admit(2)
    order.remove(2)
    assert order.count_before(9) == 1


def test_a_slot_is_not_kept_forever_for_one_who_does_not_take_it(clock: FakeClock) -> None:
    order = order_of(clock, [1])
    assert not order.is_turn(5, 1)
    clock.advance(rules.IDLE_SLOT_SECONDS)
    assert not order.is_turn(5, 1)
    clock.advance(0.1)
    assert order.is_turn(5, 1)


def test_a_slot_that_was_taken_meanwhile_is_kept_anew(clock: FakeClock) -> None:
    order = order_of(clock, [1])
    assert not order.is_turn(5, 1)
    clock.advance(2 * rules.IDLE_SLOT_SECONDS)
    assert not order.is_turn(5, 0)
    assert not order.is_turn(5, 1)


# -- several gateways ------------------------------------------------------------------------------------


def waiting(there: Together, count: int) -> None:
    """Until every gateway knows of so many."""
    wait_until(lambda: [each.gateway.waiting() for each in there.gateways] == [count] * len(there.gateways))


def url(there: Together, at: int) -> str:
    return f"http://127.0.0.1:{there.gateways[at].port}"


def queued(there: Together, at: int, seconds: float = 30) -> Socket:
    return there.socket(at=at, session_resume="new", queue_timeout=str(seconds))


def places(socket: Socket, count: int) -> list[int]:
    return [socket.receive()["data"]["place"] for _ in range(count)]


def leave(socket: Socket) -> None:
    socket.connection.socket.close()


def full(there: Together) -> Any:
    """Take every slot; what is returned gives them back one by one."""
    used = [there.call(there.gateway.reserve_slot(0)) for _ in there.hosts]

    def free() -> None:
        host, lease = used.pop()
        line = there.gateway.listener.connections[host.key]
        there.loop.call_soon_threadsafe(line.send, {"release": lease})

    return free


@pytest.mark.parametrize("gateways", [1, 2, 3])
def test_who_waits_is_served_in_the_order_of_arrival_at_all_gateways(gateways: int) -> None:
    order: list[int] = []

    def wait(number: int) -> None:
        with SyncClient(url(there, number % gateways), queue_timeout=30) as late:
            late.reset()
            order.append(number)

    with Together(1, 1, gateways=gateways) as there:
        free = full(there)
        threads = [threading.Thread(target=wait, args=(number,)) for number in range(12)]
        for count, thread in enumerate(threads, start=1):
            thread.start()
            waiting(there, count)
        free()
        for thread in threads:
            thread.join(30)
    assert order == list(range(12))


def test_the_reported_place_is_the_one_in_the_whole_queue() -> None:
    with Together(1, 1, gateways=2) as there:
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


def test_a_new_client_does_not_pass_those_who_wait_at_another_gateway() -> None:
    with Together(2, 1, gateways=2) as there:
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


def test_free_slots_are_taken_at_all_gateways_at_once() -> None:
    with Together(2, 1, gateways=2) as there:
        free = full(there)
        sockets = [queued(there, number) for number in range(2)]
        waiting(there, 2)
        free()
        free()
        for socket in sockets:
            while socket.receive()["type"] != "moved":
                pass


def test_deadlines_hold_at_every_gateway() -> None:
    with Together(1, 1, gateways=2) as there:
        full(there)
        hasty = queued(there, 0, 0.5)
        waiting(there, 1)
        patient = queued(there, 1)
        assert places(patient, 2) == [2, 1]
        assert places(hasty, 1) == [1]
        assert hasty.receive()["data"]["kind"] == QueueTimeout.kind


def test_who_leaves_an_http_request_leaves_the_line() -> None:
    with Together(1, 1, gateways=2, queue_timeout=30) as there:
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


def test_with_a_gateway_go_only_those_who_waited_there() -> None:
    with Together(1, 1, gateways=2) as there:
        free = full(there)
        queued(there, 1)
        waiting(there, 1)
        positions: list[int] = []
        with SyncClient(url(there, 0), queue_timeout=30, on_queue=positions.append) as other:
            thread = threading.Thread(target=other.reset)
            thread.start()
            waiting(there, 2)
            there.call(there.stop_gateway(1))
            wait_until(lambda: positions == [2, 1])
            free_at(there, 0, free)
            thread.join(10)
            assert other.step({"amount": 3}).observation["total"] == 3


def free_at(there: Together, number: int, free: Any) -> None:
    wait_until(lambda: there.gateways[number].gateway.registry.in_use() == 1)
    free()


def test_a_restarted_gateway_keeps_the_queue_order() -> None:
    with Together(1, 1, gateways=2) as there:
        free = full(there)
        first = queued(there, 0)
        assert places(first, 1) == [1]
        there.call(there.stop_gateway(1))
        there.call(there.start_gateway(1))
        wait_until(
            lambda: there.gateways[1].gateway.registry.hosts and there.gateways[1].gateway.registry.queue.peers == 1
        )
        second = queued(there, 1)
        assert places(second, 1) == [2]
        free()
        assert first.receive()["type"] == "moved"
        assert places(second, 1) == [1]


def test_who_waits_at_a_gateway_that_dies_lines_up_at_the_next() -> None:
    with Together(1, 1) as there:
        there.call(there.gateway.reserve_slot(0))
        positions: list[int] = []
        policy = Reconnect(within=20)
        with SyncClient(there.url, queue_timeout=30, on_queue=positions.append, reconnect=policy) as late:
            thread = threading.Thread(target=late.reset)
            thread.start()
            wait_until(lambda: positions == [1])
            there.call(there.stop_gateway())
            there.call(there.start_gateway())
            wait_until(lambda: positions == [1, 1])
            manager = there.hosts[0].service.manager
            there.loop.call_soon_threadsafe(lambda: [manager.release(lease) for lease in [*manager.leases._until]])
            thread.join(10)
            assert late.step({"amount": 3}).observation["total"] == 3


def test_a_gateway_that_does_not_take_its_turn_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "IDLE_SLOT_SECONDS", 0.3)
    with Together(1, 1, gateways=2) as there:
        free = full(there)
        stuck = there.gateways[1].gateway.registry
        there.loop.call_soon_threadsafe(lambda: stuck.queue.add(stuck.new_ticket()))
        wait_until(lambda: there.gateway.waiting() == 1)
        other = queued(there, 0)
        assert places(other, 1) == [2]
        free()
        assert other.receive()["type"] == "moved"


def test_a_silent_gateway_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PEER_SILENCE_SECONDS", 0.3)

    async def say(there: Together, *connections: bytes) -> asyncio.StreamWriter:
        _, writer = await asyncio.open_connection(*there.gateways[0].control_address)
        writer.writelines(connections)
        return writer

    with Together(1, 1) as there:
        hello = b'{"secret": "%s", "gateway": "other"}\n' % there.config.secret.encode()
        writer = there.call(say(there, hello, b'{"joined": [1, 2]}\n'))
        wait_until(lambda: there.gateway.waiting() == 2)
        wait_until(lambda: there.gateway.waiting() == 0)
        there.loop.call_soon_threadsafe(writer.close)


def test_a_late_gateway_gets_the_whole_queue() -> None:
    with Together(1, 1, gateways=2) as there:
        first = there.gateways[0].gateway.registry
        there.loop.call_soon_threadsafe(lambda: [first.queue.add(first.new_ticket()) for _ in range(7000)])
        wait_until(lambda: there.gateways[1].gateway.waiting() == 7000)
        there.call(there.stop_gateway(1))
        there.call(there.start_gateway(1))
        wait_until(lambda: there.gateways[1].gateway.waiting() == 7000)


def test_a_gateway_needs_the_secret() -> None:
    async def intrude(there: Together) -> bytes:
        reader, writer = await asyncio.open_connection(*there.gateways[0].control_address)
        writer.write(b'{"secret": "guessed", "gateway": "mine"}\n{"joined": [1]}\n')
        try:
            async with asyncio.timeout(10):
                with suppress(ConnectionResetError):
                    return await reader.read()
                return b""
        finally:
            writer.close()

    with Together(1, 1) as there:
        assert there.call(intrude(there)) == b""
        assert there.gateway.waiting() == 0
