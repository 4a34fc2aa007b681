from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .instances import KEY, Instance

LIST = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "list_notes"}}


@pytest.mark.parametrize("path", ["/mcp", "/api/v1/mcp"])
def test_tools_are_listed_without_any_handshake(notes: Instance, path: str) -> None:
    answer = notes.ask("POST", path, LIST, accept="*/*")
    tools = {tool["name"]: tool for tool in answer.json["result"]["tools"]}
    assert list(tools) == ["add_note", "list_notes"]
    assert tools["list_notes"]["annotations"]["readOnlyHint"]
    assert tools["list_notes"]["annotations"]["idempotentHint"]
    assert not tools["add_note"]["annotations"]["readOnlyHint"]
    assert "mcp-session-id" not in answer.headers
    assert answer.headers["content-type"] == "application/json"


def test_the_handshake_opens_nothing(notes: Instance) -> None:
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    answer = notes.ask("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    assert answer.json["result"]["protocolVersion"] == "2025-06-18"
    assert answer.json["result"]["capabilities"]["tools"] is not None
    assert answer.json["result"]["capabilities"]["experimental"] == {"paddock/idempotency": {}}
    assert "mcp-session-id" not in answer.headers
    response = notes.ask("POST", "/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (response.status, response.body) == (202, b"")
    assert notes.rpc("ping")["result"] == {}


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
def test_only_post_is_allowed(notes: Instance, method: str) -> None:
    answer = notes.ask(method, "/mcp")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")


def test_an_unknown_method_is_an_error_in_a_200(notes: Instance) -> None:
    answer = notes.ask("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "resources/list"})
    assert (answer.status, answer.json["error"]["code"]) == (200, -32601)
    for method in ("openenv/session/create", "openenv/session/close"):
        assert notes.rpc(method)["error"]["code"] == -32601


def test_all_calls_act_on_the_one_environment(notes: Instance) -> None:
    assert notes.call("add_note", title="a")["result"]["structuredContent"] == {"id": 2}
    assert notes.call("add_note", title="b", path="/api/v1/mcp")["result"]["structuredContent"] == {"id": 3}
    assert notes.titles() == ["welcome", "a", "b"]


def test_parallel_calls_do_not_overlap(notes: Instance) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: notes.call("add_note", title=f"n{number}"), range(48)))
    assert sorted(answer["result"]["structuredContent"]["id"] for answer in answers) == list(range(2, 50))


def test_a_mistake_of_an_agent_is_a_result(notes: Instance) -> None:
    for answer in (notes.call("nope"), notes.call("add_note"), notes.call("add_note", title="x", more=1)):
        assert answer["result"]["isError"]
        assert answer["result"]["content"][0]["text"]


def test_a_call_without_a_name_is_an_error(notes: Instance) -> None:
    for params in ({}, {"name": 3}, {"name": "add_note", "arguments": []}):
        assert notes.rpc("tools/call", params)["error"]["code"] == -32602


def test_an_invalid_message_gets_an_error(notes: Instance) -> None:
    assert notes.ask("POST", "/mcp", b"{").json["error"]["code"] == -32700
    assert notes.ask("POST", "/mcp", {"id": 1}).json["error"]["code"] == -32600


def test_a_batch_is_answered_in_order(notes: Instance) -> None:
    note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 3}}
    assert [one["id"] for one in notes.post("/mcp", [LIST, note, CALL])] == [2, 3]


def test_the_revision_without_a_handshake_is_served(notes: Instance) -> None:
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
    offered = notes.rpc("server/discover", {"_meta": meta})["result"]["supportedVersions"]
    assert offered[0] == "2026-07-28"
    assert notes.rpc("tools/call", {"name": "list_notes", "_meta": meta})["result"]["resultType"] == "complete"
    strange = {"io.modelcontextprotocol/protocolVersion": "1999-01-01"}
    assert notes.rpc("tools/list", {"_meta": strange})["error"]["code"] == -32022


# -- keys of calls --------------------------------------------------------------------------------


def test_a_call_that_comes_again_under_its_key_is_not_carried_out_again(notes: Instance) -> None:
    first = notes.call("add_note", title="once", key="k1")
    again = notes.call("add_note", title="once", key="k1", path="/api/v1/mcp")
    assert first == again
    assert notes.titles() == ["welcome", "once"]


def test_calls_under_one_key_at_the_same_time_are_one(notes: Instance) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: notes.call("add_note", title="at once", key="k2"), range(8)))
    assert {answer["result"]["structuredContent"]["id"] for answer in answers} == {2}
    assert notes.titles() == ["welcome", "at once"]


def test_a_key_belongs_to_its_call(notes: Instance) -> None:
    notes.call("add_note", title="mine", key="k3")
    assert notes.call("add_note", title="other", key="k3")["error"]["code"] == -32602
    assert notes.titles() == ["welcome", "mine"]


@pytest.mark.parametrize("key", ["", "x" * 513, 3])
def test_a_key_is_a_short_text(notes: Instance, key: Any) -> None:
    params = {"name": "list_notes", "_meta": {"paddock/idempotency-key": key}}
    assert notes.rpc("tools/call", params)["error"]["code"] == -32602


def test_a_lost_answer_is_found_under_its_key(notes: Instance) -> None:
    notes.tell({"faults": [{"path": "^/i-1/mcp$", "method": "POST", "after": True, "drop": True}]})
    with pytest.raises(ConnectionError):
        call_until_lost(notes)
    assert notes.call("add_note", title="lost", key="k4")["result"]["structuredContent"] == {"id": 2}
    assert notes.titles() == ["welcome", "lost"]


def call_until_lost(notes: Instance) -> None:
    """The fault comes by another way, so a call or two may come before it."""
    while True:
        notes.call("add_note", title="lost", key="k4")


# -- access ---------------------------------------------------------------------------------------


def test_calls_require_the_key(locked: Instance) -> None:
    assert locked.ask("POST", "/mcp", CALL).status == 401
    assert locked.ask("POST", "/mcp", CALL, authorization="Bearer wrong").status == 401
    assert locked.ask("POST", "/api/v1/mcp", [CALL, LIST]).status == 401
    assert locked.ask("POST", "/mcp", CALL, authorization=f"Bearer {KEY}").json["result"]["isError"] is False


def test_the_tool_list_requires_the_key(locked: Instance) -> None:
    for path in ("/mcp", "/mcp/", "/api/v1/mcp"):
        assert locked.ask("POST", path, LIST).status == 401
        assert locked.ask("POST", path, LIST, authorization="Bearer wrong").status == 401
        assert len(locked.ask("POST", path, LIST, authorization=f"Bearer {KEY}").json["result"]["tools"]) == 2


def test_the_page_requires_the_key(locked: Instance) -> None:
    assert locked.ask("GET", "/").status == 401
    assert locked.ask("GET", "/?page=guess").status == 401
    assert b"welcome" in locked.ask("GET", "/", authorization=f"Bearer {KEY}").body


def test_the_forms_of_the_page_are_calls(notes: Instance) -> None:
    sent = notes.ask("POST", "/", b"tool=add_note&title=typed%20in&body=")
    assert (sent.status, sent.headers["location"]) == (303, "/")
    assert notes.titles() == ["welcome", "typed in"]
    assert notes.ask("POST", "/", b"tool=nope").status == 400
