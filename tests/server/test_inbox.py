"""Connections that the inbox reads: in the order of what came, a few at a time, and anything odd as ever."""

import asyncio
import json
import random
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from environments import Adder, InlineAdder, Scripted, Watched
from odd_frames import ENDS, ODD, STEP, frame, total
from paddock.server.awake import wait_awake
from paddock.server.fast import FastSocket
from paddock.server.inbox import AT_ONCE, Inbox
from paddock.server.kernel import ROOM, read
from paddock.server.outbox import Outbox
from paddock.server.reading import By, Reading
from running import Running, Serve, wait_until
from wire import PING, PONG, RawSocket


class InlineScripted(Scripted):
    inline = True


class Affine(Adder):
    """A thread of its own for each session."""

    thread_affine = True


ENVIRONMENTS = pytest.mark.parametrize("kind", [InlineAdder, Affine, Adder], ids=["inline", "affine", "threads"])


def readers(server: Running) -> list[By]:
    return [one.reading.by for one in server.service.sockets if isinstance(one, FastSocket)]


def stepping(server: Running) -> RawSocket:
    ws = server.raw()
    ws.send('{"type":"state"}')
    ws.answer()
    ws.send(STEP.format(1))
    assert total(ws.answer()) == 1
    return ws


def both(server: Running) -> tuple[RawSocket, RawSocket]:
    first, second = stepping(server), stepping(server)
    settle(server, first, second)
    return first, second


def settle(server: Running, *sockets: RawSocket) -> None:
    """Step until each is read by whom it should be: a thread that all share, or the loop's inbox."""
    shared = server.service.blueprint.cls is Adder

    def are_settled() -> bool:
        return readers(server) == [By.THREAD if shared else By.INBOX] * len(sockets)

    def step() -> bool:
        for ws in sockets:
            ask(ws, STEP.format(0))
        return are_settled()

    wait_until(lambda: are_settled() or step())


def ask(ws: RawSocket, text: str = STEP.format(1)) -> Any:
    ws.send(text)
    return ws.answer()


@ENVIRONMENTS
@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_is_answered_all_the_same(serve_fast: Serve, odd: str, kind: Any) -> None:
    server, (answered, send) = serve_fast(kind), ODD[odd]
    (ws, other), expected = both(server), 1
    for number in range(3):
        send(ws)
        assert total(ask(other)) == number + 2
        assert ws.answer()["type"] == answered
        expected += 3 if answered == "observation" else 1
        assert total(ask(ws)) == expected
        settle(server, ws, other)


@ENVIRONMENTS
def test_frames_in_heaps_are_answered_in_their_order(serve_fast: Serve, kind: Any) -> None:
    choose, expected = random.Random(5), 1
    ws, other = both(serve_fast(kind))
    for number in range(60):
        size = choose.choice([1, 2, 7, 40])
        ws.tcp.sendall(b"".join([frame(STEP.format(1))] * size))
        assert total(ask(other)) == number + 2
        for _ in range(size):
            expected += 1
            assert total(ws.answer()) == expected


@ENVIRONMENTS
def test_pings_are_answered(serve_fast: Serve, kind: Any) -> None:
    ws, _ = both(serve_fast(kind))
    for number in range(20):
        ws.send(str(number), PING)
        assert ws.receive() == (PONG, str(number).encode())
        assert total(ask(ws)) == number + 2


@ENVIRONMENTS
@pytest.mark.parametrize("end", ENDS)
def test_every_end_frees_the_session_and_its_place(serve_fast: Serve, end: str, kind: Any) -> None:
    server = serve_fast(kind, max_sessions=2)
    other = stepping(server)
    for number in range(2):
        ws = stepping(server)
        settle(server, ws, other)
        ENDS[end](ws)
        wait_until(lambda: server.service.manager.statistics().sessions == 1)
        wait_until(lambda: len(readers(server)) == 1)
        assert total(ask(other)) == number + 2


@pytest.mark.parametrize("kind", [InlineScripted, Scripted], ids=["inline", "threads"])
def test_a_client_that_does_not_read_is_not_read(serve_fast: Serve, kind: Any) -> None:
    server = serve_fast(kind)
    ws, other = server.raw(), server.socket()
    ws.tcp.settimeout(30)
    values = [str(number) * 3000 for number in range(1000, 1600)]
    sender = threading.Thread(
        target=lambda: [ws.send(json.dumps({"type": "step", "data": {"value": value}})) for value in values]
    )
    sender.start()
    wait_until(lambda: By.NOBODY in readers(server))
    assert other.step(value=7)["data"]["observation"]["value"] == 7
    assert [ws.answer()["data"]["observation"]["value"] for _ in values] == values
    sender.join()
    assert By.NOBODY not in readers(server)


@ENVIRONMENTS
def test_one_whose_session_goes_on_elsewhere_is_told(serve_fast: Serve, kind: Any) -> None:
    server = serve_fast(kind)
    other, ws = stepping(server), server.raw(headers="Session-Resume: new\r\n")
    assert [total(ask(ws)) for _ in range(3)] == [1, 2, 3]
    settle(server, ws, other)
    [token] = re.findall(r"(?i)session-id: (\S+)", ws.head)
    elsewhere = server.socket(session_resume=token)
    assert total(elsewhere.step(amount=1)) == 4
    ws.send(STEP.format(1))
    assert ws.close_code() == 1008
    assert total(elsewhere.step(amount=1)) == 5
    assert total(ask(other)) == 2


@ENVIRONMENTS
def test_nothing_is_carried_out_after_a_goodbye(serve_fast: Serve, lives: list[Watched], kind: Any) -> None:
    server = serve_fast(kind)
    ws, other = both(server)
    before = sum(life.steps for life in lives)
    ws.send(b'"\xff"')
    ws.send(STEP.format(1))
    assert ws.close_code() == 1007
    ws.send(STEP.format(1))
    assert total(ask(other)) == 2
    wait_until(lambda: len(readers(server)) == 1)
    assert sum(life.steps for life in lives) == before + 1


def test_a_client_that_is_dropped_for_its_silence_leaves_nothing(serve_fast: Serve) -> None:
    server = serve_fast(InlineAdder, ping_interval=0.2, ping_timeout=0.2)
    both(server)
    wait_until(lambda: server.service.manager.statistics().sessions == 0, 10)
    assert server.service.inbox._listeners == {}


def test_a_drain_tells_everybody(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(InlineAdder, max_sessions=40)
    sockets = [stepping(server) for _ in range(40)]
    server.server.should_exit = True
    assert {ws.close_code() for ws in sockets} == {1012}
    server.thread.join(10)
    assert not server.thread.is_alive()
    assert [life.closes for life in lives] == [1] * 40


def test_a_message_over_the_limit_is_refused_as_ever(serve_fast: Serve) -> None:
    ws, other = both(serve_fast(InlineAdder, message_bytes=200))
    ws.send(STEP.format("1" + " " * 300))
    assert ws.close_code() == 1009
    assert total(ask(other)) == 2


def test_a_connection_whose_message_breaks_the_server_is_dropped_alone(
    serve_fast: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve_fast(InlineAdder)
    ws, other = both(server)
    monkeypatch.setattr("paddock.server.ws.write_step", lambda answer: 1 / 0)
    ws.send(STEP.format(1))
    assert ws.close_code() == 1011
    monkeypatch.undo()
    assert "could not be handled" in caplog.text
    assert total(ask(other)) == 2


# -- the inbox by itself --------------------------------------------------------------------------


class Heard:
    """One end of a connection, as the inbox sees it."""

    def __init__(self, inbox: Inbox, log: list[Any]) -> None:
        self.mine, self.theirs = socket.socketpair()
        self.inbox, self.log = inbox, log
        self.then: Callable[[], None] = lambda: None
        inbox.enter(self.mine.fileno(), self)

    def hear(self, message: bytes) -> None:
        self.log.append(json.loads(message))
        self.then()

    def give_back(self, unread: bytes) -> None:
        self.inbox.leave(self.mine.fileno())
        self.log.append(unread)

    def send(self, document: Any) -> None:
        self.theirs.sendall(frame(json.dumps(document)))

    def close(self) -> None:
        self.mine.close()
        self.theirs.close()


@pytest.fixture
async def inbox() -> Inbox:
    return Inbox(1 << 20, Outbox([]), read, lambda: True)


@pytest.fixture
async def ends(inbox: Inbox) -> AsyncIterator[list[Heard]]:
    log: list[Any] = []
    ends = [Heard(inbox, log) for _ in range(3 * AT_ONCE)]
    yield ends
    inbox.close()
    for end in ends:
        end.close()


async def turns_until(done: Callable[[], bool]) -> int:
    turns = 0
    while not done():
        turns += 1
        assert turns < 1000
        await asyncio.sleep(0)
    return turns


@pytest.mark.anyio
async def test_who_came_first_is_heard_first(ends: list[Heard]) -> None:
    log = ends[0].log
    for seed in range(5):
        order = random.Random(seed).sample(range(len(ends)), len(ends))
        for place in order:
            ends[place].send(place)
        await turns_until(lambda: len(log) == len(ends))
        assert log == order
        log.clear()


@pytest.mark.anyio
async def test_a_turn_reads_a_few(ends: list[Heard]) -> None:
    log, sizes = ends[0].log, []

    def note() -> None:
        sizes.append(len(log))
        if len(log) < len(ends):
            asyncio.get_running_loop().call_soon(note)

    for place, end in enumerate(ends):
        end.send(place)
    note()
    await turns_until(lambda: len(log) == len(ends))
    assert sorted(set(sizes) - {0, len(ends)}) == [AT_ONCE, 2 * AT_ONCE]


@pytest.mark.anyio
async def test_what_was_read_of_one_that_leaves_is_heard_and_no_more_is_read(ends: list[Heard], inbox: Inbox) -> None:
    first, second = ends[:2]
    first.then = lambda: inbox.leave(second.mine.fileno())
    first.send(1)
    second.send(2)
    await turns_until(lambda: len(first.log) == 2)
    second.send(3)
    for _ in range(5):
        await asyncio.sleep(0)
    assert first.log == [1, 2]
    assert second.mine.recv(100) == frame("3")
    inbox.enter(second.mine.fileno(), second)


@pytest.mark.anyio
@pytest.mark.parametrize("data", [b"\x89\x80\0\0\0\0", frame("1")[:3], frame("1") * 2, frame("1" * 2 * ROOM)[:ROOM]])
async def test_anything_else_is_given_back_with_every_byte(ends: list[Heard], data: bytes) -> None:
    ends[0].theirs.sendall(data)
    await turns_until(lambda: bool(ends[0].log))
    assert ends[0].log == [data]
    ends[0].theirs.sendall(frame("1"))
    ends[1].send(2)
    await turns_until(lambda: len(ends[0].log) == 2)
    assert ends[0].log == [data, 2]


@pytest.mark.anyio
async def test_the_end_is_given_back(ends: list[Heard]) -> None:
    ends[0].theirs.close()
    await turns_until(lambda: bool(ends[0].log))
    assert ends[0].log == [b""]


@pytest.mark.anyio
async def test_closing_gives_everything_back(inbox: Inbox) -> None:
    log: list[Any] = []
    ends = [Heard(inbox, log) for _ in range(3)]
    inbox.close()
    assert log == [b""] * 3
    for end in ends:
        end.close()


class Nobody:
    """A listener to whom nothing happens."""

    def hear(self, message: bytes) -> None:
        raise AssertionError(message)

    def give_back(self, unread: bytes) -> None:
        raise AssertionError(unread)


class Closing:
    """A transport that has bytes left to write, and reads no more."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.closing = connection, False

    def get_extra_info(self, _: str) -> socket.socket:
        return self.connection

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        assert not self.closing

    resume_reading = pause_reading


@pytest.mark.anyio
async def test_one_that_is_closing_is_not_read_for_ever(inbox: Inbox) -> None:
    mine, theirs = socket.socketpair()
    transport, log = Closing(mine), []

    class Owner(Nobody):
        def give_back(self, unread: bytes) -> None:
            log.append(unread)
            reading.take_back(unread)

    reading = Reading(transport, inbox, Owner())
    reading.enter_inbox()
    transport.closing = True
    theirs.close()
    await turns_until(lambda: bool(log))
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert log == [b""]
    assert reading.by is By.NOBODY
    reading.end()
    mine.close()
    inbox.close()


@pytest.mark.anyio
async def test_nobody_enters_an_inbox_that_is_closed(inbox: Inbox) -> None:
    mine, theirs = socket.socketpair()
    reading = Reading(Closing(mine), inbox, Nobody())
    inbox.close()
    reading.enter_inbox()
    assert reading.by is By.TRANSPORT
    for end in (mine, theirs):
        end.close()


# -- waiting awake --------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Each time that the inbox waited awake: whether something came."""
    waits: list[bool] = []

    def noted(look: Callable[[], list[Any]]) -> list[Any]:
        found = wait_awake(look)
        waits.append(bool(found))
        return found

    monkeypatch.setattr("paddock.server.inbox.wait_awake", noted)
    monkeypatch.setattr("paddock.server.awake.AWAKE", 0.02)
    monkeypatch.setattr("paddock.server.awake.CAN_SPARE_A_CORE", True)
    return waits


def test_a_lone_client_that_is_quick_is_waited_for_awake(serve_fast: Serve, waits: list[bool]) -> None:
    ws = stepping(serve_fast(InlineAdder))
    assert [total(ask(ws)) for _ in range(50)] == list(range(2, 52))
    assert waits.count(True) > 10
    wait_until(lambda: waits[-1] is False)
    seen = len(waits)
    time.sleep(0.1)
    assert len(waits) == seen, "it goes on waiting for a client that is silent"


def test_the_loop_goes_on_meanwhile(serve_fast: Serve, waits: list[bool]) -> None:
    server = serve_fast(InlineAdder)
    ws, stop = stepping(server), threading.Event()

    def go_on() -> None:
        while not stop.is_set():
            ask(ws)

    client = threading.Thread(target=go_on)
    client.start()
    try:
        wait_until(lambda: waits.count(True) > 10)
        began = time.monotonic()
        for _ in range(20):
            assert server.http()("GET", "/health").status == 200
        assert time.monotonic() - began < 5
    finally:
        stop.set()
        client.join()


def test_nobody_else_is_waited_for_awake(serve_fast: Serve, waits: list[bool]) -> None:
    ws, other = both(serve_fast(InlineAdder))
    waits.clear()
    for number in range(20):
        assert (total(ask(ws)), total(ask(other))) == (number + 2, number + 2)
    assert waits == []
    slow = stepping(serve_fast(InlineAdder))
    waits.clear()
    for number in range(5):
        time.sleep(0.05)
        assert total(ask(slow)) == number + 2
    assert waits == []


def test_a_loop_that_leaves_its_steps_to_threads_sleeps(serve_fast: Serve, waits: list[bool]) -> None:
    server = serve_fast(Adder, threads=1)
    ws = stepping(server)
    assert [total(ask(ws)) for _ in range(20)] == list(range(2, 22))
    assert readers(server) == [By.INBOX]
    assert waits == []
