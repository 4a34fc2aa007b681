"""`/ws`, through picows and through ASGI alike."""

import json
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from pydantic import computed_field, field_validator
from websockets.sync.client import connect

from environments import (
    Add,
    Adder,
    AsyncKit,
    AsyncScripted,
    Did,
    InlineAdder,
    Kit,
    Script,
    Scripted,
    Watched,
)
from paddock.envs.counter import Counter
from running import Serve, wait_until
from wire import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, random_text

STEP = '{"type":"step","data":{"amount":1}}'
MIB = 1024 * 1024


# -- the wire -------------------------------------------------------------------------------------


def test_an_episode(serve: Serve) -> None:
    ws = serve(Counter).socket()
    assert ws.ask({"type": "reset", "data": {"seed": 1, "episode_id": "mine"}}) == {
        "type": "observation",
        "data": {"observation": {"total": 0, "metadata": {}}, "reward": None, "done": False},
    }
    assert ws.step(amount=3)["data"] == {
        "observation": {"total": 3, "metadata": {}},
        "reward": 3.0,
        "done": False,
    }
    assert ws.step(amount=7)["data"]["done"] is True
    state = ws.ask({"type": "state"})
    assert state == {"type": "state", "data": {"episode_id": "mine", "step_count": 2, "total": 10}}


def test_a_stock_client_gets_no_extra_fields(serve: Serve) -> None:
    ws = serve(Counter).socket()
    assert ws.token is None
    with pytest.raises(TimeoutError):
        ws.receive(0.2)


def test_a_client_that_offers_compression_is_served(serve: Serve) -> None:
    server = serve(Scripted)
    with connect(f"ws://127.0.0.1:{server.port}/ws", proxy=None) as ws:
        ws.send(json.dumps({"type": "step", "data": {"value": "x" * 10_000}}))
        assert json.loads(ws.recv(5))["data"]["observation"]["value"] == "x" * 10_000


def test_acting_needs_no_reset(serve: Serve) -> None:
    assert serve(Adder).socket().step(amount=2)["data"]["observation"]["total"] == 2


def test_sessions_share_no_state(serve: Serve) -> None:
    server = serve(Adder)
    first, second = server.socket(), server.socket()
    assert first.step(amount=2)["data"]["observation"]["total"] == 2
    assert second.step(amount=3)["data"]["observation"]["total"] == 3


def test_frames_sent_before_the_session_is_there_are_answered(serve: Serve) -> None:
    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.2)
            super().__init__()

    ws = serve(Slow).socket()
    for _ in range(5):
        ws.send(STEP)
    assert [ws.receive()["data"]["observation"]["total"] for _ in range(5)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("make", [Adder, InlineAdder])
def test_many_requests_at_once_are_answered_in_order(serve: Serve, make: Any) -> None:
    ws = serve(make).socket()
    for _ in range(100):
        ws.send(STEP)
    assert [ws.receive()["data"]["observation"]["total"] for _ in range(100)] == list(range(1, 101))


def test_answers_come_in_the_order_of_the_requests_whatever_they_are(serve: Serve) -> None:
    ws = serve(Scripted).socket()
    call = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    frames = [
        {"type": "step", "data": {"sleep": 0.1}},
        {"type": "mcp", "data": call},
        {"type": "state"},
        "nonsense",
        {"type": "step", "data": {"value": 1}},
    ]
    for frame in frames:
        ws.send(frame)
    assert [ws.receive()["type"] for _ in frames] == ["observation", "mcp", "state", "error", "observation"]


# -- bad input ------------------------------------------------------------------------------------

BAD = [
    ("", "INVALID_JSON"),
    ("nope", "INVALID_JSON"),
    ("{", "INVALID_JSON"),
    ("{}", "UNKNOWN_TYPE"),
    ('{"type":"dance"}', "UNKNOWN_TYPE"),
    ('{"type":null}', "UNKNOWN_TYPE"),
    ("[]", "VALIDATION_ERROR"),
    ("[1,2]", "VALIDATION_ERROR"),
    ("5", "VALIDATION_ERROR"),
    ("null", "VALIDATION_ERROR"),
    ('"text"', "VALIDATION_ERROR"),
    ('{"type":"step"}', "VALIDATION_ERROR"),
    ('{"type":"step","data":{"amount":-1}}', "VALIDATION_ERROR"),
    ('{"type":"step","data":{"amount":1},"more":1}', "VALIDATION_ERROR"),
    ('{"type":"reset","data":{"seed":-1}}', "VALIDATION_ERROR"),
    (b"binary", "VALIDATION_ERROR"),
    (b'{"type":"state"}', "VALIDATION_ERROR"),
    ("[" * 100_000 + "]" * 100_000, None),
    ('{"type":"step","data":' + '{"a":' * 100_000 + "1" + "}" * 100_001, None),
    ('{"type":"step","data":{"amount":-' + "9" * 5000 + "}}", None),
    ('{"type":"step","data":{"amount":-' + "9" * 4000 + "}}", "VALIDATION_ERROR"),
    ('{"type":"step","data":{"amount":"\\ud800"}}', None),
    ('{"type":"step","data":{"amount":NaN}}', "VALIDATION_ERROR"),
]


def test_bad_input_is_a_clear_error_and_the_connection_is_kept(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(Adder).socket()
    assert ws.step(amount=1)["data"]["observation"]["total"] == 1
    for frame, code in BAD:
        answered = ws.code_of(frame)
        assert code is None or answered == code, frame[:60]
    assert ws.step(amount=1)["data"]["observation"]["total"] == 2
    assert lives[0].steps == 2


def test_a_wrong_field_is_named(serve: Serve) -> None:
    answer = serve(Adder).socket().step(amount="x")
    assert answer["data"]["message"] == "Invalid message"
    (problem,) = answer["data"]["errors"]
    assert (problem["loc"], problem["input"]) == (["amount"], "x")


def test_an_error_about_a_numbered_request_carries_its_number(serve: Serve) -> None:
    ws = serve(Adder).socket()
    answer = ws.ask({"type": "step", "data": {"amount": -1}, "id": 1})
    assert answer["data"]["code"] == "VALIDATION_ERROR"
    assert answer.get("id") == 1


def test_invalid_utf8_ends_the_connection_with_1007(serve: Serve) -> None:
    ws = serve(Adder).raw()
    ws.send(STEP)
    assert ws.answer()["type"] == "observation"
    ws.send(b'{"type":"\xff\xfe"}')
    assert ws.close_code() == 1007


def test_invalid_utf8_in_a_string_ends_the_connection_with_1007(serve: Serve) -> None:
    ws = serve(Kit).raw()
    ws.send(b'{"type":"step","data":{"tool_name":"add","arguments":{"amount":"\xc3\x28"}}}')
    assert ws.close_code() == 1007


@pytest.mark.parametrize("name", ["self", "session_id", "func", "environment", "arguments", "data", "cls"])
def test_a_reset_argument_may_have_any_name(serve_fast: Serve, name: str) -> None:
    class Greedy(Adder):
        def reset(self, **keywords: Any) -> Any:
            return Did(value=sorted(keywords))

    for make in (Adder, Greedy):
        ws = serve_fast(make).socket()
        assert ws.ask({"type": "reset", "data": {name: 1}})["type"] == "observation"


def test_a_fragmented_message_is_put_together(serve: Serve) -> None:
    ws = serve(Adder).raw()
    parts = [STEP[:5], "", STEP[5:20], STEP[20:]]
    for number, part in enumerate(parts):
        ws.send(part, CONTINUATION if number else TEXT, final=number == 3)
    assert ws.answer()["data"]["observation"]["total"] == 1


def test_a_ping_may_come_between_fragments(serve: Serve) -> None:
    ws = serve(Adder).raw()
    ws.send(STEP[:10], TEXT, final=False)
    ws.send(b"are you there", PING)
    assert ws.receive() == (PONG, b"are you there")
    ws.send(STEP[10:], CONTINUATION)
    assert ws.answer()["data"]["observation"]["total"] == 1


def test_a_fragmented_binary_message_is_refused_and_the_connection_kept(serve: Serve) -> None:
    ws = serve(Adder).raw()
    ws.send(b"one", BINARY, final=False)
    ws.send(b"two", CONTINUATION)
    assert ws.answer()["data"]["code"] == "VALIDATION_ERROR"
    ws.send(STEP)
    assert ws.answer()["data"]["observation"]["total"] == 1


def test_a_fragment_out_of_order_ends_the_connection(serve: Serve) -> None:
    ws = serve(Adder).raw()
    ws.send(b"more", CONTINUATION)
    assert ws.close_code() == 1002


BROKEN = {
    "no mask": bytes([0x81, 2]) + b"{}",
    "a reserved bit": bytes([0xC1, 0x82]) + bytes(4) + b"{}",
    "an unknown kind": bytes([0x83, 0x82]) + bytes(4) + b"{}",
    "a long ping": bytes([0x89, 0xFE, 0, 200]) + bytes(4) + bytes(200),
    "a ping in parts": bytes([0x09, 0x80]) + bytes(4),
    "a code that may not be sent": bytes([0x88, 0x82]) + bytes(4) + (1005).to_bytes(2, "big"),
    "half a code": bytes([0x88, 0x81]) + bytes(4) + b"x",
    "more bytes than there are": bytes([0x81, 0xFF]) + (1 << 62).to_bytes(8, "big") + bytes(4),
}


def test_frames_that_break_the_protocol_end_the_connection(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    for name, frame in BROKEN.items():
        ws = server.raw()
        ws.send(STEP)
        ws.answer()
        ws.tcp.sendall(frame)
        ws.tcp.settimeout(3)
        assert ws.close_code() in (1002, 1009), name
        ws.close()
        wait_until(lambda: server.health()["sessions"] == 0)


def test_a_strange_token_is_an_unknown_token(serve: Serve) -> None:
    server = serve(Adder)
    for token in ("", "\xff\xfe", "x" * 8000, "../../etc", "00"):
        ws = server.raw(headers=f"Session-Resume: {token}\r\n")
        assert ws.status == 101
        assert ws.answer()["data"]["code"] == "SESSION_ERROR"
        assert ws.close_code() == 1000


HANDSHAKES = {
    "no upgrade": "GET /ws HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no key": "GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "an old version": "GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 5\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
    "another path": "GET /elsewhere HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
}


def test_a_handshake_that_is_none_is_refused(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Adder)
    for name, request in HANDSHAKES.items():
        with socket.create_connection(("127.0.0.1", server.port), 3) as tcp:
            tcp.sendall(request.encode())
            status = int(tcp.recv(4096).split(b" ", 2)[1])
        assert 400 <= status < 500, name
    assert lives == []


def test_a_handshake_as_firefox_sends_it(serve: Serve) -> None:
    port = serve(Adder).port
    with socket.create_connection(("127.0.0.1", port), timeout=10) as tcp:
        tcp.sendall(
            f"GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        assert tcp.recv(12) == b"HTTP/1.1 101"


def test_an_unfinished_handshake_takes_no_slot(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Adder)
    with socket.create_connection(("127.0.0.1", server.port), 3) as tcp:
        tcp.sendall(b"GET /ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n")
        assert server.health()["sessions"] == 0
        server.begin_to_stop()
        server.thread.join(8)
    assert not server.thread.is_alive()


def test_a_ping_is_answered(serve: Serve) -> None:
    ws = serve(Adder).raw()
    ws.send(b"hello", PING)
    assert ws.receive() == (PONG, b"hello")
    ws.send(b"", PONG)
    ws.send(STEP)
    assert ws.answer()["data"]["observation"]["total"] == 1


def test_a_20_mb_message_is_taken_and_answered(serve: Serve) -> None:
    ws = serve(Scripted).socket()
    text = random_text(20 * MIB)
    assert ws.step(value=text, timeout=30)["data"]["observation"]["value"] == text


def test_a_20_mb_message_in_fragments_is_taken(serve: Serve) -> None:
    ws = serve(Scripted).raw()
    text = random_text(20 * MIB)
    frame = json.dumps({"type": "step", "data": {"value": text}})
    pieces = [frame[start : start + 700_000] for start in range(0, len(frame), 700_000)]
    for number, piece in enumerate(pieces):
        ws.send(piece, CONTINUATION if number else TEXT, final=number == len(pieces) - 1)
    assert ws.answer()["data"]["observation"]["value"] == text


def test_a_message_over_the_limit_ends_the_connection_with_1009(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, message_bytes=MIB)
    assert server.socket().step(value="x" * (MIB - 1000))["type"] == "observation"
    ws = server.raw()
    # The header alone: closing a socket with unread data resets the connection, and the close code may be lost.
    ws.tcp.sendall(struct.pack("!BBQ", 0x80 | TEXT, 0xFF, MIB + 1) + bytes(4))
    assert ws.close_code() == 1009


def test_a_message_over_the_limit_is_not_carried_out(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Scripted, message_bytes=MIB)
    ws = server.raw()
    with suppress(ConnectionError):
        ws.send(json.dumps({"type": "step", "data": {"value": "x" * 2 * MIB}}))
    assert ws.close_code() in (1009, None)
    wait_until(lambda: server.health()["sessions"] == 0)
    assert sum(life.steps for life in lives) == 0


def test_fragments_over_the_limit_end_the_connection_with_1009(serve: Serve) -> None:
    server = serve(Scripted, message_bytes=MIB)
    ws = server.raw()
    for number in range(3):
        ws.send(b"x" * (MIB // 2 - 10), CONTINUATION if number else TEXT, final=False)
    assert ws.close_code() == 1009


# -- what an environment does ---------------------------------------------------------------------


def test_an_exception_is_sent_masked_and_logged_whole(serve: Serve, caplog: Any) -> None:
    ws = serve(Scripted).socket()
    answer = ws.step(fail="cannot log in with password=hunter2")
    assert answer["data"]["code"] == "EXECUTION_ERROR"
    assert answer["data"]["message"] == "RuntimeError: cannot log in with password=***"
    assert "Traceback" in caplog.text
    assert ws.step(value=1)["data"]["observation"]["value"] == 1


@pytest.mark.parametrize("make", [Scripted, AsyncScripted])
def test_a_step_that_exits_ends_nothing(serve: Serve, make: Any) -> None:
    server = serve(make)
    ws = server.socket()
    assert ws.step(exit=True)["data"]["code"] == "EXECUTION_ERROR"
    assert ws.step(value=1)["data"]["observation"]["value"] == 1
    assert server.health()["status"] == "healthy"


class Odd(Scripted):
    """Answers with what JSON can hardly say."""

    def step(self, action: Script) -> Any:
        values = {
            "nan": float("nan"),
            "numpy": {"a": np.arange(3), "b": np.float32(0.5)},
            "bytes": b"\xff",
            "surrogate": "\ud800",
            "object": object(),
        }
        return Did(value=values[action.value])


@pytest.mark.parametrize(("what", "expected"), [("nan", None), ("numpy", {"a": [0, 1, 2], "b": 0.5})])
def test_odd_values_have_a_json_form(serve_fast: Serve, what: str, expected: Any) -> None:
    answer = serve_fast(Odd).socket().step(value=what)
    assert answer["data"]["observation"]["value"] == expected


@pytest.mark.parametrize("what", ["bytes", "surrogate", "object"])
def test_what_json_cannot_say_is_an_error_and_the_connection_is_kept(serve_fast: Serve, what: str) -> None:
    ws = serve_fast(Odd).socket()
    assert ws.step(value=what)["data"]["code"] == "EXECUTION_ERROR"
    assert ws.step(value="nan")["type"] == "observation"


def test_an_async_reset_that_lacks_an_argument_is_answered(serve: Serve) -> None:
    class Wants(AsyncScripted):
        async def reset(self, *, level: int) -> Did:  # type: ignore[override]
            return Did(value=level)

    ws = serve(Wants).socket()
    assert ws.ask({"type": "reset"})["data"]["code"] == "EXECUTION_ERROR"
    assert ws.ask({"type": "reset", "data": {"level": 2}})["data"]["observation"]["value"] == 2


def test_a_failing_factory_is_reported_and_frees_the_slot(serve: Serve) -> None:
    class Broken(Adder):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    server = serve(Broken)
    ws = server.socket()
    answer = ws.receive()["data"]
    assert (answer["code"], answer["factory_name"]) == ("FACTORY_ERROR", "Broken")
    assert ws.end() == 1000
    assert server.health()["sessions"] == 0


# -- capacity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_a_refused_client_gets_the_reason(serve_fast: Serve, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve_fast(Kit)

    async def broken(*_: Any, **__: Any) -> None:
        raise BlockingIOError("a colleague does not listen")

    monkeypatch.setattr(server.service.manager, "open", broken)
    ws = server.socket(path)
    assert "could not be opened" in json.dumps(ws.receive())
    assert ws.end() == 1000


def test_a_full_server_says_so_and_closes_with_1013(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    first = server.socket()
    first.ask({"type": "reset"})
    second = server.socket()
    refused = second.receive()
    assert refused["type"] == "error"
    assert refused["data"]["code"] == "CAPACITY_REACHED"
    assert (refused["data"]["active_sessions"], refused["data"]["max_sessions"]) == (1, 1)
    assert second.end() == 1013


def test_a_slot_is_free_right_after_a_goodbye(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    for _ in range(5):
        ws = server.raw()
        ws.send(STEP)
        assert ws.answer()["type"] == "observation"
        ws.send(b"\x03\xe8", CLOSE)
        assert ws.close_code() == 1000


@pytest.mark.parametrize("code", [1000, 1001, 3000, 4001])
def test_any_goodbye_is_understood(serve: Serve, code: int) -> None:
    server = serve(Adder, max_sessions=1)
    ws = server.raw()
    ws.send(STEP)
    ws.answer()
    ws.send(code.to_bytes(2, "big") + b"bye", CLOSE)
    assert ws.close_code() == code
    wait_until(lambda: server.health()["sessions"] == 0, 1)


def test_a_goodbye_without_a_code_is_understood(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    ws = server.raw()
    ws.send(STEP)
    ws.answer()
    ws.send(b"", CLOSE)
    assert ws.close_code() in (1000, 1005)
    wait_until(lambda: server.health()["sessions"] == 0, 1)


def test_a_slot_is_free_right_after_a_reset_connection(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    ws = server.raw()
    ws.send(STEP)
    ws.answer()
    ws.reset()
    wait_until(lambda: server.health()["sessions"] == 0, 1)
    assert server.socket().step(amount=1)["type"] == "observation"


def test_a_binary_frame_before_the_session_is_there_is_answered_in_its_turn(serve: Serve) -> None:
    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.2)
            super().__init__()

    ws = serve(Slow).raw()
    ws.send(STEP)
    ws.send(b"\x00", BINARY)
    ws.send(STEP)
    assert [ws.answer()["type"] for _ in range(3)] == ["observation", "error", "observation"]


def test_a_client_that_leaves_while_its_session_is_built_leaves_nothing(serve: Serve, lives: list[Watched]) -> None:
    class Slow(Adder):
        def __init__(self) -> None:
            time.sleep(0.3)
            super().__init__()

    server = serve(Slow, max_sessions=1)
    server.raw().reset()
    wait_until(lambda: lives and lives[0].closes, 2)
    assert server.socket().step(amount=1)["type"] == "observation"


def test_new_clients_wait_in_line_when_the_server_says_so(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1, queue_timeout=5)
    first = server.raw()
    first.send(STEP)
    first.answer()
    second = server.socket()
    second.send(STEP)
    with pytest.raises(TimeoutError):
        second.receive(0.3)
    first.reset()
    assert second.receive()["data"]["observation"]["total"] == 1


def test_a_client_may_wait_in_the_queue_and_gets_its_place(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    first = server.raw()
    first.send(STEP)
    first.answer()
    waiting = [server.socket(Queue_Timeout="10", Session_Resume="new")]
    assert waiting[0].receive() == {"type": "queued", "data": {"place": 1}}
    waiting.append(server.socket(Queue_Timeout="10", Session_Resume="new"))
    assert waiting[1].receive() == {"type": "queued", "data": {"place": 2}}
    first.reset()
    assert waiting[0].step(amount=1)["data"]["observation"]["total"] == 1
    assert waiting[1].receive() == {"type": "queued", "data": {"place": 1}}


def test_a_stock_client_in_the_queue_gets_no_frame_it_does_not_know(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    first = server.raw()
    first.send(STEP)
    first.answer()
    second = server.socket(Queue_Timeout="10")
    second.send(STEP)
    first.reset()
    assert second.receive()["type"] == "observation"


def test_the_queue_has_a_deadline(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    server.socket().step(amount=1)
    late = server.socket(Queue_Timeout="0.2")
    refused = late.receive()["data"]
    assert (refused["code"], refused["kind"]) == ("CAPACITY_REACHED", "queue_timeout")
    assert late.end() == 1013


def test_who_leaves_the_queue_is_passed_over(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    first = server.raw()
    first.send(STEP)
    first.answer()
    gone = server.raw(headers="Queue-Timeout: 10\r\n")
    stays = server.socket(Queue_Timeout="10")
    wait_until(lambda: server.health()["waiting"] == 2)
    gone.reset()
    wait_until(lambda: server.health()["waiting"] == 1)
    first.reset()
    assert stays.step(amount=1)["type"] == "observation"


@pytest.mark.parametrize("wish", ["nan", "-1", "soon", "\xb2", "inf", "1e999", ""])
def test_a_strange_wish_is_no_wish(serve: Serve, wish: str) -> None:
    ws = serve(Adder).raw(headers=f"Queue-Timeout: {wish}\r\n")
    ws.send(STEP)
    assert ws.answer()["type"] == "observation"


# -- leaving during a step ------------------------------------------------------------------------


def test_a_running_async_step_is_cancelled_when_its_client_drops(serve: Serve, lives: list[Watched]) -> None:
    server = serve(AsyncScripted, max_sessions=1)
    ws = server.raw()
    ws.send('{"type":"step","data":{"hang":true}}')
    wait_until(lambda: lives and lives[0].steps)
    ws.reset()
    wait_until(lambda: lives[0].cancelled == 1, 1)
    assert server.socket().step(value=1)["type"] == "observation"


def test_a_hung_sync_step_holds_no_slot_when_its_client_drops(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Scripted, max_sessions=1)
    ws = server.raw()
    ws.send('{"type":"step","data":{"hang":true}}')
    wait_until(lambda: lives and lives[0].steps)
    ws.reset()
    wait_until(lambda: server.health()["sessions"] == 0, 1)
    assert server.socket().step(value=1)["type"] == "observation"
    assert lives[0].closes == 0
    lives[0].release.set()
    wait_until(lambda: lives[0].closes == 1)


@pytest.mark.parametrize("make", [Scripted, AsyncScripted])
def test_close_is_handled_during_a_step(serve: Serve, lives: list[Watched], make: Any) -> None:
    server = serve(make, max_sessions=1)
    ws = server.socket()
    ws.send({"type": "step", "data": {"hang": True}})
    wait_until(lambda: lives and lives[0].steps)
    started = time.monotonic()
    ws.send({"type": "close"})
    assert ws.end() == 1000
    assert time.monotonic() - started < 1
    wait_until(lambda: server.health()["sessions"] == 0, 1)
    lives[0].release.set()


def test_close_ends_the_connection_with_1000(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(Adder).socket()
    ws.step(amount=1)
    ws.send({"type": "close"})
    assert ws.end() == 1000
    wait_until(lambda: lives[0].closes == 1, 1)


@pytest.mark.parametrize("make", [Scripted, AsyncScripted])
def test_a_request_has_the_deadline_it_asks_for(serve: Serve, lives: list[Watched], make: Any) -> None:
    ws = serve(make).socket()
    answer = ws.ask({"type": "step", "data": {"hang": True}, "timeout_s": 0.2})
    assert answer["data"]["code"] == "STEP_TIMEOUT"
    lives[0].release.set()
    wait_until(lambda: ws.ask({"type": "state"})["type"] == "state")


def test_every_step_has_the_servers_deadline(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Scripted, step_timeout=0.2)
    ws = server.socket()
    assert ws.step(hang=True)["data"]["code"] == "STEP_TIMEOUT"
    busy = ws.step(value=1)["data"]
    assert (busy["code"], busy["kind"]) == ("SESSION_ERROR", "busy")
    assert server.health()["hung"] == 1
    lives[0].release.set()


def test_a_hung_session_delays_no_other(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Scripted, threads=1)
    hung, free = server.socket(), server.socket()
    hung.send({"type": "step", "data": {"hang": True}})
    wait_until(lambda: any(life.steps for life in lives))
    assert free.step(value=1)["data"]["observation"]["value"] == 1
    for life in lives:
        life.release.set()


def test_a_numbered_step_can_be_cancelled(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(AsyncScripted).socket()
    ws.send({"type": "step", "data": {"hang": True}, "id": 1})
    wait_until(lambda: lives and lives[0].steps)
    answer = ws.ask({"type": "cancel", "data": 1})
    assert (answer["id"], answer["data"]["code"]) == (1, "STEP_CANCELLED")
    assert ws.step(value=1)["data"]["observation"]["value"] == 1


def test_a_numbered_call_can_be_cancelled(serve: Serve, lives: list[Watched]) -> None:
    server = serve(AsyncKit)
    ws = server.socket()
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "hang"}}
    frame = {"type": "mcp", "data": call, "id": 1}
    ws.send(frame)
    wait_until(lambda: server.health()["running"] == 1)
    answer = ws.ask({"type": "cancel", "data": 1})
    assert (answer["id"], answer["data"]["code"]) == (1, "STEP_CANCELLED")
    assert ws.ask(frame) == answer
    assert lives[0].cancelled == 1


class Fragile(Did):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def missing(self) -> str:
        return {"password": "hunter2"}[f"no such {self.value}, password=hunter2"]


class ThreadFragile(Scripted):
    def step(self, action: Script) -> Did:
        done = super().step(action)
        return done if action.value is None else Fragile(value=action.value)


class InlineFragile(ThreadFragile):
    inline = True


class AsyncFragile(AsyncScripted):
    async def step(self, action: Script) -> Did:
        done = await super().step(action)
        return done if action.value is None else Fragile(value=action.value)


@pytest.mark.parametrize("number", [{}, {"id": 1}], ids=["plain", "numbered"])
@pytest.mark.parametrize("make", [ThreadFragile, InlineFragile, AsyncFragile])
def test_an_observation_that_breaks_while_it_is_written_is_an_error(serve: Serve, make: Any, number: Any) -> None:
    ws = serve(make).socket()
    answer = ws.ask({"type": "step", "data": {"value": "key"}, **number})
    assert answer["data"]["code"] == "EXECUTION_ERROR"
    assert "no such key" in answer["data"]["message"]
    assert "hunter2" not in answer["data"]["message"]
    assert ws.step()["type"] == "observation"


# -- coming back ----------------------------------------------------------------------------------


def test_a_dropped_client_comes_back_to_its_session(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    ws = server.raw(headers="Session-Resume: new\r\n")
    token = next(line.split(": ")[1] for line in ws.head.splitlines() if line.lower().startswith("session-id"))
    ws.send(STEP)
    ws.answer()
    ws.reset()
    again = server.socket(Session_Resume=token)
    assert again.step(amount=1)["data"]["observation"]["total"] == 2
    assert again.token == token


def test_a_goodbye_ends_a_session_that_could_be_resumed(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1)
    ws = server.socket(Session_Resume="new")
    ws.step(amount=1)
    ws.connection.close()
    wait_until(lambda: server.health()["sessions"] == 0, 1)


@pytest.mark.parametrize("code", [1001, 1002, 1011])
def test_a_client_that_gave_up_on_its_connection_may_come_back(serve: Serve, code: int) -> None:
    """Libraries say so when a ping was not answered in time."""
    server = serve(Adder, max_sessions=1)
    ws = server.raw(headers="Session-Resume: new\r\n")
    token = next(line.split(": ")[1] for line in ws.head.splitlines() if line.lower().startswith("session-id"))
    ws.send(STEP)
    ws.answer()
    ws.send(code.to_bytes(2, "big") + b"keepalive ping timeout", CLOSE)
    assert ws.close_code() == code
    assert server.socket(Session_Resume=token).step(amount=1)["data"]["observation"]["total"] == 2


def test_a_numbered_request_is_carried_out_once(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(Adder).socket(Session_Resume="new")
    frame = {"type": "step", "data": {"amount": 1}, "id": 1}
    first = ws.ask(frame)
    assert first["id"] == 1
    assert ws.ask(frame) == first
    assert lives[0].steps == 1


def test_a_step_that_ran_while_its_client_was_away_is_not_run_again(serve: Serve, lives: list[Watched]) -> None:
    server = serve(AsyncScripted)
    ws = server.raw(headers="Session-Resume: new\r\n")
    token = next(line.split(": ")[1] for line in ws.head.splitlines() if line.lower().startswith("session-id"))
    frame = {"type": "step", "data": {"sleep": 0.2, "value": "x"}, "id": 1}
    ws.send(json.dumps(frame))
    wait_until(lambda: lives and lives[0].steps)
    ws.reset()
    answer = server.socket(Session_Resume=token).ask(frame)
    assert answer["data"]["observation"]["value"] == "x"
    assert (lives[0].steps, lives[0].cancelled) == (1, 0)


def test_an_unknown_token_is_refused(serve: Serve) -> None:
    ws = serve(Adder).socket(Session_Resume="00000000-0000-4000-8000-000000000000")
    refused = ws.receive()["data"]
    assert (refused["code"], refused["kind"]) == ("SESSION_ERROR", "not_found")
    assert ws.end() == 1000


def test_a_session_that_is_resumed_leaves_its_old_socket(serve: Serve) -> None:
    server = serve(Adder)
    old = server.socket(Session_Resume="new")
    old.step(amount=1)
    new = server.socket(Session_Resume=str(old.token))
    assert new.step(amount=1)["data"]["observation"]["total"] == 2
    assert old.end() == 1008
    assert new.step(amount=1)["data"]["observation"]["total"] == 3


def test_when_the_server_is_full_a_dropped_session_gives_way_only_later(serve: Serve) -> None:
    server = serve(Adder, max_sessions=1, give_way_after=0.5)
    ws = server.raw(headers="Session-Resume: new\r\n")
    ws.send(STEP)
    ws.answer()
    ws.reset()
    assert server.socket().receive()["data"]["code"] == "CAPACITY_REACHED"
    time.sleep(0.6)
    assert server.socket().step(amount=1)["type"] == "observation"


def test_a_dropped_session_whose_step_hangs_gives_way_too(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Scripted, max_sessions=1, give_way_after=0.3, step_timeout=0.3)
    ws = server.raw(headers="Session-Resume: new\r\n")
    ws.send('{"type":"step","data":{"hang":true},"id":1}')
    wait_until(lambda: lives and lives[0].steps)
    ws.reset()
    wait_until(lambda: server.health()["hung"] == 1)
    time.sleep(0.4)
    assert server.socket().step(value=1)["type"] == "observation"
    assert lives[0].closes == 0
    lives[0].release.set()
    wait_until(lambda: lives[0].closes == 1)


def test_a_session_of_a_socket_cannot_be_taken_over_by_its_id(serve: Serve) -> None:
    server = serve(Kit)
    ws, stranger = server.socket(), server.http()
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"}
    own = ws.ask({"type": "mcp", "data": create})["data"]["result"]["session_id"]
    assert server.socket(f"/ws?session_id={own}").receive()["data"]["code"] == "SESSION_ERROR"
    assert server.socket(Session_Resume=own).receive()["data"]["code"] == "SESSION_ERROR"
    assert stranger.rpc("openenv/session/close", {"session_id": own})["error"]["code"] == -32602
    assert stranger.rpc("tools/call", {"name": "look", "session_id": own})["error"]["code"] == -32602
    assert stranger("GET", "/state", session_id=own).status == 404
    assert ws.ask({"type": "state"})["type"] == "state"


# -- shutting down --------------------------------------------------------------------------------


def test_a_running_step_is_answered_before_the_server_goes(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Scripted, drain_grace=5)
    ws, idle = server.socket(), server.socket()
    idle.step(value=1)
    ws.send({"type": "step", "data": {"sleep": 0.5, "value": "kept"}})
    wait_until(lambda: any(life.steps for life in lives[1:]) or len(lives) == 2)
    time.sleep(0.1)
    server.begin_to_stop()
    assert ws.receive()["data"]["observation"]["value"] == "kept"
    assert ws.end() == 1012
    assert idle.end() == 1012
    server.thread.join(5)
    assert [life.closes for life in lives] == [1, 1]


def test_an_idle_socket_is_notified_of_a_shutdown(serve: Serve) -> None:
    server = serve(Adder)
    ws = server.socket()
    ws.step(amount=1)
    server.begin_to_stop()
    assert ws.end() == 1012


def test_a_hung_step_does_not_keep_the_server_up(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Scripted, drain_grace=0.2)
    ws = server.socket()
    ws.send({"type": "step", "data": {"hang": True}})
    wait_until(lambda: lives and lives[0].steps)
    started = time.monotonic()
    server.begin_to_stop()
    ws.end()
    server.thread.join(10)
    assert time.monotonic() - started < 5
    assert lives[0].closes == 1


def test_while_draining_new_clients_are_refused(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Scripted, drain_grace=5)
    ws = server.socket()
    ws.send({"type": "step", "data": {"sleep": 1.0}})
    waiting = server.socket(Queue_Timeout="10")
    wait_until(lambda: lives and lives[0].steps)
    with server.clients.pop_all():
        http = server.http()
        server.begin_to_stop()
        wait_until(lambda: server.service.manager.is_draining())
        assert http("GET", "/health").json["status"] == "draining"
        assert http("POST", "/reset", {}).status == 503
    del waiting


def test_a_dead_client_is_noticed(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Adder, ping_interval=0.3, ping_timeout=0.3)
    ws = server.raw()
    ws.send(STEP)
    ws.answer()
    wait_until(lambda: server.health()["sessions"] == 0, 5)


def test_a_silent_client_that_answers_pings_is_kept(serve_fast: Serve) -> None:
    server = serve_fast(Adder, ping_interval=0.3, ping_timeout=0.3)
    ws = server.socket()
    ws.step(amount=1)
    time.sleep(3)
    assert ws.step(amount=1)["data"]["observation"]["total"] == 2


def test_a_client_that_takes_its_time_with_a_long_answer_is_kept(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, ping_interval=0.3, ping_timeout=1.0)
    ws = server.raw()
    size = 24 * MIB
    ws.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    ws.send(json.dumps({"type": "step", "data": {"value": "x" * size}}))
    got = 0
    while got < size:
        time.sleep(0.02)
        got += len(ws.tcp.recv(256 * 1024))
        assert got, "it was dropped"
    assert server.health()["sessions"] == 1


def test_a_client_that_reads_nothing_is_dropped(serve_fast: Serve) -> None:
    server = serve_fast(Scripted, unread_timeout=0.3)
    ws = server.raw()
    ws.send(json.dumps({"type": "step", "data": {"value": "x" * 24 * MIB}}))
    wait_until(lambda: server.health()["sessions"] == 0, 10)


class Quitting(Add):
    @field_validator("amount")
    @classmethod
    def quit(cls, amount: int) -> int:
        if amount == 9:
            raise SystemExit(3)
        return amount


class InlineQuitter(InlineAdder):
    action_type = Quitting


class Quitter(Adder):
    action_type = Quitting


@pytest.mark.parametrize("make", [InlineQuitter, Quitter])
def test_a_validator_that_exits_ends_nothing(serve: Serve, make: Any) -> None:
    server = serve(make)
    ws, other = server.socket(), server.socket()
    for _ in range(2):
        assert ws.step(amount=1)["type"] == other.step(amount=1)["type"] == "observation"
    assert ws.step(amount=9)["data"]["code"] == "VALIDATION_ERROR"
    other.connection.close()
    assert [ws.step(amount=amount)["type"] for amount in (1, 9, 1)] == ["observation", "error", "observation"]


def test_too_much_that_waits_is_left_unread_until_its_turn(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(Scripted, message_bytes=100_000).raw()
    ws.send('{"type":"step","data":{"hang":true}}')
    wait_until(lambda: lives and lives[0].steps)
    for number in range(3):
        ws.send(json.dumps({"type": "step", "data": {"value": str(number) * 60_000}}))
    lives[0].release.set()
    assert [str(ws.answer()["data"]["observation"]["value"])[:1] for _ in range(4)][1:] == ["0", "1", "2"]


def test_typed_actions_reach_the_environment(serve_fast: Serve) -> None:
    class Checks(Adder):
        def step(self, action: Add) -> Any:
            assert type(action) is Add
            return super().step(action)

    assert serve_fast(Checks).socket().step(amount="4")["data"]["observation"]["total"] == 4
