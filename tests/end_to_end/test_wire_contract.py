"""The WebSocket wire, exchange by exchange: what is sent, and the answer that must come back.

Each table runs against OpenEnv's server, which is the oracle, and against Paddock.
Where Paddock answers otherwise on purpose, a test of its own says so.
"""

from typing import Any

import pytest

from .messages import (
    NEGATIVE,
    NOT_A_DICTIONARY,
    NOT_AN_INTEGER,
    NOT_PERMITTED,
    REQUIRED,
    Table,
    counted,
    exchanges,
    failed,
    refused,
    rpc,
    rpc_error,
    step,
    violation,
)
from .processes import Server
from .shapes import Including, Matching, Some
from .wire import Closed, Socket, occupied, request

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(60, func_only=True)]


def unknown(kind: str) -> dict[str, Any]:
    return failed("UNKNOWN_TYPE", f"Unknown message type: {kind}")


NOT_JSON = failed("INVALID_JSON", Matching("^Invalid JSON: ."))
HUGE = 10**30 + 1

COUNTER_FRAMES: Table = {
    "reset": ({"type": "reset"}, counted(0, None)),
    "reset with arguments": ({"type": "reset", "data": {"seed": 1, "episode_id": "mine"}}, counted(0, None)),
    "state before any reset": (
        {"type": "state"},
        {"type": "state", "data": Including(step_count=0, total=0)},
    ),
    "step before any reset": (step(amount=3), counted(3, 3.0)),
    "step to the end": (step(amount=10), counted(10, 10.0, done=True)),
    "number in a string": (step(amount="4"), counted(4, 4.0)),
    "whole float": (step(amount=3.0), counted(3, 3.0)),
    "true": (step(amount=True), counted(1, 1.0)),
    "integer beyond 64 bits": (step(amount=HUGE), counted(HUGE, float(HUGE), done=True)),
    "action metadata": (step(amount=3, metadata={"note": 1}), counted(3, 3.0)),
    "step below the minimum": (
        step(amount=-1),
        refused(violation("greater_than_equal", ["amount"], NEGATIVE, -1, ge=0)),
    ),
    "step without its field": (step(), refused(violation("missing", ["amount"], REQUIRED, {}))),
    "step with text": (step(amount="x"), refused(violation("int_parsing", ["amount"], NOT_AN_INTEGER, "x"))),
    "step with null": (
        step(amount=None),
        refused(violation("int_type", ["amount"], "Input should be a valid integer", None)),
    ),
    "step with a fraction": (
        step(amount=1.5),
        refused(
            violation(
                "int_from_float",
                ["amount"],
                "Input should be a valid integer, got a number with a fractional part",
                1.5,
            )
        ),
    ),
    "step with a field too many": (
        step(amount=1, oops=2),
        refused(violation("extra_forbidden", ["oops"], NOT_PERMITTED, 2)),
    ),
    "step wrapped as over HTTP": (
        step(action={"amount": 1}),
        refused(
            violation("missing", ["amount"], REQUIRED, {"action": {"amount": 1}}),
            violation("extra_forbidden", ["action"], NOT_PERMITTED, {"amount": 1}),
        ),
    ),
    "step with list_tools": (
        step(type="list_tools"),
        refused(
            violation("missing", ["amount"], REQUIRED, {"type": "list_tools"}),
            violation("extra_forbidden", ["type"], NOT_PERMITTED, "list_tools"),
        ),
    ),
    "step with bad metadata": (
        step(amount=1, metadata=3),
        refused(violation("dict_type", ["metadata"], NOT_A_DICTIONARY, 3)),
    ),
    "step without data": (
        {"type": "step"},
        refused(violation("missing", ["data"], REQUIRED, {"type": "step"})),
    ),
    "step with null data": (
        {"type": "step", "data": None},
        refused(violation("dict_type", ["data"], NOT_A_DICTIONARY, None)),
    ),
    "step with a list": (
        {"type": "step", "data": [1]},
        refused(violation("dict_type", ["data"], NOT_A_DICTIONARY, [1])),
    ),
    "step with an envelope key too many": (
        {"type": "step", "data": {"amount": 1}, "extra": 2},
        refused(violation("extra_forbidden", ["extra"], NOT_PERMITTED, 2)),
    ),
    "reset with null data": (
        {"type": "reset", "data": None},
        refused(violation("dict_type", ["data"], NOT_A_DICTIONARY, None)),
    ),
    "reset with a list": (
        {"type": "reset", "data": []},
        refused(violation("dict_type", ["data"], NOT_A_DICTIONARY, [])),
    ),
    "reset with an envelope key too many": (
        {"type": "reset", "extra": 1},
        refused(violation("extra_forbidden", ["extra"], NOT_PERMITTED, 1)),
    ),
    "state with data": (
        {"type": "state", "data": {}},
        refused(violation("extra_forbidden", ["data"], NOT_PERMITTED, {})),
    ),
    "close with data": (
        {"type": "close", "data": {}},
        refused(violation("extra_forbidden", ["data"], NOT_PERMITTED, {})),
    ),
    "unknown type": ({"type": "bogus", "data": 1}, unknown("bogus")),
    "type in capitals": ({"type": "RESET"}, unknown("RESET")),
    "empty type": ({"type": ""}, unknown("")),
    "no type": ({"data": 1}, unknown("")),
    "null type": ({"type": None}, unknown("None")),
    "number as type": ({"type": 5}, unknown("5")),
    "list as type": ({"type": ["a"]}, unknown("['a']")),
    "object as type": ({"type": {}}, unknown("{}")),
    "empty text": ("", NOT_JSON),
    "spaces": ("   ", NOT_JSON),
    "plain words": ("not json", NOT_JSON),
    "half an object": ("{", NOT_JSON),
    "text after the object": ('{"type":"state"} x', NOT_JSON),
    "single quotes": ("{'type':'state'}", NOT_JSON),
    "trailing comma": ('{"type":"state",}', NOT_JSON),
    "mcp without data": ({"type": "mcp"}, refused(violation("missing", ["data"], REQUIRED, {"type": "mcp"}))),
    "mcp with a list": (
        {"type": "mcp", "data": []},
        refused(violation("dict_type", ["data"], NOT_A_DICTIONARY, [])),
    ),
}


@exchanges(COUNTER_FRAMES)
def test_the_counter_answers_a_frame(counter: Server, sent: Any, answer: Any) -> None:
    with Socket(counter.url) as connection:
        assert connection.ask(sent) == answer
        assert connection.ask({"type": "reset"}) == counted(0, None)


def test_an_episode_counts_up_to_its_end_and_beyond(counter: Server) -> None:
    with Socket(counter.url) as connection:
        connection.ask({"type": "reset", "data": {"episode_id": "mine"}})
        assert connection.ask(step(amount=3)) == counted(3, 3.0)
        assert connection.ask(step(amount=8)) == counted(11, 8.0, done=True)
        assert connection.ask(step(amount=0)) == counted(11, 0.0, done=True)
        state = {"episode_id": "mine", "step_count": 3, "total": 11}
        assert connection.ask({"type": "state"}) == {"type": "state", "data": state}


def test_a_reset_starts_a_new_episode(counter: Server) -> None:
    with Socket(counter.url) as connection:
        connection.ask({"type": "reset"})
        first = connection.ask({"type": "state"})["data"]["episode_id"]
        connection.ask(step(amount=3))
        connection.ask({"type": "reset"})
        assert connection.ask({"type": "state"})["data"] == Including(step_count=0, total=0)
        assert connection.ask({"type": "state"})["data"]["episode_id"] not in (first, None)


def test_a_refused_frame_changes_nothing(counter: Server) -> None:
    with Socket(counter.url) as connection:
        connection.ask(step(amount=3))
        for sent in (step(amount=-1), step(), "{", {"type": "bogus"}):
            assert connection.ask(sent)["type"] == "error"
        assert connection.ask({"type": "state"})["data"] == Including(step_count=1, total=3)


def test_requests_sent_ahead_are_answered_in_order(counter: Server) -> None:
    with Socket(counter.url) as connection:
        for amount in (1, 2, 3):
            connection.send(step(amount=amount))
        assert [connection.receive()["data"]["observation"]["total"] for _ in range(3)] == [1, 3, 6]


def test_a_close_message_is_answered_by_closing(counter: Server) -> None:
    with Socket(counter.url) as connection:
        connection.send({"type": "close"})
        with pytest.raises(Closed) as closed:
            connection.receive()
        assert closed.value.code == 1000


@pytest.mark.parametrize("earlier", [0, 1], ids=["at first", "later"])
def test_text_that_is_not_utf8_closes_the_socket(counter: Server, earlier: int) -> None:
    with Socket(counter.url) as connection:
        for _ in range(earlier):
            connection.ask({"type": "state"})
        connection.send_text_bytes(b'{"type":"\xff"}')
        assert connection.closing_code() == 1007


def test_an_empty_session_id_means_a_new_session(counter: Server) -> None:
    with Socket(counter.url, "/ws?session_id=") as connection:
        assert connection.ask(step(amount=3)) == counted(3, 3.0)


def test_an_unknown_session_id_is_refused(counter: Server) -> None:
    with Socket(counter.url, "/ws?session_id=nope") as connection:
        assert connection.receive() == failed("SESSION_ERROR", "Unknown session_id: nope")
        assert connection.closing_code() == 1000


ODD_FRAMES = {
    "list": "[]",
    "number": "3",
    "null": "null",
    "text": '"text"',
    "true": "true",
    "binary": b'{"type":"bogus"}',
    "bytes": b"\x00\xff",
    "deep list": "[" * 100_000 + "]" * 100_000,
    "deep data": '{"type":"reset","data":{"a":' + "[" * 100_000 + "]" * 100_000 + "}}",
    "long integer": '{"type":"step","data":{"amount":-' + "9" * 5000 + "}}",
}


@pytest.mark.parametrize("sent", ODD_FRAMES.values(), ids=ODD_FRAMES.keys())
def test_paddock_keeps_the_session_after_an_odd_frame(counter_server: Server, sent: str | bytes) -> None:
    with Socket(counter_server.url) as connection:
        connection.ask(step(amount=3))
        assert connection.ask(sent) == {"type": "error", "data": Including(code=Some(str), message=Some(str))}
        assert connection.ask({"type": "state"})["data"] == Including(step_count=1, total=3)


FULL = "Server at capacity: 4/4 sessions active. Cannot accept new connections."
FOUR_OF_FOUR = {"active_sessions": 4, "max_sessions": 4}
CLOSED_WHEN_FULL = {"openenv": 1000, "paddock": 1013}


def test_a_fifth_socket_is_refused(counter: Server) -> None:
    with occupied(counter.url, 4), Socket(counter.url) as fifth:
        assert fifth.receive() == failed("CAPACITY_REACHED", FULL, **FOUR_OF_FOUR)
        assert fifth.closing_code() == CLOSED_WHEN_FULL[counter.framework]


def test_a_fifth_mcp_socket_is_refused(counter: Server) -> None:
    with occupied(counter.url, 4), Socket(counter.url, "/mcp") as fifth:
        assert fifth.receive() == rpc_error(None, -32000, FULL, FOUR_OF_FOUR)
        assert fifth.closing_code() == CLOSED_WHEN_FULL[counter.framework]


def test_a_fifth_session_cannot_be_created(counter: Server) -> None:
    with occupied(counter.url, 4):
        answer = request(counter.url, "POST", "/mcp", rpc("openenv/session/create")).body
        assert answer == rpc_error(1, -32000, FULL, FOUR_OF_FOUR)


def test_single_requests_need_no_slot(counter: Server) -> None:
    with occupied(counter.url, 4):
        assert request(counter.url, "GET", "/health").body == Including(status="healthy")
        assert request(counter.url, "POST", "/reset").status == 200


def test_a_closed_socket_frees_its_slot(counter: Server) -> None:
    with occupied(counter.url, 4):
        pass
    with occupied(counter.url, 4) as connections:
        assert connections[3].ask(step(amount=3)) == counted(3, 3.0)


def test_a_vanished_client_frees_its_slot(counter: Server) -> None:
    with occupied(counter.url, 3), Socket(counter.url) as vanishing:
        vanishing.ask({"type": "state"})
        vanishing.abort()
        with occupied(counter.url, 1) as (latecomer,):
            assert latecomer.ask(step(amount=3)) == counted(3, 3.0)
