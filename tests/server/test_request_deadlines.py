"""Half-sent requests on a real socket: each connection is closed at its deadline, and others are not disturbed."""

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paddock.server import http_protocol
from paddock.server.http_protocol import DeadlineProtocol
from paddock.server.listening import StoppableServer, bind, uvicorn_config
from paddock.server.rate_limited_log import RateLimitedLog

HEAD = b"POST / HTTP/1.1\r\nhost: 127.0.0.1\r\n"
WHOLE = HEAD + b"content-length: 2\r\n\r\nhi"


class Quick(DeadlineProtocol):
    head_seconds = 0.3
    body_seconds = 0.3
    body_bytes_per_second = 100_000.0


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; `/slow` reads it late, `/early` not at all."""
    size, more = 0, scope["path"] != "/early"
    if scope["path"] == "/slow":
        await asyncio.sleep(0.8)
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            return
        size, more = size + len(event.get("body", b"")), event.get("more_body", False)
    text = str(size).encode()
    headers = [(b"content-length", str(len(text)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    listening = bind("127.0.0.1", 0)
    ready = threading.Event()
    server = StoppableServer(uvicorn_config(echo, lifespan=False, requests=Quick), ready.set)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    assert ready.wait(10)
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(10)
    listening.close()


@pytest.fixture
def connect(port: int) -> Iterator[Callable[[], socket.socket]]:
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))


Connect = Callable[[], socket.socket]


def read_to_the_end(connection: socket.socket) -> bytes:
    result = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            result += part
    return result


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"", [408]),
        (b"POST", [408]),
        (HEAD, [408]),
        (HEAD + b"x-long: " + b"a" * 5000, [408]),
        (HEAD + b"content-length: 10\r\n\r\n", []),
        (HEAD + b"content-length: 10\r\n\r\nhalf", []),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n", []),
        (WHOLE + b"POST /later HTTP", [200, 408]),
        (HEAD.replace(b"/", b"/early", 1) + b"content-length: 10\r\n\r\nhalf", [200]),
    ],
    ids=["nothing", "word", "head", "long head", "no body", "half body", "half chunks", "half second", "answered"],
)
def test_a_half_sent_request_is_closed(connect: Connect, sent: bytes, statuses: list[int]) -> None:
    connection = connect()
    began = time.monotonic()
    connection.sendall(sent)
    answers = read_to_the_end(connection)
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", answers)] == statuses
    assert 0.2 < time.monotonic() - began < 3.0


@pytest.mark.parametrize("head", [HEAD, HEAD + b"content-length: 1000\r\n\r\n"], ids=["head", "body"])
def test_a_byte_now_and_then_does_not_help(connect: Connect, head: bytes) -> None:
    connection = connect()
    connection.sendall(head)
    began = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 4.0:
            connection.sendall(b"a")
            time.sleep(0.02)
    assert time.monotonic() - began < 3.0


def body_of(connection: socket.socket) -> bytes:
    """The body of the next answer, which may come in several pieces."""
    received = b""
    while not (length := re.search(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n", received)):
        received += connection.recv(4096)
    while len(received) < length.end() + int(length[1]):
        received += connection.recv(4096)
    return received[length.end() :]


def test_whole_requests_are_answered_however_long_the_connection_lives(connect: Connect) -> None:
    connection = connect()
    for _ in range(4):
        connection.sendall(WHOLE)
        assert body_of(connection) == b"2"
        time.sleep(0.2)


def test_a_large_body_may_take_its_time(connect: Connect) -> None:
    connection = connect()
    connection.sendall(HEAD + b"content-length: 200000\r\n\r\n")
    for _ in range(10):
        connection.sendall(b"a" * 20_000)
        time.sleep(0.08)
    assert body_of(connection) == b"200000"


def test_time_before_a_late_read_does_not_count(connect: Connect) -> None:
    connection = connect()
    connection.sendall(HEAD.replace(b"/", b"/slow", 1) + b"content-length: 500000\r\n\r\n" + b"a" * 500_000)
    assert body_of(connection) == b"500000"


def test_a_closed_connection_is_logged(
    connect: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "slow_peer_log", RateLimitedLog())
    with caplog.at_level(logging.WARNING, "paddock.server"):
        connection = connect()
        connection.sendall(HEAD)
        read_to_the_end(connection)
    assert "the headers of its request did not arrive in time" in caplog.text


def test_many_half_open_connections_leave_room_for_others(connect: Connect) -> None:
    half_open = [connect() for _ in range(200)]
    for connection in half_open:
        connection.sendall(HEAD)
    whole = connect()
    whole.sendall(WHOLE)
    assert body_of(whole) == b"2"
    assert all(read_to_the_end(connection).startswith(b"HTTP/1.1 408") for connection in half_open)
