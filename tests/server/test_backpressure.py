"""The server does not execute for a peer that does not read, over every kind of connection."""

import json
import socket
import threading
import time
from typing import Any

import pytest

from environments import Add, Adder, InlineAdder, Total, Watched
from paddock import Action, Environment, Observation, ToolEnvironment, tool
from running import Running, Serve, wait_until
from wire import CLOSE, PING, PONG, RawSocket

MIB = 1024 * 1024
STEPS = 64
COUNT = 20_000
"""More small requests than the largest message and the buffers of the kernel have room for together."""
KERNEL = 20
"""So many answers of a mebibyte may be in the buffers of the kernel and in one thread's hands, at most."""


class Large(Observation):
    text: str
    number: int


class Show(Action):
    pass


class Gallery(Watched, Environment[Show, Large, Any]):
    """Small actions, large observations."""

    concurrent_sessions = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Large:
        return Large(text="", number=0)

    def step(self, action: Show) -> Large:
        self.noted()
        return Large(text="x" * MIB, number=self.steps)


class InlineGallery(Gallery):
    inline = True


class OwnThreadGallery(Gallery):
    thread_affine = True


class Tools(Watched, ToolEnvironment):
    concurrent_sessions = True

    @tool
    def show(self) -> str:
        """A large answer."""
        self.noted()
        return "x" * MIB


class InlineTools(Tools):
    inline = True


KINDS = pytest.mark.parametrize(
    "kind", [InlineGallery, Gallery, OwnThreadGallery], ids=["inline", "threads", "own thread"]
)
STEP = {"type": "step", "data": {}}


def settled(lives: list[Watched]) -> int:
    """How many steps were executed, once that number stays the same."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 0.5:
        executed = sum(life.steps for life in lives)
        if executed != before:
            before, since = executed, time.monotonic()
        time.sleep(0.02)
    return before


def number_of(answer: Any) -> int:
    number: int = answer["data"]["observation"]["number"]
    return number


@KINDS
@pytest.mark.parametrize("resume", ["", "Session-Resume: new\r\n"], ids=["plain", "numbered"])
def test_steps_stop_until_their_answers_are_read(serve: Serve, lives: list[Watched], kind: Any, resume: str) -> None:
    server = serve(kind)
    ws, other = server.raw(headers=resume), server.socket()
    for number in range(STEPS):
        ws.send(json.dumps({**STEP, "id": number} if resume else STEP))
    assert 1 <= settled(lives) <= KERNEL
    assert number_of(other.ask(STEP)) == 1
    assert [number_of(ws.answer()) for _ in range(STEPS)] == list(range(1, STEPS + 1))


@KINDS
def test_a_batch_stops_in_the_middle(serve: Serve, lives: list[Watched], kind: Any) -> None:
    server = serve(kind)
    ws = server.raw("/ws?vector")
    for lane in "ab":
        ws.send(json.dumps([{"type": "open", "session": lane}]))
    assert {ws.answer()[0]["type"] for _ in range(2)} == {"opened"}
    ws.send(json.dumps([{**STEP, "session": "ab"[n % 2], "id": n // 2} for n in range(STEPS)]))
    assert 1 <= settled(lives) <= KERNEL
    received: list[Any] = []
    while len(received) < STEPS:
        received += ws.answer()
    for lane in "ab":
        assert [number_of(one) for one in received if one["session"] == lane] == list(range(1, STEPS // 2 + 1))


@KINDS
def test_nothing_is_begun_for_a_connection_that_dropped(serve: Serve, lives: list[Watched], kind: Any) -> None:
    server = serve(kind)
    ws = server.raw("/ws?vector")
    ws.send(json.dumps([{"type": "open", "session": "a"}]))
    token = ws.answer()[0]["data"]["token"]
    ws.send(json.dumps([{**STEP, "session": "a", "id": n, "ack": 0} for n in range(1, STEPS + 1)]))
    before = settled(lives)
    ws.close()
    assert settled(lives) <= before + 2
    again = server.raw("/ws?vector")
    again.send(json.dumps([{"type": "open", "session": "b", "resume": token}]))
    assert again.answer()[0]["type"] == "opened"
    received: list[Any] = []
    again.send(json.dumps([{**STEP, "session": "b", "id": n, "ack": 0} for n in range(1, STEPS + 1)]))
    while len(received) < STEPS:
        received += again.answer()
    assert sorted(number_of(one) for one in received) == list(range(1, STEPS + 1))
    assert sum(life.steps for life in lives) == STEPS


@pytest.mark.parametrize("kind", [InlineTools, Tools], ids=["inline", "threads"])
@pytest.mark.parametrize("path", ["/mcp", "/ws"])
def test_calls_of_tools_stop_too(serve: Serve, lives: list[Watched], kind: Any, path: str) -> None:
    server = serve(kind)
    ws = server.raw(path)
    for number in range(STEPS):
        call = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": "show", "arguments": {}}}
        ws.send(json.dumps(call if path == "/mcp" else {"type": "mcp", "data": call}))
    assert 1 <= settled(lives) <= KERNEL
    answers = [ws.answer() for _ in range(STEPS)]
    ids = [answer["id"] if path == "/mcp" else answer["data"]["id"] for answer in answers]
    assert sorted(ids) == list(range(STEPS))


def show(number: int) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": {"name": "show", "arguments": {}}}


@pytest.mark.parametrize("way", ["POST", "socket"])
def test_a_batch_of_calls_ends_where_its_answers_fill_a_message(serve: Serve, lives: list[Watched], way: str) -> None:
    server = serve(Tools, message_bytes=4 * MIB)
    batch = [show(number) for number in range(20)]
    if way == "POST":
        answers = server.http()("POST", "/mcp", batch).json
    else:
        ws = server.raw("/mcp")
        ws.send(json.dumps(batch))
        answers = ws.answer()
    assert [answer["id"] for answer in answers] == list(range(20))
    executed = [answer for answer in answers if "result" in answer]
    assert sum(life.steps for life in lives) == len(executed) <= 5
    assert "not executed" in answers[-1]["error"]["message"]


class Blocked(Adder):
    def step(self, action: Add) -> Total:
        self.release.wait(10)
        return super().step(action)


def test_a_socket_is_not_read_while_too_many_requests_wait(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Blocked, message_bytes=MIB)
    ws = server.raw()
    opened(ws)
    request = json.dumps({"type": "step", "data": {"amount": 1}})
    sender = threading.Thread(target=lambda: [ws.send(request) for _ in range(COUNT)])
    sender.start()
    wait_until(lambda: lives)
    time.sleep(0.5)
    lives[0].release.set()
    assert [ws.answer()["data"]["observation"]["total"] for _ in range(COUNT)] == list(range(1, COUNT + 1))
    sender.join(10)


def opened(ws: RawSocket) -> None:
    ws.send('{"type":"state"}')
    ws.answer()


def pipelined(server: Running, count: int) -> socket.socket:
    body = b'{"action":{}}'
    request = b"POST /step HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall((request % (len(body), body)).replace(b"host: x", b"host: localhost") * count)
    return connection


def test_pipelined_http_requests_stop(serve_fast: Serve, lives: list[Watched]) -> None:
    connection = pipelined(serve_fast(Gallery), STEPS)
    assert 1 <= settled(lives) <= KERNEL
    received = 0
    while received < STEPS * MIB:
        received += len(connection.recv(MIB))
    connection.close()


def test_many_pipelined_http_requests_are_answered_in_order(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(InlineGallery)
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(request * 5000 + request.replace(b"/health", b"/unknown"))
    received = b""
    while b"404" not in received[-3000:]:
        data = connection.recv(MIB)
        assert data, "it hung up"
        received += data
    assert received.count(b"HTTP/1.1 200 OK") == 5000
    connection.close()


def test_requests_that_were_not_begun_are_not_parsed(serve_fast: Serve) -> None:
    server = serve_fast(Slow)
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    waiting, received = [0], bytearray()
    with connection:
        connection.sendall(request * 5000)
        while received.count(b"HTTP/1.1 200") < 5000:
            waiting += [len(one.pipeline) for one in list(server.server.server_state.connections)]
            piece = connection.recv(MIB)
            assert piece
            received += piece
    assert max(waiting) <= 4096 // len(request) + 1


def test_more_requests_than_may_wait_are_all_answered(serve: Serve) -> None:
    ws = serve(Adder).raw()
    opened(ws)
    for _ in range(3000):
        ws.send('{"type":"step","data":{"amount":1}}')
    assert [ws.answer()["data"]["observation"]["total"] for _ in range(3000)] == list(range(1, 3001))


class Slow(InlineAdder):
    inline = False

    def step(self, action: Add) -> Total:
        time.sleep(0.002)
        return super().step(action)


def test_a_client_whose_requests_wait_is_not_taken_for_dead(serve_fast: Serve) -> None:
    ws = serve_fast(Slow, ping_interval=0.2, ping_timeout=0.2).socket()
    ws.ask({"type": "state"})
    for _ in range(2500):
        ws.send('{"type":"step","data":{"amount":1}}')
    assert [ws.receive()["data"]["observation"]["total"] for _ in range(2500)][-1] == 2500


def test_a_cancel_and_a_ping_pass_requests_that_wait(serve_fast: Serve, lives: list[Watched]) -> None:
    ws = serve_fast(Slow).raw()
    for number in range(400):
        ws.send(json.dumps({"type": "step", "data": {"amount": 1}, "id": number}))
    ws.send(json.dumps({"type": "cancel", "data": 399, "id": 400}))
    ws.send(b"still there", PING)
    kinds = [ws.receive() for _ in range(401)]
    assert (PONG, b"still there") in kinds[:300]
    codes = [json.loads(data)["data"].get("code") for kind, data in kinds if kind == 1]
    assert "STEP_CANCELLED" in codes


def test_a_peer_that_reads_nothing_for_too_long_is_disconnected_and_may_return(
    serve: Serve, lives: list[Watched], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(InlineGallery, unread_timeout=0.5)
    ws = server.raw(headers="Session-Resume: new\r\n")
    token = next(line.split(": ")[1] for line in ws.head.split("\r\n") if line.lower().startswith("session-id"))
    for number in range(STEPS):
        ws.send(json.dumps({**STEP, "id": number}))
    executed = settled(lives)
    wait_until(lambda: "read nothing for" in caplog.text, 10)
    back = server.socket(session_resume=token)
    assert number_of(back.ask({**STEP, "id": STEPS})) > executed


def test_the_end_of_a_peer_that_does_not_read_frees_its_session(serve: Serve) -> None:
    server = serve(Gallery)
    ws: RawSocket = server.raw()
    for _ in range(STEPS):
        ws.send(json.dumps(STEP))
    wait_until(lambda: server.health()["sessions"] == 1)
    ws.send(b"", CLOSE)
    ws.reset()
    wait_until(lambda: server.health()["sessions"] == 0)
