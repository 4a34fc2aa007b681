"""A lone connection that its thread reads: nothing is lost, doubled or out of order, whatever happens to it."""

import json
import os
import random
import select
import socket
import sys
import threading
import time
from typing import Any

import pytest

from environments import Adder, Alone, Did, Script, Scripted, Watched
from odd_frames import ENDS, ODD, STEP, frame, total
from paddock.server.fast import FastSocket
from paddock.server.kernel import Looker
from paddock.server.reading import By
from paddock.sessions.loan import LONGEST_TURN, ShortTurns
from running import Running, Serve, wait_until
from wire import PING, PONG, TEXT, RawSocket


class Affine(Adder):
    """On a thread of its own."""

    thread_affine = True


ENVIRONMENTS = pytest.mark.parametrize("kind", [Adder, Affine], ids=["pool", "own thread"])


def lent(server: Running) -> bool:
    return server.service.manager.loan is not None


def stepping(server: Running, **headers: str) -> RawSocket:
    """A connection that is lent: its first step has been answered."""
    ws = server.raw(headers="".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items()))
    # A frame that comes before the session is there is never the first of a loan.
    ws.send('{"type":"state"}')
    ws.answer()
    ws.send(STEP.format(1))
    assert total(ws.answer()) == 1
    wait_until(lambda: lent(server))
    return ws


@ENVIRONMENTS
def test_steps_are_read_and_answered_by_the_thread(serve_fast: Serve, kind: Any, lives: list[Watched]) -> None:
    server = serve_fast(kind)
    ws = stepping(server)
    for number in range(2, 200):
        ws.send(STEP.format(1))
        assert total(ws.answer()) == number
    assert lent(server)
    assert len(set(lives[0].threads[2:])) == 1
    [session] = server.service.manager.sessions()
    assert session.steps == 199
    assert server.service.manager.metrics.calls["step"].count == 199


@ENVIRONMENTS
def test_the_loop_gets_the_lock_sooner_for_as_long_as_it_lasts(serve_fast: Serve, kind: Any) -> None:
    usual, server = sys.getswitchinterval(), serve_fast(kind)
    for _ in range(3):
        ws = stepping(server)
        assert sys.getswitchinterval() == pytest.approx(LONGEST_TURN)
        ws.tcp.close()
        wait_until(lambda: not lent(server))
        assert sys.getswitchinterval() == pytest.approx(usual)


@ENVIRONMENTS
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_plain_step_is_answered_by_the_loop(serve_fast: Serve, odd: str, kind: Any) -> None:
    server, (answered, send) = serve_fast(kind), ODD[odd]
    ws, expected = stepping(server), 1
    for _ in range(3):
        send(ws)
        assert ws.answer()["type"] == answered
        ws.send(STEP.format(1))
        expected += 3 if answered == "observation" else 1
        assert total(ws.answer()) == expected
        wait_until(lambda: lent(server))


@ENVIRONMENTS
def test_a_reset_begins_a_new_episode(serve_fast: Serve, kind: Any) -> None:
    server = serve_fast(kind)
    ws = stepping(server)
    for seed in range(5):
        ws.send(json.dumps({"type": "reset", "data": {"seed": seed}}))
        assert total(ws.answer()) == seed
        for number in range(1, 4):
            ws.send(STEP.format(1))
            assert total(ws.answer()) == seed + number
    assert server.service.manager.sessions()[0].steps == 3


@ENVIRONMENTS
def test_frames_in_heaps_are_answered_in_their_order(serve_fast: Serve, kind: Any) -> None:
    server, choose, expected = serve_fast(kind), random.Random(5), 1
    ws = stepping(server)
    for _ in range(60):
        size = choose.choice([1, 2, 7, 40])
        ws.tcp.sendall(b"".join([frame(STEP.format(1))] * size))
        for _ in range(size):
            expected += 1
            assert total(ws.answer()) == expected


@ENVIRONMENTS
def test_pings_are_answered(serve_fast: Serve, kind: Any) -> None:
    ws = stepping(serve_fast(kind))
    for number in range(20):
        ws.send(str(number), PING)
        assert ws.receive() == (PONG, str(number).encode())
        ws.send(STEP.format(0))
        assert ws.receive()[0] == TEXT


def test_a_silent_client_is_pinged_and_dropped(serve_fast: Serve) -> None:
    server = serve_fast(Adder, ping_interval=0.2, ping_timeout=0.2)
    ws = stepping(server)
    assert ws.receive() == (PING, b"")
    ws.send(b"", PONG)
    ws.send(STEP.format(1))
    assert total(ws.answer()) == 2
    assert ws.receive() == (PING, b"")
    assert ws.receive()[0] == -1
    wait_until(lambda: server.service.manager.statistics().sessions == 0)
    wait_until(lambda: not lent(server))


@ENVIRONMENTS
@pytest.mark.parametrize("end", ENDS)
def test_every_end_frees_the_session(serve_fast: Serve, end: str, kind: Any) -> None:
    server = serve_fast(kind, max_sessions=1)
    for _ in range(3):
        ENDS[end](stepping(server))
        wait_until(lambda: server.service.manager.statistics().sessions == 0)
        wait_until(lambda: not lent(server))


@pytest.mark.parametrize("end", ["a close frame", "a dropped connection", "a reset connection"])
def test_a_client_that_leaves_during_a_hung_step_frees_its_slot(
    serve_fast: Serve, lives: list[Watched], end: str
) -> None:
    server = serve_fast(Scripted, max_sessions=1)
    ws = server.raw()
    ws.send('{"type":"step","data":{"hang":true}}')
    wait_until(lambda: lives and lives[0].steps)
    ENDS[end](ws)
    wait_until(lambda: server.service.manager.statistics().sessions == 0, 2)
    assert server.socket().step(value=1)["data"]["observation"]["value"] == 1


@ENVIRONMENTS
def test_a_second_client_comes_and_both_go_on(serve_fast: Serve, kind: Any) -> None:
    """Those that may share a thread are lent together; the others are not lent any more."""
    server = serve_fast(kind)
    first = stepping(server)
    second = server.socket()
    assert total(second.step(amount=5)) == 5
    if kind is not Adder:
        wait_until(lambda: not lent(server))
    for number in range(2, 30):
        first.send(STEP.format(1))
        assert total(first.answer()) == number
        assert total(second.step(amount=1)) == number + 4


@ENVIRONMENTS
def test_clients_that_come_and_go_lose_nothing(serve_fast: Serve, kind: Any) -> None:
    """Loans begin and end all the time, at any moment of a step."""
    server, stop = serve_fast(kind, max_sessions=8), threading.Event()

    def visit() -> None:
        while not stop.is_set():
            visitor = server.raw()
            visitor.send(STEP.format(3))
            assert total(visitor.answer()) == 3
            visitor.close()
            time.sleep(0.002)

    visits = threading.Thread(target=visit)
    visits.start()
    try:
        ws = stepping_among_others(server)
        for number in range(2, 1500):
            ws.send(STEP.format(1))
            assert total(ws.answer()) == number
    finally:
        stop.set()
        visits.join()
    wait_until(lambda: server.service.manager.statistics().sessions == 1)
    assert server.service.manager.statistics().running == 0


def stepping_among_others(server: Running) -> RawSocket:
    ws = server.raw()
    ws.send(STEP.format(1))
    assert total(ws.answer()) == 1
    return ws


def test_a_deadline_holds(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, step_timeout=0.3)
    ws = server.socket()
    for _ in range(3):
        assert ws.step(value=1)["type"] == "observation"
    answer = ws.step(sleep=0.6)
    assert answer["data"]["code"] == "STEP_TIMEOUT"
    assert server.service.manager.metrics.hung_calls == 1
    wait_until(lambda: server.service.manager.statistics().running == 0)
    assert server.service.manager.metrics.hung_calls == 0
    assert ws.step(value=2)["data"]["observation"]["value"] == 2


def test_an_error_is_told_and_the_next_step_works(serve_fast: Serve) -> None:
    server = serve_fast(Scripted)
    ws = server.socket()
    for number in range(5):
        assert ws.step(value=number)["data"]["observation"]["value"] == number
        assert "no luck" in ws.step(fail="no luck")["data"]["message"]
        assert "SystemExit" in ws.step(exit=True)["data"]["message"]


class Broken(Scripted):
    """Returns what no JSON can say, once in a while."""

    def step(self, action: Script) -> Did:
        done = super().step(action)
        return Did(value=object()) if action.value == "object" else done


def test_an_answer_that_cannot_be_written_is_an_error(serve_fast: Serve) -> None:
    ws = serve_fast(Broken).socket()
    for _ in range(3):
        assert ws.step(value=1)["type"] == "observation"
        assert ws.step(value="object")["type"] == "error"


def test_a_client_that_does_not_read_gets_every_answer_once_it_does(serve_fast: Serve) -> None:
    server = serve_fast(Scripted)
    ws = server.raw()
    ws.tcp.settimeout(30)
    values = [str(number) * 3000 for number in range(1000, 1600)]
    sender = threading.Thread(
        target=lambda: [ws.send(json.dumps({"type": "step", "data": {"value": value}})) for value in values]
    )
    sender.start()
    time.sleep(0.5)
    assert [ws.answer()["data"]["observation"]["value"] for _ in values] == values
    sender.join()


@ENVIRONMENTS
def test_others_reach_the_session_while_it_is_lent(serve_fast: Serve, kind: Any) -> None:
    server = serve_fast(kind)
    ws = stepping(server, session_resume="new")
    for number in range(2, 30):
        assert server.http()("GET", "/health").status == 200
        ws.send(STEP.format(1))
        assert total(ws.answer()) == number
        [info] = server.service.manager.sessions()
        assert info.steps == number


@ENVIRONMENTS
def test_a_client_returns_to_its_session_from_a_connection_that_was_lent(serve_fast: Serve, kind: Any) -> None:
    server = serve_fast(kind)
    first = server.socket(session_resume="new")
    for _ in range(5):
        first.step(amount=1)
    assert lent(server)
    second = server.socket(session_resume=first.token or "")
    assert total(second.step(amount=1)) == 6
    assert first.end() == 1008
    assert total(second.step(amount=1)) == 7


@ENVIRONMENTS
@pytest.mark.parametrize("busy", [False, True])
def test_a_drain_ends_a_loan(serve_fast: Serve, lives: list[Watched], busy: bool, kind: Any) -> None:
    server = serve_fast(kind)
    ws, stop = stepping(server), threading.Event()

    def go_on() -> None:
        while ws.receive()[0] != -1 and not stop.is_set():
            ws.send(STEP.format(1))

    if busy:
        ws.send(STEP.format(1))
        client = threading.Thread(target=go_on)
        client.start()
    server.server.should_exit = True
    server.thread.join(10)
    stop.set()
    assert not server.thread.is_alive()
    assert [life.closes for life in lives] == [1]
    if busy:
        client.join(10)


def test_a_thread_that_all_sessions_share_is_never_lent(serve_fast: Serve) -> None:
    server = serve_fast(Adder, threads=1)
    ws = server.socket()
    for number in range(1, 10):
        assert total(ws.step(amount=1)) == number
    assert not lent(server)
    assert server.http()("POST", "/reset", {}).status == 200


def test_an_environment_that_allows_one_session_can_be_opened_again_and_again(serve_fast: Serve) -> None:
    server = serve_fast(Alone, max_sessions=1)
    for _ in range(10):
        stepping(server).close()
        wait_until(lambda: server.service.manager.statistics().sessions == 0)


def test_nothing_is_left_open(serve_fast: Serve) -> None:
    server = serve_fast(Adder)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def come_and_go() -> None:
        ws = stepping(server)
        for _ in range(3):
            ws.send('{"type":"state"}')
            ws.answer()
            ws.send(STEP.format(1))
            ws.answer()
        ws.close()
        wait_until(lambda: server.service.manager.statistics().sessions == 0 and not lent(server))

    come_and_go()
    before = descriptors()
    for _ in range(10):
        come_and_go()
    assert descriptors() <= before + 1


def test_a_message_over_the_limit_is_refused_as_ever(serve_fast: Serve) -> None:
    server = serve_fast(Adder, message_bytes=200)
    ws = stepping(server)
    ws.send(STEP.format("1" + " " * 300))
    assert ws.close_code() == 1009


@ENVIRONMENTS
@pytest.mark.parametrize("size", [1791, 1792, 1793, 3584])
def test_frames_that_end_where_a_buffer_does_are_answered_in_their_order(
    serve_fast: Serve, kind: Any, size: int
) -> None:
    """What a thread gives back goes to picows in pieces, and the end of a piece is not the end of what came."""
    ws = stepping(serve_fast(kind))
    long = STEP.format(1)
    long = STEP.format("1" + " " * (size - len(frame(long + " " * 200)) + 200))
    assert len(frame(long)) == size
    ws.tcp.sendall(frame(long) + frame(STEP.format(1)))
    assert [total(ws.answer()) for _ in range(2)] == [2, 3]
    ws.send(STEP.format(1))
    assert total(ws.answer()) == 4


class Slow(Adder):
    """Takes its time to be built."""

    def __init__(self) -> None:
        time.sleep(0.3)
        super().__init__()


def test_the_rest_of_a_frame_is_never_taken_for_a_whole_one(serve_fast: Serve, lives: list[Watched]) -> None:
    ws = serve_fast(Slow).raw()
    inside = b"junk" + frame(STEP.format(100))
    ws.send(STEP.format(1))
    ws.tcp.sendall(bytes([0x81, 0x80 | len(inside)]) + bytes(4) + inside[:4])
    assert total(ws.answer()) == 1
    ws.tcp.sendall(inside[4:])
    assert ws.close_code() == 1007
    [life] = lives
    assert life.steps == 1


# -- several sessions, one thread -----------------------------------------------------------------


def shared(server: Running, count: int) -> list[RawSocket]:
    """Connections that one thread reads."""
    sockets = [server.raw() for _ in range(count)]

    def step() -> bool:
        for ws in sockets:
            ws.send(
                '{"type":"step","data":{}}' if issubclass(server.service.blueprint.cls, Scripted) else STEP.format(0)
            )
            assert ws.answer()["type"] == "observation"
        return readers(server) == [By.THREAD] * count

    wait_until(step)
    return sockets


def readers(server: Running) -> list[By]:
    return [one.reading.by for one in server.service.sockets if isinstance(one, FastSocket)]


def test_one_thread_steps_for_many(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Adder, max_sessions=8)
    sockets = shared(server, 8)
    metrics = server.service.manager.metrics.calls["step"]
    before, were = metrics.count, [len(life.threads) for life in lives]
    for number in range(1, 50):
        for ws in sockets:
            ws.send(STEP.format(1))
        assert {total(ws.answer()) for ws in sockets} == {number}
    assert metrics.count == before + 8 * 49
    assert len({name for life, first in zip(lives, were, strict=True) for name in life.threads[first:]}) == 1


def test_clients_that_hurry_each_other_get_their_own_answers(serve_fast: Serve) -> None:
    server, wrong = serve_fast(Adder, max_sessions=8), []
    sockets = shared(server, 8)

    def hurry(ws: RawSocket, amount: int) -> None:
        for number in range(1, 300):
            if number % 40 == 0:
                ws.send('{"type":"state"}')
                wrong.extend([] if ws.answer()["data"]["total"] == (number - 1) * amount else [amount])
            ws.send(STEP.format(amount))
            wrong.extend([] if total(ws.answer()) == number * amount else [amount])

    clients = [threading.Thread(target=hurry, args=(ws, amount)) for amount, ws in enumerate(sockets, 1)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert wrong == []


def test_a_step_that_hangs_keeps_the_others_waiting_for_a_moment(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Scripted, max_sessions=8)
    hung, *others = shared(server, 5)
    hung.send('{"type":"step","data":{"hang":true}}')
    for ws in others:
        ws.send('{"type":"step","data":{"value":7}}')
    began = time.monotonic()
    assert [ws.answer()["data"]["observation"]["value"] for ws in others] == [7] * 4
    assert time.monotonic() - began < 1
    assert By.THREAD not in readers(server)
    for life in lives:
        life.release.set()
    assert hung.answer()["type"] == "observation"
    for ws in (hung, *others):
        ws.send('{"type":"step","data":{"value":8}}')
        assert ws.answer()["data"]["observation"]["value"] == 8
    assert sum(life.steps for life in lives) % 5 == 0


def test_a_hung_step_has_its_deadline_and_its_client_may_leave(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Scripted, max_sessions=8, step_timeout=0.3)
    late, left, other = shared(server, 3)
    for ws in (late, left):
        ws.send('{"type":"step","data":{"hang":true}}')
    assert late.answer()["data"]["code"] == "STEP_TIMEOUT"
    left.reset()
    wait_until(lambda: server.service.manager.statistics().sessions == 2)
    other.send('{"type":"step","data":{"value":7}}')
    assert other.answer()["data"]["observation"]["value"] == 7
    for life in lives:
        life.release.set()
    wait_until(lambda: server.service.manager.statistics().hung == 0)


def test_steps_that_take_their_time_are_not_done_by_one_thread(serve_fast: Serve) -> None:
    server = serve_fast(Scripted)
    sockets = [server.raw() for _ in range(4)]
    for _ in range(3):
        began = time.monotonic()
        for ws in sockets:
            ws.send('{"type":"step","data":{"sleep":0.1}}')
        assert all(ws.answer()["type"] == "observation" for ws in sockets)
        assert time.monotonic() - began < 0.35
    assert not lent(server)


def test_a_drain_tells_all_whose_connections_are_lent(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Adder, max_sessions=20)
    sockets = shared(server, 20)
    server.begin_to_stop()
    assert {ws.close_code() for ws in sockets} == {1012}
    server.thread.join(10)
    assert [life.closes for life in lives] == [1] * 20


def test_connections_that_cannot_be_watched_stay_with_the_loop(
    serve_fast: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("paddock.server.line.SocketWatch.add", refuse)
    ws = serve_fast(Adder).raw()
    for number in range(1, 4):
        ws.send(STEP.format(1))
        assert total(ws.answer()) == number


def test_the_loop_goes_on_while_a_thread_is_busy(serve_fast: Serve) -> None:
    server, stop = serve_fast(Adder, max_sessions=8), threading.Event()
    sockets = shared(server, 6)

    def go_on(ws: RawSocket) -> None:
        while not stop.is_set():
            ws.send(STEP.format(1))
            ws.answer()

    clients = [threading.Thread(target=go_on, args=(ws,)) for ws in sockets]
    for client in clients:
        client.start()
    try:
        began = time.monotonic()
        for _ in range(20):
            assert server.http()("GET", "/health").json["sessions"] == 6
        assert time.monotonic() - began < 5
    finally:
        stop.set()
        for client in clients:
            client.join()


def test_a_look_finds_what_a_poll_finds() -> None:
    ends = [socket.socketpair() for _ in range(5)]
    with select.epoll() as ready:
        for mine, _ in ends:
            ready.register(mine, select.EPOLLIN)
        look = Looker(ready.fileno(), 3).look
        assert look() == []
        ends[1][1].send(b"x")
        ends[4][1].close()
        assert (
            sorted(look())
            == sorted(ready.poll(0))
            == sorted(
                [(ends[1][0].fileno(), select.EPOLLIN), (ends[4][0].fileno(), select.EPOLLIN | select.EPOLLHUP)]
            )
        )
        for _, theirs in ends[:4]:
            theirs.send(b"x")
        assert len(look()) == 3
    for pair in ends:
        for end in pair:
            end.close()


def test_short_turns_last_as_long_as_any_loan() -> None:
    usual, turns = sys.getswitchinterval(), ShortTurns()
    turns.begin()
    turns.begin()
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(LONGEST_TURN)
    turns.end()
    assert sys.getswitchinterval() == pytest.approx(usual)


@pytest.mark.parametrize("together", [True, False], ids=["lent together", "lent alone"])
def test_a_step_that_hangs_slows_nobody_else(serve_fast: Serve, together: bool) -> None:
    server = serve_fast(Scripted)
    plain = '{"type":"step","data":{}}'
    hanging = server.raw()
    others = [server.raw()] if together else []
    for ws in (hanging, *others):
        for _ in range(20):
            ws.send(plain)
            ws.answer()
    hanging.send('{"type":"step","data":{"hang":true}}')
    time.sleep(0.3)
    other = others[0] if together else server.raw()
    began = time.monotonic()
    for _ in range(100):
        other.send(plain)
        assert other.answer()["type"] == "observation"
    assert time.monotonic() - began < 0.4
