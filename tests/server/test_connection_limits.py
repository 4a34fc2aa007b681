"""Connections that begin something and do not go on are ended; sessions may be idle."""

import json
import os
import resource
import socket
import time

import pytest

from environments import InlineAdder
from paddock.server import http_protocol, vector
from paddock.server.rate_limited_log import RateLimitedLog
from running import Running, Serve, wait_until

QUICK = {"header_timeout": 0.5, "body_timeout": 0.5}
BEGINNINGS = {
    "nothing": b"",
    "half a request line": b"GET /hea",
    "half a head": b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: ",
    "half a handshake": b"GET /ws HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n",
    "blank lines": b"\r\n\r\n",
    "no body": b"POST /reset HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n",
    "half a body": b'POST /reset HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"se',
    "half a call": b'POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n{"se',
    "half a chunk": b"POST /reset HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{",
}


@pytest.fixture(autouse=True)
def fresh_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (http_protocol, "full_log"),
        (http_protocol, "descriptor_log"),
        (http_protocol, "slow_peer_log"),
        (vector, "slow_peer_log"),
    ):
        monkeypatch.setattr(module, name, RateLimitedLog())


def connect(server: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    received = b""
    while data := connection.recv(65536):
        received += data
    return received


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_stalled_connection_is_closed(serve_fast: Serve, beginning: str, caplog: pytest.LogCaptureFixture) -> None:
    connection = connect(serve_fast(InlineAdder, **QUICK))
    connection.sendall(BEGINNINGS[beginning])
    rest_of(connection)
    assert "did not arrive in time" in caplog.text
    connection.close()


@pytest.mark.parametrize("beginning", ["half a head", "blank lines", "half a body"])
def test_a_second_request_has_the_same_deadlines(serve_fast: Serve, beginning: str) -> None:
    connection = connect(serve_fast(InlineAdder, **QUICK))
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b"healthy" in connection.recv(65536)
    connection.sendall(BEGINNINGS[beginning])
    rest_of(connection)
    connection.close()


def test_a_connection_may_rest_between_requests(serve_fast: Serve) -> None:
    client = serve_fast(InlineAdder, **QUICK).http()
    client("GET", "/health")
    before = client.local_port
    time.sleep(1.2)
    client("GET", "/health")
    assert client.local_port == before


def test_a_session_may_be_idle(serve_fast: Serve) -> None:
    server = serve_fast(InlineAdder, **QUICK)
    ws, vector = server.socket(), server.socket("/ws?vector")
    assert ws.step(amount=1)["data"]["observation"]["total"] == 1
    vector.ask([{"type": "open", "session": "a"}])
    time.sleep(2.5)
    assert ws.step(amount=1)["data"]["observation"]["total"] == 2
    step = [{"type": "step", "session": "a", "data": {"amount": 1}}]
    assert vector.ask(step)[0]["data"]["observation"]["total"] == 1


def test_a_vector_that_opens_nothing_is_ended(serve_fast: Serve) -> None:
    assert serve_fast(InlineAdder, **QUICK).socket("/ws?vector").end() == 1008


def test_an_http_answer_that_is_not_read_ends_the_connection(
    serve_fast: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve_fast(InlineAdder, unread_timeout=0.5)
    connection = connect(server)
    request = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
    connection.setblocking(False)
    try:
        for _ in range(2000):
            connection.sendall(request)
    except BlockingIOError:
        pass
    wait_until(lambda: "read nothing for" in caplog.text, 10)
    connection.close()


def test_too_many_connections_are_refused_until_some_end(serve_fast: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve_fast(InlineAdder, max_connections=3, header_timeout=1.0)
    silent = [connect(server) for _ in range(3)]
    wait_until(lambda: len(server.server.server_state.connections) == 3)
    refused = connect(server)
    assert b" 503 " in rest_of(refused)
    assert "max_connections" in caplog.text
    wait_until(lambda: not server.server.server_state.connections)
    assert server.health()["status"] == "healthy"
    for connection in (*silent, refused):
        connection.close()


def test_a_lack_of_descriptors_is_logged_and_passes(serve_fast: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve_fast(InlineAdder)
    ws = server.raw()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(used + 8, 64), before[1]))
    try:
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        wait_until(lambda: "no connection can be accepted" in caplog.text)
        ws.send('{"type":"step","data":{"amount":1}}')
        assert json.loads(ws.receive()[1])["data"]["observation"]["total"] == 1
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert server.health()["status"] == "healthy"
