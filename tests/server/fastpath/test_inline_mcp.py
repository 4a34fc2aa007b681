"""Tool calls over HTTP that are answered at once: as the common way would answer them, and once each."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from environments import LIVES, Kit, Watched
from paddock import ToolEnvironment, ToolReturn, tool
from paddock.config import Access
from paddock.server.fastpath import inline_mcp
from paddock.sessions.spec import Where
from running import Running, Serve, wait_until
from wire import Http


class Quick(Watched, ToolEnvironment):
    """Tools that take no time."""

    concurrent_sessions = True
    inline = True

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @tool
    def add(self, amount: int) -> int:
        """Count."""
        self.noted()
        self.count += amount
        return self.count

    @tool
    def fail(self, text: str) -> str:
        """Raise."""
        raise RuntimeError(text)

    @tool
    def win(self) -> ToolReturn:
        """Score, and end the episode."""
        return ToolReturn("won", reward=3, done=True)

    @tool
    def look(self) -> dict[str, int]:
        """See the count."""
        return {"count": self.count}

    @tool
    def say(self, text: str) -> str:
        """Repeat it."""
        return text

    @tool
    def shout(self, size: int) -> str:
        """Return a long text."""
        return "x" * size

    @tool
    def nap(self) -> str:
        """Take a moment."""
        time.sleep(0.0005)
        return "done"

    @tool
    def strange(self) -> Any:
        """Return what no JSON can say."""
        return object()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    """What the short way has answered; None for what it left to the common one."""
    seen: list[bytes | None] = []
    ask = inline_mcp.answer_inline

    def noted(*arguments: Any) -> bytes | None:
        seen.append(ask(*arguments))
        return seen[-1]

    monkeypatch.setattr(inline_mcp, "answer_inline", noted)
    return seen


def rpc(name: Any, session: str | None = None, /, id: Any = 7, **arguments: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments} | ({} if session is None else {"session_id": session})
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


def created(http: Http) -> str:
    token: str = http.rpc("openenv/session/create")["result"]["session_id"]
    return token


def initialized(http: Http) -> str:
    document = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2025-06-18"}}
    return str(http("POST", "/mcp", document).headers["Mcp-Session-Id"])


CALLS: dict[str, Callable[[str], Any]] = {
    "a call": lambda session: rpc("add", session, amount=2),
    "another id": lambda session: rpc("add", session, id="x", amount=2),
    "no arguments": lambda session: {**rpc("look", session), "params": {"name": "look", "session_id": session}},
    "a score and an end": lambda session: rpc("win", session),
    "an unknown tool": lambda session: rpc("nope", session),
    "a wrong argument": lambda session: rpc("add", session, amount="x"),
    "one too many": lambda session: rpc("add", session, amount=1, more=2),
    "a tool that fails": lambda session: rpc("fail", session, text="no luck"),
    "a result that cannot be written": lambda session: rpc("strange", session),
    "an unknown session": lambda session: rpc("add", "nope", amount=2),
    "no session": lambda session: rpc("add", amount=2),
    "no name": lambda session: rpc(None, session),
    "a name that is none": lambda session: rpc(5, session),
    "arguments that are none": lambda session: {
        **rpc("add", session),
        "params": {"name": "add", "arguments": 5, "session_id": session},
    },
    "a notification": lambda session: {k: v for k, v in rpc("add", session, amount=2).items() if k != "id"},
    "two at once": lambda session: [rpc("add", session, amount=2), rpc("add", session, id=8, amount=3)],
    "a list of tools": lambda session: {**rpc("add", session), "method": "tools/list"},
    "an unknown method": lambda session: {**rpc("add", session), "method": "dance"},
    "a wrong id": lambda session: rpc("add", session, id=1.5, amount=2),
    "an unknown version": lambda session: {
        **rpc("add", session, amount=2),
        "params": {**rpc("add", session, amount=2)["params"], "_meta": VERSION},
    },
    "no JSON": lambda session: b"what?",
    "nothing": lambda session: b"",
    "a large body": lambda session: json.dumps(rpc("add", session, amount=2)).encode() + b" " * 70_000,
}
VERSION = {"io.modelcontextprotocol/protocolVersion": "1999-01-01"}


@pytest.mark.parametrize("speaker", [created, initialized])
@pytest.mark.parametrize("kind", CALLS)
def test_both_ways_answer_alike(serve_fast: Serve, kind: str, speaker: Callable[[Http], str]) -> None:
    collected = []
    for way in ("fast", "asgi"):
        http = serve_fast(Quick, through=way).http()
        session = speaker(http)
        headers = {"Mcp_Session_Id": session} if speaker is initialized else {}
        document = CALLS[kind]("SESSION")
        if not isinstance(document, bytes):
            document = json.dumps(document).encode()
        answer = http("POST", "/mcp", document.replace(b"SESSION", session.encode()), **headers)
        after = http("POST", "/mcp", rpc("add", session, amount=1), **headers).json["result"]["data"]
        text = answer.body.replace(session.encode(), b"SESSION")
        collected.append((answer.status, answer.headers["content-type"], json.loads(text) if text else None, after))
    assert collected[0] == collected[1]


def test_a_call_in_an_idle_session_is_answered_at_once(serve_fast: Serve, answers: list[Any]) -> None:
    http = serve_fast(Quick).http()
    session = created(http)
    answers.clear()
    for number in range(1, 50):
        assert http("POST", "/mcp", rpc("add", session, amount=1)).json["result"]["data"] == number
    assert len(answers) == 49
    assert None not in answers


def test_on_threads_nothing_is(serve_fast: Serve, answers: list[Any]) -> None:
    http = serve_fast(Kit).http()
    session = created(http)
    assert http("POST", "/mcp", rpc("add", session, amount=1)).json["result"]["data"] == 1
    assert set(answers) == {None}


def test_a_session_that_is_stepped_elsewhere_keeps_its_order(serve_fast: Serve) -> None:
    """An HTTP call and a socket's step act in one session, one after the other."""
    server = serve_fast(Quick)
    http = server.http()
    session = created(http)
    ws = server.socket(f"/ws?session_id={session}")
    for number in range(20):
        assert http("POST", "/mcp", rpc("add", session, amount=1)).json["result"]["data"] == 2 * number + 1
        step = {"type": "call_tool", "tool_name": "add", "arguments": {"amount": 1}}
        assert ws.step(**step)["data"]["observation"]["result"]["data"] == 2 * number + 2


# -- HTTP by hand ---------------------------------------------------------------------------------


class Connection:
    def __init__(self, server: Running) -> None:
        self.tcp = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        server.clients.callback(self.tcp.close)
        self.read = self.tcp.makefile("rb")
        server.clients.callback(self.read.close)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        status = int(self.read.readline().split()[1])
        headers = {}
        while line := self.read.readline().strip():
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        return status, headers, self.read.read(int(headers.get("content-length", 0)))

    def total(self) -> int:
        parsed: int = json.loads(self.answer()[2])["result"]["data"]
        return parsed


def request(body: bytes, *lines: str, version: str = "1.1", length: int | None = None) -> bytes:
    head = [f"POST /mcp HTTP/{version}", "Host: 127.0.0.1", *lines]
    if length != 0:
        head.append(f"Content-Length: {length or len(body)}")
    return "\r\n".join([*head, "", ""]).encode() + body


@pytest.fixture
def here(serve_fast: Serve, answers: list[Any]) -> tuple[Running, Connection, bytes]:
    server = serve_fast(Quick)
    body = json.dumps(rpc("add", created(server.http()), amount=1)).encode()
    answers.clear()
    return server, Connection(server), body


def test_requests_in_a_row_are_answered_in_a_row(here: tuple[Running, Connection, bytes]) -> None:
    """Those of the short way and those of the common one: the list of tools is one of the latter."""
    _, connection, body = here
    tools = body.replace(b"tools/call", b"tools/list")
    connection.tcp.sendall((request(body) * 5 + request(tools) + request(body)) * 3)
    for row in range(3):
        assert [connection.total() for _ in range(5)] == [6 * row + number for number in range(1, 6)]
        assert "tools" in json.loads(connection.answer()[2])["result"]
        assert connection.total() == 6 * row + 6


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_request_may_come_in_pieces(here: tuple[Running, Connection, bytes], size: int, answers: list[Any]) -> None:
    _, connection, body = here
    for number in range(1, 3):
        data = request(body)
        for begins in range(0, len(data), size):
            connection.tcp.sendall(data[begins : begins + size])
            time.sleep(0.0005)
        assert connection.total() == number
    assert None not in answers


@pytest.mark.parametrize(
    ("lines", "version"),
    [(["Connection: close"], "1.1"), ([], "1.0"), (["Expect: 100-continue"], "1.1")],
)
def test_what_http_wants_otherwise_goes_the_common_way(
    here: tuple[Running, Connection, bytes], lines: list[str], version: str, answers: list[Any]
) -> None:
    _, connection, body = here
    connection.tcp.sendall(request(body, *lines, version=version))
    status, _, reply = connection.answer()
    if status == 100:
        status, _, reply = connection.answer()
    assert (status, json.loads(reply)["result"]["data"]) == (200, 1)
    assert answers == []
    if not any("Expect" in line for line in lines):
        assert connection.read.read() == b""


def test_a_body_in_chunks(here: tuple[Running, Connection, bytes], answers: list[Any]) -> None:
    _, connection, body = here
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    connection.tcp.sendall(request(chunks, "Transfer-Encoding: chunked", length=0))
    assert connection.total() == 1
    assert answers == []


def test_a_client_that_leaves_amid_a_request_has_asked_nothing(here: tuple[Running, Connection, bytes]) -> None:
    server, connection, body = here
    connection.tcp.sendall(request(body)[:-5])
    connection.read.close()
    connection.tcp.close()
    another = Connection(server)
    another.tcp.sendall(request(body))
    assert another.total() == 1


def test_a_client_that_does_not_read_is_not_read(here: tuple[Running, Connection, bytes]) -> None:
    server, connection, body = here
    text, count = "x" * 20_000, 1_000
    large = body.replace(b'"add"', b'"say"').replace(b'{"amount": 1}', json.dumps({"text": text}).encode())
    sender = threading.Thread(target=connection.tcp.sendall, args=(request(large) * count,))
    sender.start()
    time.sleep(1)
    assert sender.is_alive(), "the server has read on"
    other = Connection(server)
    other.tcp.sendall(request(body))
    assert other.total() == 1
    for _ in range(count):
        assert json.loads(connection.answer()[2])["result"]["data"] == text
    sender.join()


def test_calls_that_came_together_do_not_fill_the_memory(
    here: tuple[Running, Connection, bytes], answers: list[Any]
) -> None:
    """Their answers are a hundred times as large as they are, and nobody reads them."""
    _, connection, body = here
    count, size = 300, 100_000
    shout = body.replace(b'"add"', b'"shout"').replace(b'{"amount": 1}', b'{"size": %d}' % size)
    connection.tcp.sendall(request(shout) * count)
    time.sleep(0.5)
    assert sum(len(answer) for answer in answers if answer) < 10 * size
    for _ in range(count):
        assert len(json.loads(connection.answer()[2])["result"]["data"]) == size


class Slow(Quick):
    """Another one takes its time to be built."""

    def __init__(self) -> None:
        super().__init__()
        time.sleep(1.5 if len(LIVES) > 1 else 0)


def test_a_slow_request_behind_a_quick_one_is_waited_for(serve_fast: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.server.listening.KEEP_ALIVE_SECONDS", 1)
    server = serve_fast(Slow)
    quick = json.dumps(rpc("add", created(server.http()), amount=1)).encode()
    slow = json.dumps(rpc("add", amount=5)).encode()
    connection = Connection(server)
    connection.tcp.sendall(request(quick) + request(slow))
    assert [connection.total() for _ in range(2)] == [1, 5]


class PastSteps(Quick):
    mcp_calls_are_steps = False


def test_a_call_waits_for_the_thread_that_has_the_session(serve_fast: Serve) -> None:
    """Steps that turned out slow are on threads, calls are not: both act in one session, each exactly once."""
    server = serve_fast(PastSteps)
    http = server.http()
    session = created(http)
    server.service.spec.step.where = Where.THREAD
    ws, stop, steps = server.socket(f"/ws?session_id={session}"), threading.Event(), []

    def go_on() -> None:
        while not stop.is_set():
            ws.step(type="call_tool", tool_name="nap", arguments={})
            steps.append(1)

    client = threading.Thread(target=go_on)
    client.start()
    try:
        for number in range(1, 300):
            answer = http("POST", "/mcp", rpc("add", session, amount=1))
            assert (answer.status, answer.json["result"]["data"]) == (200, number)
            time.sleep(0.0007)
    finally:
        stop.set()
        client.join()
    assert steps


def test_a_token_is_wanted(serve_fast: Serve, answers: list[Any]) -> None:
    http = serve_fast(Quick, access=Access(token="secret")).http()
    own = {"Authorization": "Bearer secret"}
    session = http("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}, **own)
    body = rpc("add", session.json["result"]["session_id"], amount=1)
    for wrong in ({}, {"Authorization": "Bearer other"}):
        assert http("POST", "/mcp", body, **wrong).status == 401
    assert set(answers) == {None}
    assert http("POST", "/mcp", body, **own).json["result"]["data"] == 1
    assert answers[-1] is not None


def test_strange_pages_are_refused(serve_fast: Serve) -> None:
    http = serve_fast(Quick).http()
    body = rpc("add", created(http), amount=1)
    assert http("POST", "/mcp", body, Origin="https://elsewhere.example").status == 403
    assert http("POST", "/mcp", body).json["result"]["data"] == 1


def test_a_broken_server_says_so_and_lives(serve_fast: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    http = serve_fast(Quick).http()
    body = rpc("add", created(http), amount=1)
    monkeypatch.setattr(inline_mcp, "respond_inline", lambda *_: 1 / 0)
    assert http("POST", "/mcp", body).status == 500
    monkeypatch.undo()
    assert http("POST", "/mcp", body).json["result"]["data"] == 1


def test_a_drained_server_carries_out_nothing(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Quick)
    http = server.http()
    body = rpc("add", created(http), amount=1)
    assert http("POST", "/mcp", body).json["result"]["data"] == 1
    server.begin_to_stop()
    wait_until(lambda: lives[0].closes == 1)
    before = lives[0].steps
    with suppress(OSError):
        http("POST", "/mcp", body)
    assert lives[0].steps == before == 1
