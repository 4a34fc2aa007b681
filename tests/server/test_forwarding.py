"""HTTP requests that arrive at another worker than the one that keeps their session."""

import socket

import pytest

from environments import Adder
from running import Serve
from server.worker_processes import StartServer, WorkerServer
from wire import Http

LONG = b"x" * 30_000


def raw_status(port: int, target: bytes, *headers: bytes) -> int:
    """The status of the answer to a request that no client library would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        lines = [b"GET %b HTTP/1.1" % target, b"Host: 127.0.0.1", b"Connection: close", *headers, b"", b""]
        connection.sendall(b"\r\n".join(lines))
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return int(answer.split(b" ", 2)[1])


@pytest.fixture
def token_elsewhere(worker_server: StartServer) -> tuple[WorkerServer, list[bytes]]:
    """A server, and a session of each of its workers: one of them is never where a request arrives."""
    server = worker_server(2, 64)
    tokens: dict[str, bytes] = {}
    while len(tokens) < 2:
        token = server.http()("POST", "/reset").headers["Session-Id"]
        tokens.setdefault(token[:2], token.encode())
    return server, list(tokens.values())


REQUESTS = {
    "latin-1 header": (b"/state", b"X-Name: caf\xe9"),
    "utf-8 header": (b"/state", "X-Name: naïve ☃".encode()),
    "any byte": (b"/state", b"X-Name: \x80\xff\xfe"),
    "authorization": (b"/state", b"Authorization: Bearer \xff\xe9"),
    "header twice": (b"/state", b"X-Name: a\r\nX-Name: b"),
    "long header": (b"/state", b"X-Name: " + LONG),
    "percent ff": (b"/%ff", b"X-Name: a"),
    "percent garbage": (b"/%zz%00%e9%", b"X-Name: a"),
    "encoded slash": (b"/a%2fb/%2e%2e/state", b"X-Name: a"),
    "query": (b"/state?a=%ff&b=%zz&c", b"X-Name: a"),
    "long path": (b"/" + LONG, b"X-Name: a"),
}


@pytest.mark.parametrize("case", REQUESTS)
def test_odd_requests_are_answered_as_by_one_worker(
    case: str, token_elsewhere: tuple[WorkerServer, list[bytes]], serve_fast: Serve
) -> None:
    server, tokens = token_elsewhere
    alone = serve_fast(Adder)
    target, header = REQUESTS[case]
    token = alone.http()("POST", "/reset").headers["Session-Id"].encode()
    expected = raw_status(alone.port, target, b"Session-Id: " + token, header)
    for named in tokens:
        for _ in range(4):
            assert raw_status(server.port, target, b"Session-Id: " + named, header) == expected
    assert "Traceback" not in (server.folder / "log").read_text()


@pytest.mark.parametrize("path", [b"/metrics", b"/sessions"])
def test_combined_answers_do_not_depend_on_headers(path: bytes, worker_server: StartServer) -> None:
    assert raw_status(worker_server().port, path, b"Authorization: Bearer caf\xe9") == 200


HELLO = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}},
}  # fmt: skip


def open_stream(server: WorkerServer, token: str) -> Http:
    client = server.http_elsewhere(token)
    client.connection.request("GET", "/mcp", headers={"Mcp-Session-Id": token, "Accept": "text/event-stream"})
    return client


def test_the_stream_of_an_mcp_session_may_arrive_at_any_worker(worker_server: StartServer) -> None:
    server = worker_server(capacity=2)
    token = server.http()("POST", "/mcp", HELLO).headers["Mcp-Session-Id"]
    client = open_stream(server, token)
    response = client.connection.getresponse()
    assert (response.status, response.headers["content-type"]) == (200, "text/event-stream")
    assert response.readline() == b": keep-alive\n"
    assert open_stream(server, token).connection.getresponse().status == 409
    assert server.http()("DELETE", "/mcp", mcp_session_id=token).status == 204
    assert response.read().strip() in (b"", b": keep-alive")


def test_a_crashed_mcp_client_makes_room_whichever_worker_has_its_stream(worker_server: StartServer) -> None:
    server = worker_server(capacity=1)
    token = server.http()("POST", "/mcp", HELLO).headers["Mcp-Session-Id"]
    call = {"name": "add", "arguments": {"amount": 1}}
    assert server.http().rpc("tools/call", call, mcp_session_id=token)["result"]["data"]["count"] == 1
    client = open_stream(server, token)
    client.connection.getresponse().readline()
    client.close()
    assert "Mcp-Session-Id" in server.http()("POST", "/mcp", HELLO, queue_timeout="5").headers
