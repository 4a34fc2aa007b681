"""Connections that picows reads: whatever comes is answered in order, and every end leaves nothing behind."""

import random
import re
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from environments import Adder, Alone, Did, InlineAdder, Script, Scripted, Watched
from odd_frames import ENDS, ODD, STEP, frame, total
from running import Running, Serve, wait_until
from wire import PING, PONG, RawSocket


class InlineScripted(Scripted):
    inline = True


class Affine(Adder):
    """A thread of its own for each session."""

    thread_affine = True


ENVIRONMENTS = pytest.mark.parametrize("kind", [InlineAdder, Affine, Adder], ids=["inline", "affine", "threads"])


def stepping(server: Running) -> RawSocket:
    ws = server.raw()
    ws.send('{"type":"state"}')
    ws.answer()
    ws.send(STEP.format(1))
    assert total(ws.answer()) == 1
    return ws


def both(server: Running) -> tuple[RawSocket, RawSocket]:
    return stepping(server), stepping(server)


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
        ENDS[end](ws)
        wait_until(lambda: server.service.manager.statistics().sessions == 1)
        wait_until(lambda: len(server.service.sockets) == 1)
        assert total(ask(other)) == number + 2


@ENVIRONMENTS
def test_a_replaced_connection_gets_the_reason(serve_fast: Serve, kind: Any) -> None:
    server = serve_fast(kind)
    other, ws = stepping(server), server.raw(headers="Session-Resume: new\r\n")
    assert [total(ask(ws)) for _ in range(3)] == [1, 2, 3]
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
    # uvicorn closes the socket at once. If the step arrives after that, the kernel resets the connection.
    with suppress(*(() if server.service.fastpath else (ConnectionError,))):
        assert ws.close_code() == 1007
        ws.send(STEP.format(1))
    assert total(ask(other)) == 2
    wait_until(lambda: len(server.service.sockets) == 1)
    assert sum(life.steps for life in lives) == before + 1


def test_a_client_that_is_dropped_for_its_silence_leaves_nothing(serve_fast: Serve) -> None:
    server = serve_fast(InlineAdder, ping_interval=0.2, ping_timeout=0.2)
    both(server)
    wait_until(lambda: server.service.manager.statistics().sessions == 0, 10)
    assert not server.service.sockets


def test_a_drain_notifies_every_client(serve_fast: Serve, lives: list[Watched]) -> None:
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
    monkeypatch.setattr("paddock.server.ws.write_answer", lambda *_: 1 / 0)
    if server.service.fastpath is not None:
        monkeypatch.setattr("paddock.server.fastpath.conversation.write_step", lambda *_: 1 / 0)
    ws.send(STEP.format(1))
    assert ws.close_code() == 1011
    monkeypatch.undo()
    assert "could not be handled" in caplog.text
    assert total(ask(other)) == 2


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
def test_clients_that_come_and_go_lose_nothing(serve_fast: Serve, kind: Any) -> None:
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
        ws = stepping(server)
        for number in range(2, 1500):
            ws.send(STEP.format(1))
            assert total(ws.answer()) == number
    finally:
        stop.set()
        visits.join()
    wait_until(lambda: server.service.manager.statistics().sessions == 1)
    assert server.service.manager.statistics().running == 0


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


def test_an_error_is_sent_and_the_next_step_works(serve_fast: Serve) -> None:
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


def test_an_environment_that_allows_one_session_can_be_opened_again_and_again(serve_fast: Serve) -> None:
    server = serve_fast(Alone, max_sessions=1)
    for _ in range(10):
        stepping(server).close()
        wait_until(lambda: server.service.manager.statistics().sessions == 0)


@ENVIRONMENTS
@pytest.mark.parametrize("size", [1791, 1792, 1793, 3584])
def test_frames_that_end_where_a_buffer_does_are_answered_in_their_order(
    serve_fast: Serve, kind: Any, size: int
) -> None:
    """The end of what picows reads at once is not the end of what came."""
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


@pytest.mark.parametrize("together", [True, False], ids=["with others", "alone"])
def test_a_hanging_step_delays_no_other_session(serve_fast: Serve, together: bool) -> None:
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
