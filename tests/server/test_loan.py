"""A lone connection that its thread reads: nothing is lost, doubled or out of order, whatever happens to it."""

import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from environments import Adder, Alone, Did, Script, Scripted, Watched
from paddock.server.line import MOST, whole_text
from running import Running, Serve, wait_until
from wire import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, RawSocket

STEP = '{{"type":"step","data":{{"amount":{}}}}}'


class Affine(Adder):
    """On a thread of its own."""

    thread_affine = True


ENVIRONMENTS = pytest.mark.parametrize("kind", [Adder, Affine], ids=["pool", "own thread"])


def lent(server: Running) -> bool:
    return server.service.manager.loan is not None


def total(answer: Any) -> int:
    found: int = answer["data"]["observation"]["total"]
    return found


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


def frame(text: str) -> bytes:
    data = text.encode()
    head = bytes([0x81, 0x80 | len(data)]) if len(data) < 126 else struct.pack("!BBH", 0x81, 0xFE, len(data))
    return head + bytes(4) + data


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


def in_pieces(ws: RawSocket, data: bytes, size: int) -> None:
    for begins in range(0, len(data), size):
        ws.tcp.sendall(data[begins : begins + size])
        time.sleep(0.002)


def in_fragments(ws: RawSocket) -> None:
    ws.send('{"type":"step",', final=False)
    ws.send('"data":{"amount":2}}', CONTINUATION)


ODD: dict[str, tuple[str, Callable[[RawSocket], None]]] = {
    "a state": ("state", lambda ws: ws.send('{"type":"state"}')),
    "a deadline": ("observation", lambda ws: ws.send('{"type":"step","data":{"amount":2},"timeout_s":5}')),
    "a wrong action": ("error", lambda ws: ws.send(STEP.format(-1))),
    "no JSON": ("error", lambda ws: ws.send("what?")),
    "an empty message": ("error", lambda ws: ws.send("")),
    "binary": ("error", lambda ws: ws.send(b"\x00\x01", BINARY)),
    "a large step": ("observation", lambda ws: ws.send(STEP.format("2" + " " * 2 * MOST))),
    "fragments": ("observation", in_fragments),
    "half a frame": ("observation", lambda ws: in_pieces(ws, frame(STEP.format(2)), 11)),
    "byte by byte": ("observation", lambda ws: in_pieces(ws, frame(STEP.format(2)), 1)),
    "half a head": ("observation", lambda ws: in_pieces(ws, frame(STEP.format("2" + " " * 200)), 3)),
}


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


ENDS: dict[str, Callable[[RawSocket], None]] = {
    "a close frame": lambda ws: ws.send(struct.pack("!H", 1000), CLOSE),
    "a close message": lambda ws: ws.send('{"type":"close"}'),
    "a dropped connection": lambda ws: ws.close(),
    "a reset connection": lambda ws: ws.reset(),
    "half a frame, then nothing": lambda ws: (ws.tcp.sendall(frame(STEP.format(1))[:9]), ws.close())[1],
}


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
def test_a_second_client_ends_the_loan_and_both_go_on(serve_fast: Serve, kind: Any) -> None:
    server = serve_fast(kind)
    first = stepping(server)
    second = server.socket()
    assert total(second.step(amount=5)) == 5
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


# -- frames ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 5000, 65535])
@pytest.mark.parametrize("mask", [bytes(4), b"\x01\xfe\x7f\x80"])
def test_a_whole_text_frame_is_unmasked(size: int, mask: bytes) -> None:
    payload = random.Random(size).randbytes(size)
    head = bytes([0x81, 0x80 | size]) if size < 126 else struct.pack("!BBH", 0x81, 0xFE, size)
    data = head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
    assert whole_text(data) == payload
    assert whole_text(data + b"\x81") is None
    assert all(whole_text(data[:cut]) is None for cut in range(max(0, len(data) - 300), len(data)))


@pytest.mark.parametrize(
    ("first", "second"),
    [(0x01, 0x80), (0x80, 0x80), (0x82, 0x80), (0x88, 0x80), (0xC1, 0x80), (0x81, 0x00), (0x81, 0xFF)],
)
def test_any_other_frame_is_none(first: int, second: int) -> None:
    assert whole_text(bytes([first, second]) + bytes(12)) is None
    assert all(whole_text(bytes([first, second]) + bytes(more)) is None for more in range(4, 150))
