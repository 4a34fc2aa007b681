"""JSON-RPC on its three carriers: POST /mcp, the /mcp socket, and `mcp` frames on /ws.

Each table runs against OpenEnv's server, which is the oracle, and against Paddock.
Where Paddock answers otherwise on purpose, a test of its own says so.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .messages import (
    HELLO_RESULT,
    TAKES_A_MESSAGE,
    Table,
    exchanges,
    failed,
    rpc,
    rpc_error,
    rpc_result,
    said,
    step,
)
from .processes import Server
from .shapes import Including, Matching, Some
from .wire import Reply, Socket, request

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(60, func_only=True)]

Carrier = Callable[[Server, Any], Any]


def posted(server: Server, sent: Any) -> Any:
    reply = request(server.url, "POST", "/mcp", sent)
    assert reply.status == 200
    return reply.body


def on_a_socket(server: Server, sent: Any) -> Any:
    with Socket(server.url, "/mcp") as connection:
        return connection.ask(sent)


def in_a_frame(server: Server, sent: Any) -> Any:
    with Socket(server.url) as connection:
        answer = connection.ask({"type": "mcp", "data": sent})
        assert answer.keys() == {"type", "data"}
        assert answer["type"] == "mcp"
        return answer["data"]


every_carrier = pytest.mark.parametrize("carrier", [posted, on_a_socket, in_a_frame])

LISTED = Including(
    tools=[
        Including(name=name, description=Some(str), inputSchema=TAKES_A_MESSAGE)
        for name in ("echo_message", "echo_with_length")
    ]
)
NAME_MISSING = "Missing 'name' in params"
SESSION_MISSING = "Invalid params - 'session_id' is required"

RPC_CALLS: Table = {
    "list": (rpc("tools/list"), rpc_result(1, LISTED)),
    "call": (
        rpc("tools/call", name="echo_message", arguments={"message": "hi"}),
        rpc_result(1, said("hi")),
    ),
    "call for an object": (
        rpc("tools/call", id="mine", name="echo_with_length", arguments={"message": "hello"}),
        rpc_result("mine", HELLO_RESULT),
    ),
    "call without a name": (rpc("tools/call"), rpc_error(1, -32602, NAME_MISSING)),
    "call with an empty name": (rpc("tools/call", name=""), rpc_error(1, -32602, NAME_MISSING)),
    "unknown method": (rpc("nope"), rpc_error(1, -32601, "Method not found: nope")),
    "close of nothing": (rpc("openenv/session/close"), rpc_error(1, -32602, SESSION_MISSING)),
    "close of an unknown session": (
        rpc("openenv/session/close", session_id="nope"),
        rpc_error(1, -32602, "Unknown session_id: nope"),
    ),
}


@every_carrier
@exchanges(RPC_CALLS)
def test_json_rpc_is_answered(echo: Server, carrier: Carrier, sent: Any, answer: Any) -> None:
    assert carrier(echo, sent) == answer


INVALID_REQUESTS = {
    "no version": {"id": 7, "method": "tools/list"},
    "old version": {"jsonrpc": "1.0", "id": 7, "method": "tools/list"},
    "no method": {"jsonrpc": "2.0", "id": 7},
    "number as method": {"jsonrpc": "2.0", "id": 7, "method": 5},
    "list of params": {"jsonrpc": "2.0", "id": 7, "method": "tools/list", "params": []},
    "key too many": {"jsonrpc": "2.0", "id": 7, "method": "tools/list", "more": 1},
}


@every_carrier
@pytest.mark.parametrize("sent", INVALID_REQUESTS.values(), ids=INVALID_REQUESTS.keys())
def test_an_invalid_request_is_refused(echo: Server, carrier: Carrier, sent: Any) -> None:
    id_told = {"openenv": None, "paddock": 7}[echo.framework]
    assert carrier(echo, sent) == rpc_error(id_told, -32600)


@every_carrier
@pytest.mark.parametrize("id", [1.5, {}, []], ids=["fraction", "object", "list"])
def test_an_unusable_id_is_not_repeated(echo: Server, carrier: Carrier, id: Any) -> None:
    assert carrier(echo, rpc("tools/list", id=id)) == rpc_error(None, -32600)


@every_carrier
def test_an_empty_object_is_no_request(echo: Server, carrier: Carrier) -> None:
    assert carrier(echo, {}) == rpc_error(None, -32600)


@every_carrier
def test_the_counter_has_no_tools_to_offer(counter: Server, carrier: Carrier) -> None:
    unsupported = rpc_error(1, -32603, "Environment does not support MCP")
    assert carrier(counter, rpc("tools/list")) == unsupported
    assert carrier(counter, rpc("tools/call", name="echo_message")) == unsupported


@pytest.mark.parametrize("sent", ["", "{", b"\xff"], ids=["nothing", "half an object", "bytes"])
def test_a_body_that_is_not_json_is_a_parse_error(echo: Server, sent: str | bytes) -> None:
    assert posted(echo, sent) == rpc_error(None, -32700)


@pytest.mark.parametrize("sent", ["", "{"], ids=["nothing", "half an object"])
def test_a_message_that_is_not_json_is_a_parse_error(echo: Server, sent: str) -> None:
    with Socket(echo.url, "/mcp") as connection:
        assert connection.ask(sent) == rpc_error(None, -32700)
        assert connection.ask(rpc("tools/list")) == rpc_result(1, LISTED)


def test_openenv_keys_of_a_result_are_all_there(echo: Server) -> None:
    result = posted(echo, rpc("tools/call", name="echo_message", arguments={"message": "hi"}))["result"]
    assert {"content", "structured_content", "meta", "data", "is_error"} <= result.keys()


@contextmanager
def session(server: Server) -> Iterator[str]:
    """A session made over HTTP, closed at the end if the test has not done so."""
    answer = posted(server, rpc("openenv/session/create"))
    assert answer == rpc_result(1, {"session_id": Some(str)})
    session_id = answer["result"]["session_id"]
    try:
        yield session_id
    finally:
        posted(server, rpc("openenv/session/close", session_id=session_id))


def test_a_session_answers_until_it_is_closed(echo: Server) -> None:
    with session(echo) as session_id:
        call_it = rpc("tools/call", session_id=session_id, name="echo_message", arguments={"message": "hi"})
        unknown_session = f"Unknown session_id: {session_id}"
        assert posted(echo, rpc("tools/list", session_id=session_id)) == rpc_result(1, LISTED)
        assert posted(echo, call_it) == rpc_result(1, said("hi"))
        close = rpc("openenv/session/close", session_id=session_id)
        assert posted(echo, close) == rpc_result(1, {"session_id": session_id, "closed": True})
        assert posted(echo, close) == rpc_error(1, -32602, unknown_session)
        assert posted(echo, call_it) == rpc_error(1, -32602, unknown_session)


def test_a_session_that_never_was_is_unknown(echo: Server) -> None:
    for method in ("tools/list", "openenv/session/close"):
        answer = posted(echo, rpc(method, session_id="nope"))
        assert answer == rpc_error(1, -32602, "Unknown session_id: nope")


def test_a_session_is_kept_while_sockets_come_and_go(echo: Server) -> None:
    with session(echo) as session_id:
        for steps in (1, 2):
            with Socket(echo.url, f"/ws?session_id={session_id}") as connection:
                connection.ask(step(type="list_tools"))
                assert connection.ask({"type": "state"})["data"]["step_count"] == steps
                connection.send({"type": "close"})
                assert connection.closing_code() == 1000


def test_a_session_takes_one_socket_at_a_time(echo: Server) -> None:
    with session(echo) as session_id, Socket(echo.url, f"/ws?session_id={session_id}") as first:
        first.ask({"type": "state"})
        with Socket(echo.url, f"/ws?session_id={session_id}") as second:
            attached = f"Session {session_id} already has an attached WebSocket"
            assert second.receive() == failed("SESSION_ERROR", attached)
        assert first.ask({"type": "state"})["type"] == "state"


def test_closing_an_attached_session_waits_for_its_socket(echo: Server) -> None:
    closing = {"closed": False, "closing": True}
    with session(echo) as session_id:
        with Socket(echo.url, f"/ws?session_id={session_id}") as connection:
            connection.ask({"type": "state"})
            answer = posted(echo, rpc("openenv/session/close", session_id=session_id))
            assert answer == rpc_result(1, {"session_id": session_id, **closing})
            assert connection.ask({"type": "state"})["type"] == "state"
            connection.send({"type": "close"})
            connection.closing_code()
        with Socket(echo.url, f"/ws?session_id={session_id}") as latecomer:
            assert latecomer.receive() == failed("SESSION_ERROR", f"Unknown session_id: {session_id}")


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_a_socket_names_its_session_and_does_not_close_it(echo: Server, path: str) -> None:
    with Socket(echo.url, path) as connection:

        def ask(sent: Any) -> Any:
            if path == "/mcp":
                return connection.ask(sent)
            return connection.ask({"type": "mcp", "data": sent})["data"]

        first, second = ask(rpc("openenv/session/create")), ask(rpc("openenv/session/create"))
        assert first == second == rpc_result(1, {"session_id": Some(str)})
        close_own = rpc("openenv/session/close", session_id=first["result"]["session_id"])
        refusal = "Cannot close active WebSocket-managed session via MCP method"
        assert ask(close_own) == rpc_error(1, -32600, refusal)


def test_a_session_id_means_nothing_on_a_socket_of_its_own(echo: Server) -> None:
    sent = rpc("tools/call", session_id="nope", name="echo_message", arguments={"message": "hi"})
    assert on_a_socket(echo, sent) == rpc_result(1, said("hi"))


@every_carrier
@pytest.mark.parametrize("arguments", [{}, {"message": 3}, {"message": "a", "more": 1}, [1]])
def test_paddock_calls_bad_arguments_invalid_params(echo_server: Server, carrier: Carrier, arguments: Any) -> None:
    sent = rpc("tools/call", name="echo_message", arguments=arguments)
    assert carrier(echo_server, sent)["error"] == Including(code=-32602, message=Some(str))


@every_carrier
def test_paddock_calls_an_unknown_tool_invalid_params(echo_server: Server, carrier: Carrier) -> None:
    answer = carrier(echo_server, rpc("tools/call", name="nope", arguments={}))
    assert answer["error"] == Including(code=-32602, message=Matching("nope"))


def test_paddock_gives_results_both_spellings(echo_server: Server) -> None:
    result = posted(echo_server, rpc("tools/call", name="echo_message", arguments={"message": "hi"}))["result"]
    assert result == Including(isError=False, structuredContent={"result": "hi"})


@pytest.mark.parametrize("carrier", [posted, on_a_socket])
def test_paddock_initializes(echo_server: Server, carrier: Carrier) -> None:
    client = {"name": "test", "version": "1"}
    sent = rpc("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo=client)
    assert carrier(echo_server, sent)["result"] == Including(
        protocolVersion="2025-06-18",
        capabilities=Including(tools=Some(dict)),
        serverInfo=Including(name=Some(str), version=Some(str)),
    )


@every_carrier
def test_paddock_answers_a_ping(echo_server: Server, carrier: Carrier) -> None:
    assert carrier(echo_server, rpc("ping")) == rpc_result(1, {})


def test_paddock_accepts_a_notification_without_a_body(echo_server: Server) -> None:
    sent = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    reply = request(echo_server.url, "POST", "/mcp", sent)
    assert (reply.status, reply.body) == (202, "")


def test_paddock_says_nothing_to_a_notification_on_a_socket(echo_server: Server) -> None:
    with Socket(echo_server.url, "/mcp") as connection:
        connection.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert connection.ask(rpc("ping", id=2)) == rpc_result(2, {})


@pytest.mark.parametrize("sent", ["[]", "3", "null", b"{}"], ids=["list", "number", "null", "binary"])
def test_paddock_keeps_an_mcp_socket_after_an_odd_message(echo_server: Server, sent: str | bytes) -> None:
    with Socket(echo_server.url, "/mcp") as connection:
        assert connection.ask(sent)["error"] == Including(code=Some(int), message=Some(str))
        assert connection.ask(rpc("ping")) == rpc_result(1, {})


@pytest.mark.parametrize("sent", ["[]", "3", "null"], ids=["list", "number", "null"])
def test_a_body_that_is_no_object_is_refused(echo: Server, sent: str) -> None:
    reply: Reply = request(echo.url, "POST", "/mcp", sent)
    assert reply.body["error"]["code"] in (-32700, -32600)
    assert reply.body["id"] is None
