"""`/mcp` by POST, GET, DELETE and WebSocket, and the sessions that are made there."""

import json
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from environments import Adder, AsyncKit, Kit, SlowToBuild, Watched
from paddock.envs.echo import Echo
from paddock.server.ws import MAX_EARLY_FRAMES
from running import Running, Serve, wait_until
from wire import Http

HELLO = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "0"}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def rpc(method: str, params: Any = None, id: Any = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params or {}}


def created(http: Http) -> str:
    token: str = http.rpc("openenv/session/create")["result"]["session_id"]
    return token


def initialized(http: Http) -> str:
    answer = http("POST", "/mcp", rpc("initialize", HELLO))
    assert answer.json["result"]["protocolVersion"] == "2025-06-18"
    return str(answer.headers["Mcp-Session-Id"])


def begin(server: Running, document: Any, **headers: str) -> Http:
    """A caller that has sent its request and has not been answered yet."""
    caller = server.http()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    caller.connection.request("POST", "/mcp", json.dumps(document), named)
    return caller


# -- POST -----------------------------------------------------------------------------------------


def test_tools_are_listed_without_a_session(serve_fast: Serve, lives: list[Watched]) -> None:
    tools = serve_fast(Kit).http().rpc("tools/list")["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["add", "pause", "fail", "win", "look"]
    assert tools[0]["inputSchema"]["required"] == ["amount"]
    assert lives == []


def test_a_call_without_a_session_has_its_own(serve_fast: Serve, lives: list[Watched]) -> None:
    http = serve_fast(Kit).http()
    for _ in range(2):
        assert http.rpc("tools/call", call("add", amount=2))["result"]["data"] == 2
    wait_until(lambda: [life.closes for life in lives] == [1, 1])


def test_a_result_speaks_both_dialects(serve_fast: Serve) -> None:
    result = serve_fast(Echo).http().rpc("tools/call", call("echo_message", message="hi"))["result"]
    assert result["content"][0] == {"type": "text", "text": "hi", "annotations": None, "meta": None}
    assert result["structuredContent"] == result["structured_content"] == {"result": "hi"}
    assert (result["isError"], result["is_error"], result["data"]) == (False, False, "hi")


@pytest.mark.parametrize(
    ("document", "code"),
    [
        (rpc("dance"), -32601),
        (rpc("resources/list"), -32601),
        (rpc("tools/call"), -32602),
        (rpc("tools/call", {"name": 5}), -32602),
        (rpc("tools/call", {"name": "add", "arguments": 5}), -32602),
        (rpc("tools/call", call("nope")), -32602),
        (rpc("tools/call", call("add")), -32602),
        (rpc("tools/call", call("add", amount="x")), -32602),
        (rpc("tools/call", call("add", amount=1, more=2)), -32602),
        (rpc("tools/call", call("fail", text="x")), -32603),
        (rpc("tools/call", {**call("look"), "session_id": "nope"}), -32602),
        (rpc("openenv/session/close"), -32602),
        (rpc("openenv/session/close", {"session_id": "nope"}), -32602),
        ({"id": 1, "method": "ping"}, -32600),
        ({"id": 1, "jsonrpc": "2.0"}, -32600),
        ({"id": 1, "jsonrpc": "2.0", "method": "ping", "params": [1]}, -32600),
        ({"id": 1, "jsonrpc": "2.0", "method": "ping", "x": 1}, -32600),
    ],
)
def test_an_error_has_its_code_and_keeps_the_id(serve_fast: Serve, document: Any, code: int) -> None:
    answer = serve_fast(Kit).http()("POST", "/mcp", document)
    assert answer.status == 200
    assert (answer.json["error"]["code"], answer.json["id"]) == (code, 1)
    assert answer.json["error"].keys() == {"code", "message", "data"}


@pytest.mark.parametrize(
    ("params", "data"),
    [
        (call("nope"), {"code": "TOOL_ERROR", "error_type": "tool_not_found"}),
        (call("add"), {"code": "TOOL_ERROR", "error_type": "invalid_args"}),
        (call("fail", text="x"), {"code": "TOOL_ERROR", "error_type": "execution_error"}),
        ({**call("look"), "session_id": "nope"}, {"code": "SESSION_ERROR", "kind": "not_found"}),
    ],
)
def test_the_data_of_an_error_names_it(serve_fast: Serve, params: Any, data: dict[str, str]) -> None:
    error = serve_fast(Kit).http().rpc("tools/call", params)["error"]
    assert {key: error["data"].get(key) for key in data} == data


def test_the_data_of_an_error_names_the_deadline_and_its_effect(serve_fast: Serve) -> None:
    server = serve_fast(Kit, step_timeout=0.2)
    http = server.http()
    named = {"session_id": created(http)}
    late = http.rpc("tools/call", {**call("pause", seconds=20), **named})["error"]["data"]
    assert late["code"] == "STEP_TIMEOUT"
    busy = http.rpc("tools/call", {**call("look"), **named})["error"]["data"]
    assert (busy["code"], busy["kind"]) == ("SESSION_ERROR", "busy")


def test_the_data_of_an_error_says_that_the_session_was_closed(serve_fast: Serve) -> None:
    server = serve_fast(AsyncKit)
    token = initialized(server.http())
    waiting = begin(server, rpc("tools/call", call("hang")), mcp_session_id=token)
    wait_until(lambda: server.health()["running"] == 1)
    server.http()("DELETE", "/mcp", mcp_session_id=token)
    closed = json.loads(waiting.connection.getresponse().read())["error"]["data"]
    assert (closed["code"], closed["kind"]) == ("SESSION_ERROR", "closed")
    gone = server.http()("POST", "/mcp", rpc("ping"), mcp_session_id=token).json["error"]["data"]
    assert (gone["code"], gone["kind"]) == ("SESSION_ERROR", "not_found")


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_what_is_not_json_is_a_parse_error(serve_fast: Serve, body: bytes) -> None:
    http = serve_fast(Kit).http()
    answer = http("POST", "/mcp", body)
    assert (answer.status, answer.json["error"]["code"], answer.json["id"]) == (200, -32700, None)
    assert http.rpc("ping")["result"] == {}


@pytest.mark.parametrize("body", [b"5", b"null", b"[]", b'"x"'])
def test_json_that_is_no_request_is_an_invalid_request(serve_fast: Serve, body: bytes) -> None:
    assert serve_fast(Kit).http()("POST", "/mcp", body).json["error"]["code"] == -32600


def test_a_notification_gets_no_answer(serve_fast: Serve) -> None:
    http = serve_fast(Kit).http()
    for method in ("notifications/initialized", "notifications/cancelled", "whatever"):
        answer = http("POST", "/mcp", {"jsonrpc": "2.0", "method": method})
        assert (answer.status, answer.body) == (202, b"")


def test_a_batch_is_answered_as_one(serve_fast: Serve) -> None:
    http = serve_fast(Kit).http()
    batch = [rpc("ping", id=1), {"jsonrpc": "2.0", "method": "notifications/x"}, 5, rpc("dance", id="b")]
    answers = http("POST", "/mcp", batch).json
    assert [(one["id"], one.get("error", {}).get("code")) for one in answers] == [
        (1, None),
        (None, -32600),
        ("b", -32601),
    ]
    assert http("POST", "/mcp", [{"jsonrpc": "2.0", "method": "notifications/x"}]).status == 202


def test_a_secret_in_a_tools_error_is_masked(serve_fast: Serve) -> None:
    error = serve_fast(Kit).http().rpc("tools/call", call("fail", text="password=hunter2"))["error"]
    assert error["message"] == "RuntimeError: password=***"


def test_an_environment_without_tools_says_so(serve_fast: Serve) -> None:
    http = serve_fast(Adder).http()
    assert "MCP" in http.rpc("tools/list")["error"]["message"]
    assert "MCP" in http.rpc("tools/call", call("x"))["error"]["message"]
    assert http.rpc("ping")["result"] == {}


def test_discovery(serve_fast: Serve) -> None:
    response = serve_fast(Kit).http().rpc("server/discover")["result"]
    assert "2026-07-28" in response["supportedVersions"]


def test_a_revision_we_do_not_speak_is_refused(serve_fast: Serve) -> None:
    meta = {"_meta": {"io.modelcontextprotocol/protocolVersion": "1999-01-01"}}
    answer = serve_fast(Kit).http()("POST", "/mcp", rpc("tools/list", meta))
    assert answer.status == 400
    assert "supported" in answer.json["error"]["data"]


def test_a_full_server_says_so(serve_fast: Serve) -> None:
    server = serve_fast(Kit, max_sessions=1)
    http = server.http()
    created(http)
    for method, params in (("openenv/session/create", {}), ("initialize", HELLO)):
        error = http.rpc(method, params)["error"]
        assert (error["code"], error["data"]["active_sessions"], error["data"]["max_sessions"]) == (-32000, 1, 1)


def test_a_factory_that_fails_is_an_answer(serve_fast: Serve) -> None:
    class Broken(Kit):
        def __init__(self) -> None:
            raise RuntimeError("no database")

    http = serve_fast(Broken).http()
    for method, params in (("openenv/session/create", {}), ("tools/call", call("look")), ("initialize", HELLO)):
        answer = http.rpc(method, params)
        assert (answer["error"]["code"], answer["error"]["data"]["factory_name"]) == (-32000, "Broken")


def test_what_json_cannot_say_is_an_answer(serve_fast: Serve) -> None:
    from paddock import ToolEnvironment, tool

    class Odd(ToolEnvironment):
        concurrent_sessions = True

        @tool
        def odd(self) -> Any:
            return {"x": object()}

        @tool
        def surrogate(self) -> str:
            return "\ud800"

    http = serve_fast(Odd).http()
    for name in ("odd", "surrogate"):
        answer = http.rpc("tools/call", call(name), id=9)
        assert (answer["id"], answer["error"]["code"]) == (9, -32603)


# -- sessions by their id -------------------------------------------------------------------------


def test_a_session_keeps_its_environment(serve_fast: Serve) -> None:
    http = serve_fast(Kit).http()
    named = {"session_id": created(http)}
    assert [http.rpc("tools/call", {**call("add", amount=2), **named})["result"]["data"] for _ in range(3)] == [
        2,
        4,
        6,
    ]
    assert http.rpc("openenv/session/close", named)["result"] == {**named, "closed": True}
    assert http.rpc("tools/call", {**call("look"), **named})["error"]["code"] == -32602


@pytest.mark.parametrize("make", [Kit, AsyncKit])
def test_parallel_calls_in_one_session_do_not_interleave(serve_fast: Serve, make: Any) -> None:
    server = serve_fast(make)
    named = {"session_id": created(server.http())}
    answers: list[int] = []

    def add() -> None:
        answers.append(server.http().rpc("tools/call", {**call("add", amount=1), **named})["result"]["data"])

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(1, 9))


def test_calls_count_as_steps(serve: Serve) -> None:
    server = serve(Kit)
    http = server.http()
    named = {"session_id": created(http)}
    http.rpc("tools/call", {**call("add", amount=1), **named})
    ws = server.socket(f"/ws?session_id={named['session_id']}")
    assert ws.ask({"type": "state"})["data"]["step_count"] == 1
    ws.step(type="call_tool", tool_name="add", arguments={"amount": 1})
    assert ws.ask({"type": "state"})["data"]["step_count"] == 2


def test_a_socket_attaches_and_detaches(serve: Serve) -> None:
    server = serve(Kit)
    http = server.http()
    token = created(http)
    first = server.socket(f"/ws?session_id={token}")
    first.step(tool_name="add", arguments={"amount": 3})
    message = server.socket(f"/ws?session_id={token}").receive()["data"]
    assert (message["code"], message["kind"]) == ("SESSION_ERROR", "taken")
    first.send({"type": "close"})
    assert first.end() == 1000
    second = server.socket(f"/ws?session_id={token}")
    assert second.step(tool_name="look")["data"]["observation"]["result"]["data"] == {"count": 3}


def test_an_empty_session_id_means_a_new_session(serve: Serve) -> None:
    assert serve(Kit).socket("/ws?session_id=").ask({"type": "state"})["type"] == "state"


def test_an_unknown_session_id_is_refused(serve: Serve) -> None:
    ws = serve(Kit).socket("/ws?session_id=nope")
    assert ws.receive()["data"]["code"] == "SESSION_ERROR"
    assert ws.end() == 1000


def test_closing_an_attached_session_waits_for_its_socket(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Kit)
    http = server.http()
    token = created(http)
    ws = server.socket(f"/ws?session_id={token}")
    ws.step(tool_name="look")
    answer = http.rpc("openenv/session/close", {"session_id": token})["result"]
    assert answer == {"session_id": token, "closed": False, "closing": True}
    assert ws.step(tool_name="look")["type"] == "observation"
    ws.send({"type": "close"})
    ws.end()
    wait_until(lambda: lives[0].closes == 1)
    assert http.rpc("openenv/session/close", {"session_id": token})["error"]["code"] == -32602


def test_closing_a_session_with_an_open_stream_waits_for_the_stream(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Kit)
    http, stream = server.http(), server.http()
    token = initialized(http)
    stream.connection.request("GET", "/mcp", headers={"Mcp-Session-Id": token})
    stream.connection.getresponse()
    assert http.rpc("openenv/session/close", {"session_id": token})["result"]["closed"] is False
    stream.close()
    wait_until(lambda: lives[0].closes == 1, 3)


def test_a_crashed_client_of_a_full_server_gives_its_slot_back(serve: Serve) -> None:
    server = serve(Kit, max_sessions=1, give_way_after=0.3)
    ws = server.raw(f"/ws?session_id={created(server.http())}")
    ws.send('{"type":"state"}')
    ws.answer()
    ws.reset()
    time.sleep(0.5)
    assert server.socket().ask({"type": "state"})["type"] == "state"


def test_a_dropped_socket_does_not_cancel_a_call_that_came_over_http(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(Kit)
    http = server.http()
    token = created(http)
    ws = server.raw(f"/ws?session_id={token}")
    ws.send('{"type":"state"}')
    ws.answer()
    answers: list[Any] = []
    params = {**call("pause", seconds=0.5), "session_id": token}
    caller = threading.Thread(target=lambda: answers.append(http.rpc("tools/call", params)))
    caller.start()
    time.sleep(0.2)
    ws.reset()
    caller.join()
    assert answers[0]["result"]["data"] == "done"


def test_a_caller_that_leaves_takes_only_its_own_call(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(AsyncKit)
    http, leaving = server.http(), server.http()
    named = {"session_id": created(http)}
    leaving.connection.request("POST", "/mcp", json.dumps(rpc("tools/call", {**call("hang"), **named}, id=1)))
    time.sleep(0.2)
    answers: list[Any] = []
    params = {**call("add", amount=1), **named}
    waiting = threading.Thread(target=lambda: answers.append(http.rpc("tools/call", params, id=1)))
    waiting.start()
    time.sleep(0.2)
    leaving.close()
    waiting.join()
    assert lives[0].cancelled == 1
    assert answers[0]["result"]["data"] == 1


@pytest.mark.parametrize("method", ["openenv/session/create", "initialize"])
def test_who_leaves_the_queue_gets_no_session(serve_fast: Serve, method: str) -> None:
    server = serve_fast(Kit, max_sessions=1, queue_timeout=30)
    http = server.http()
    token = created(http)
    leaving = begin(server, rpc(method, HELLO))
    wait_until(lambda: server.health()["waiting"] == 1)
    leaving.close()
    wait_until(lambda: server.health()["waiting"] == 0)
    http.rpc("openenv/session/close", {"session_id": token})
    assert server.health()["sessions"] == 0


@pytest.mark.parametrize("method", ["openenv/session/create", "initialize"])
def test_who_leaves_while_the_environment_is_built_gets_no_session(serve_fast: Serve, method: str) -> None:
    class Slow(Kit):
        def __init__(self) -> None:
            time.sleep(0.3)
            super().__init__()

    server = serve_fast(Slow, max_sessions=1)
    leaving = begin(server, rpc(method, HELLO))
    wait_until(lambda: server.health()["sessions"] == 1)
    leaving.close()
    wait_until(lambda: server.health()["sessions"] == 0)


def test_who_leaves_in_the_middle_of_a_batch_leaves_no_session(serve_fast: Serve) -> None:
    server = serve_fast(AsyncKit)
    leaving = begin(server, [rpc("initialize", HELLO), rpc("tools/call", call("hang"), id=2), rpc("ping", id=3)])
    wait_until(lambda: server.health()["running"] == 1)
    leaving.close()
    wait_until(lambda: server.health()["sessions"] == 0)


@pytest.mark.parametrize("method", ["openenv/session/create", "initialize"])
def test_a_caller_may_say_how_long_it_waits_for_a_session(serve_fast: Serve, method: str) -> None:
    server = serve_fast(Kit, max_sessions=1)
    http = server.http()
    token = created(http)
    error = server.http()("POST", "/mcp", rpc(method, HELLO), queue_timeout="0.2").json["error"]
    assert (error["code"], error["data"]["max_sessions"]) == (-32000, 1)
    waiting = begin(server, rpc(method, HELLO), queue_timeout="20")
    wait_until(lambda: server.health()["waiting"] == 1)
    http.rpc("openenv/session/close", {"session_id": token})
    assert b"result" in waiting.connection.getresponse().read()


# -- MCP sessions ---------------------------------------------------------------------------------


def test_an_mcp_session_by_its_header(serve_fast: Serve, lives: list[Watched]) -> None:
    http = serve_fast(Kit).http()
    token = initialized(http)
    for total in (2, 4):
        answer = http.rpc("tools/call", call("add", amount=2), mcp_session_id=token)
        assert answer["result"]["data"] == total
    assert http("DELETE", "/mcp", mcp_session_id=token).status == 204
    wait_until(lambda: lives[0].closes == 1)
    gone = http("POST", "/mcp", rpc("ping", id=5), mcp_session_id=token)
    assert (gone.status, gone.json["id"]) == (404, 5)
    assert http("DELETE", "/mcp", mcp_session_id=token).status == 404
    assert http("GET", "/mcp", mcp_session_id=token).status == 404


def test_a_failing_tool_is_a_result_for_an_mcp_client(serve_fast: Serve) -> None:
    http = serve_fast(Kit).http()
    token = initialized(http)
    result = http.rpc("tools/call", call("fail", text="it broke"), mcp_session_id=token)["result"]
    assert result["isError"] is True
    assert "it broke" in result["content"][0]["text"]
    assert http.rpc("tools/call", call("nope"), mcp_session_id=token)["error"]["code"] == -32602


def test_an_unknown_revision_is_answered_with_a_known_one(serve_fast: Serve) -> None:
    http = serve_fast(Kit).http()
    answer = http.rpc("initialize", {**HELLO, "protocolVersion": "1999-01-01"})
    assert answer["result"]["protocolVersion"] == "2025-11-25"


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS"])
def test_other_methods_are_405_without_a_session(serve_fast: Serve, method: str) -> None:
    answer = serve_fast(Kit).http()(method, "/mcp")
    assert answer.status == 405
    assert "POST" in answer.headers["Allow"]


def test_get_holds_a_stream_open_and_ends_with_the_session(serve_fast: Serve) -> None:
    server = serve_fast(Kit)
    http, stream = server.http(), server.http()
    token = initialized(http)
    stream.connection.request("GET", "/mcp", headers={"Mcp-Session-Id": token})
    answer = stream.connection.getresponse()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
    assert answer.readline().startswith(b":")
    assert server.http()("GET", "/mcp", mcp_session_id=token).status == 409
    http("DELETE", "/mcp", mcp_session_id=token)
    answer.read()


def test_a_call_can_be_cancelled_by_a_notification(serve_fast: Serve, lives: list[Watched]) -> None:
    server = serve_fast(AsyncKit)
    http = server.http()
    token = initialized(http)
    answers: list[Any] = []
    calling = threading.Thread(
        target=lambda: answers.append(server.http().rpc("tools/call", call("hang"), id=7, mcp_session_id=token))
    )
    calling.start()
    time.sleep(0.2)
    cancelled = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    assert http("POST", "/mcp", cancelled, mcp_session_id=token).status == 202
    calling.join()
    assert lives[0].cancelled == 1
    assert "error" in answers[0]


# -- WebSocket ------------------------------------------------------------------------------------


def test_a_socket_has_a_session_of_its_own(serve: Serve) -> None:
    server = serve(Kit)
    first, second = server.socket("/mcp"), server.socket("/mcp")
    assert first.ask(rpc("tools/call", call("add", amount=2)))["result"]["data"] == 2
    assert second.ask(rpc("tools/call", call("add", amount=5)))["result"]["data"] == 5
    assert first.ask(rpc("tools/call", {**call("look"), "session_id": "ignored"}))["result"]["data"] == {"count": 2}


def test_a_socket_cannot_close_itself_over_mcp(serve: Serve) -> None:
    ws = serve(Kit).socket("/mcp")
    own = ws.ask(rpc("openenv/session/create"))["result"]["session_id"]
    assert ws.ask(rpc("openenv/session/close", {"session_id": own}))["error"]["code"] == -32600


def test_bad_frames_keep_the_socket(serve: Serve) -> None:
    ws = serve(Kit).socket("/mcp")
    for frame, code in (
        ("", -32700), ("{", -32700), ("[]", -32600), ("5", -32600), (b"x", -32600), ("[" * 100_000, -32700),
        ('{"id":3}', -32600), (rpc("dance"), -32601), (rpc("tools/call", call("nope")), -32602),
    ):  # fmt: skip
        assert ws.ask(frame)["error"]["code"] == code
    assert ws.ask(rpc("ping"))["result"] == {}


def test_a_notification_over_a_socket_gets_no_answer(serve: Serve) -> None:
    ws = serve(Kit).socket("/mcp")
    ws.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert ws.ask(rpc("ping", id=2))["id"] == 2


def test_a_batch_over_a_socket(serve: Serve) -> None:
    answers = serve(Kit).socket("/mcp").ask([rpc("ping", id=1), rpc("dance", id=2)])
    assert [one["id"] for one in answers] == [1, 2]


def test_invalid_utf8_ends_the_socket_with_1007(serve: Serve) -> None:
    ws = serve(Kit).raw("/mcp")
    ws.send(b'{"\xff"}')
    assert ws.close_code() == 1007


def test_a_full_server_refuses_a_socket_with_1013(serve: Serve) -> None:
    server = serve(Kit, max_sessions=1)
    server.socket("/mcp").ask(rpc("ping"))
    late = server.socket("/mcp")
    assert late.receive()["error"]["code"] == -32000
    assert late.end() == 1013


def test_a_socket_may_say_how_long_it_waits_for_a_slot(serve: Serve) -> None:
    server = serve(Kit, max_sessions=1)
    first = server.raw("/mcp")
    first.send(json.dumps(rpc("ping")))
    first.answer()
    assert server.socket("/mcp", Queue_Timeout="0.2").receive()["error"]["data"]["kind"] == "queue_timeout"
    late = server.socket("/mcp", Queue_Timeout="20")
    wait_until(lambda: server.health()["waiting"] == 1)
    first.reset()
    assert late.ask(rpc("ping"))["result"] == {}


def test_frames_before_the_session_wait_for_it_up_to_a_limit(serve: Serve) -> None:
    server = serve(Kit, max_sessions=1, queue_timeout=20)
    first = server.raw("/mcp")
    first.send(json.dumps(rpc("ping")))
    first.answer()
    patient, hasty = server.raw("/mcp"), server.raw("/mcp")
    for number in range(3):
        patient.send(json.dumps(rpc("ping", id=number)))
    for number in range(MAX_EARLY_FRAMES + 1):
        hasty.send(json.dumps(rpc("ping", id=number)))
    assert hasty.close_code() == 1008
    first.reset()
    assert [patient.answer()["id"] for _ in range(3)] == [0, 1, 2]


def test_a_dropped_socket_frees_its_slot_and_cancels(serve: Serve, lives: list[Watched]) -> None:
    server = serve(AsyncKit, max_sessions=1)
    ws = server.raw("/mcp")
    ws.send(json.dumps(rpc("tools/call", call("hang"))))
    wait_until(lambda: server.health()["running"] == 1)
    ws.reset()
    wait_until(lambda: lives[0].cancelled == 1, 1)
    assert server.socket("/mcp").ask(rpc("ping"))["result"] == {}


def test_a_socket_that_leaves_while_its_session_is_built_leaves_nothing(serve: Serve, lives: list[Watched]) -> None:
    class Slow(Kit):
        def __init__(self) -> None:
            time.sleep(0.2)
            super().__init__()

    server = serve(Slow, max_sessions=1)
    server.raw("/mcp").reset()
    wait_until(lambda: lives and lives[0].closes)
    wait_until(lambda: server.health()["sessions"] == 0)


def test_a_frame_in_ws_may_carry_json_rpc(serve: Serve) -> None:
    ws = serve(Kit).socket()
    answer = ws.ask({"type": "mcp", "data": rpc("tools/call", call("add", amount=1), id="x")})
    assert (answer["type"], answer["data"]["id"], answer["data"]["result"]["data"]) == ("mcp", "x", 1)
    bad = ws.ask({"type": "mcp", "data": {"id": 4}})
    assert (bad["type"], bad["data"]["error"]["code"], bad["data"]["id"]) == ("mcp", -32600, 4)
    assert ws.ask({"type": "state"})["data"]["step_count"] == 1


def test_a_frame_in_ws_may_carry_a_deadline_for_its_call(serve: Serve, lives: list[Watched]) -> None:
    ws = serve(AsyncKit).socket()
    answer = ws.ask({"type": "mcp", "data": rpc("tools/call", call("hang")), "timeout_s": 0.2}, timeout=5)
    assert answer["data"]["error"]["data"]["code"] == "STEP_TIMEOUT"
    assert lives[0].cancelled == 1


def test_what_json_cannot_say_in_an_mcp_frame_is_answered(serve: Serve) -> None:
    from paddock import ToolEnvironment, tool

    class Odd(ToolEnvironment):
        concurrent_sessions = True

        @tool
        def surrogate(self) -> str:
            return "\ud800"

    ws = serve(Odd).socket()
    answer = ws.ask({"type": "mcp", "data": rpc("tools/call", call("surrogate"))}, timeout=2)
    assert answer["data"]["error"]["code"] == -32603


def test_a_closed_session_closes_its_socket(serve: Serve, lives: list[Watched]) -> None:
    server = serve(Kit)
    http = server.http()
    token = created(http)
    ws = server.socket(f"/ws?session_id={token}")
    ws.step(tool_name="look")
    assert http("DELETE", "/mcp", mcp_session_id=token).status == 204
    message = ws.receive()["data"]
    assert (message["code"], message["kind"]) == ("SESSION_ERROR", "closed")
    assert ws.end() == 1001
    wait_until(lambda: lives[0].closes == 1)


def test_slow_tools_do_not_stall_the_server(serve_fast: Serve, lives: list[Watched]) -> None:
    server: Running = serve_fast(Kit)
    slow = server.socket("/mcp")
    slow.send(rpc("tools/call", call("pause", seconds=1)))
    started = time.monotonic()
    assert server.http().rpc("tools/call", call("look"))["result"]["data"] == {"count": 0}
    assert time.monotonic() - started < 0.5
    lives[0].release.set()


# -- the letter of the spec ---------------------------------------------------------------------------


def nulls(value: Any, key: str = "") -> list[str]:
    if isinstance(value, dict):
        return [each for name, inner in value.items() for each in nulls(inner, name)]
    if isinstance(value, list):
        return [each for inner in value for each in nulls(inner, key)]
    return [key] if value is None else []


OPENENVS_OWN = {"meta", "structured_content", "data"}


@pytest.mark.parametrize("kind", [Kit, Echo])
def test_no_key_of_the_spec_is_null_for_an_mcp_client(serve_fast: Serve, kind: Any) -> None:
    http = serve_fast(kind).http()
    token = initialized(http)
    tool_call = call("echo_message", message="x") if kind is Echo else call("fail", text="x")
    for document in (("tools/list", {}), ("tools/call", tool_call)):
        assert set(nulls(http.rpc(*document, Mcp_Session_Id=token))) <= OPENENVS_OWN


def test_openenv_clients_find_all_their_keys(serve_fast: Serve) -> None:
    [first, *_] = serve_fast(Kit).http().rpc("tools/list")["result"]["tools"]
    assert first.keys() >= {"title", "icons", "execution", "annotations", "meta", "outputSchema"}


@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_an_unknown_revision_is_refused(serve_fast: Serve, method: str, lives: list[Watched]) -> None:
    http = serve_fast(Echo).http()
    token = initialized(http)
    document = rpc("tools/call", call("echo_message", message="x"))
    answer = http(method, "/mcp", document, Mcp_Session_Id=token, MCP_Protocol_Version="1900-01-01")
    assert (answer.status, answer.json["error"]["code"]) == (400, -32022)
    response = http("POST", "/mcp", document, Mcp_Session_Id=token, MCP_Protocol_Version="2025-06-18")
    assert response.json["result"]["data"] == "x"


STATELESS = {"_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}}


@pytest.mark.parametrize(
    "header",
    [{"Mcp_Method": "tools/list"}, {"Mcp_Name": "other"}, {"MCP_Protocol_Version": "2025-11-25"}],
)
def test_headers_and_request_must_agree(serve_fast: Serve, header: dict[str, str], lives: list[Watched]) -> None:
    document = rpc("tools/call", {**call("add", amount=1), **STATELESS})
    answer = serve_fast(Kit).http()("POST", "/mcp", document, **header)
    assert (answer.status, answer.json["error"]["code"], answer.json["id"]) == (400, -32020, 1)
    assert lives == []


def test_an_unknown_method_is_not_found_in_the_stateless_revision(serve_fast: Serve) -> None:
    http = serve_fast(Kit).http()
    assert http("POST", "/mcp", rpc("nope", STATELESS)).status == 404
    assert http("POST", "/mcp", rpc("nope")).status == 200


@pytest.mark.parametrize("method", ["ping", "tools/list"])
def test_a_ping_keeps_the_session(serve_fast: Serve, method: str) -> None:
    server = serve_fast(Kit, session_timeout=0.6)
    http = server.http()
    token = initialized(http)
    for _ in range(10):
        time.sleep(0.15)
        assert "result" in http.rpc(method, Mcp_Session_Id=token)


def test_an_unexpected_error_is_an_answer(serve_fast: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    http = serve_fast(Kit).http()
    monkeypatch.setattr("paddock.server.rpc.tools_of", lambda _: 1 / 0)
    assert http.rpc("tools/list")["error"] == {
        "code": -32603,
        "message": "Internal error: ZeroDivisionError",
        "data": None,
    }


def test_frames_before_the_session_are_bounded_in_bytes(serve: Serve) -> None:
    ws = serve(SlowToBuild, message_bytes=1000, drain_grace=5).socket("/mcp")
    # The server may close before all of them are sent.
    with suppress(ConnectionClosed):
        for _ in range(4):
            ws.connection.send('{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":"' + "x" * 500 + '"}}')
    assert ws.end() == 1008


@pytest.mark.parametrize("make", [Adder, Kit])
@pytest.mark.parametrize(("method", "params"), [("tools/list", {}), ("tools/call", {"name": "add"})])
def test_an_unknown_session_is_an_error_with_tools_or_without(
    serve_fast: Serve, make: Any, method: str, params: dict[str, Any]
) -> None:
    answer = serve_fast(make).http().rpc(method, {**params, "session_id": "nobody"})
    assert answer["error"]["code"] == -32602
    assert answer["error"]["data"]["kind"] == "not_found"


def test_tools_of_an_environment_without_any_are_an_internal_error(serve_fast: Serve) -> None:
    assert serve_fast(Adder).http().rpc("tools/list")["error"]["code"] == -32603
