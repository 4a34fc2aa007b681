import json
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from environments import Kit
from paddock.protocol import mcp
from paddock.protocol.codec import encode


def listed(name: str) -> dict[str, Any]:
    return mcp.tool_listing(Kit.tools[name])


def test_a_tool_is_listed_as_the_spec_says() -> None:
    tool = listed("look")
    assert tool["name"] == "look"
    assert tool["description"] == "See the count."
    assert tool["inputSchema"]["type"] == "object"
    assert tool["outputSchema"]["type"] == "object"


def test_hints_are_annotations() -> None:
    assert listed("look")["annotations"] == {
        "readOnlyHint": True,
        "idempotentHint": True,
        "destructiveHint": False,
    }
    assert listed("add")["annotations"]["readOnlyHint"] is False


def test_a_listed_action_speaks_snake_case() -> None:
    info = mcp.tool_info(Kit.tools["add"])
    assert info.keys() == {"name", "description", "input_schema"}


@pytest.mark.parametrize(
    ("value", "structured", "text"),
    [
        ("hi", {"result": "hi"}, "hi"),
        (3, {"result": 3}, "3"),
        ([1, 2], {"result": [1, 2]}, "[1,2]"),
        ({"a": 1}, {"a": 1}, '{"a":1}'),
        (True, {"result": True}, "true"),
        ("", {"result": ""}, ""),
        (0, {"result": 0}, "0"),
    ],
)
def test_a_value_is_sent_in_both_forms(value: Any, structured: Any, text: str) -> None:
    result = mcp.tool_result(value)
    assert result["structuredContent"] == result["structured_content"] == structured
    assert result["data"] == value
    assert result["content"][0]["text"] == text
    assert result["isError"] is result["is_error"] is False


def test_nothing_has_no_content() -> None:
    result = mcp.tool_result(None)
    assert (result["content"], result["structuredContent"], result["data"]) == ([], None, None)


def test_a_model_is_an_object() -> None:
    class Point(BaseModel):
        x: int = 1

    result = json.loads(encode(mcp.tool_result(Point())))
    assert result["structuredContent"] == result["data"] == {"x": 1}


def test_numpy_is_plain_json() -> None:
    result = json.loads(encode(mcp.tool_result({"a": np.arange(2)})))
    assert result["structuredContent"] == {"a": [0, 1]}


def test_content_that_a_tool_made_itself_is_kept() -> None:
    image = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
    assert mcp.tool_result([image])["content"] == [image]
    assert mcp.tool_result(image)["content"] == [image]


@pytest.mark.parametrize(
    "value", [{"type": "image", "name": "cat.png"}, {"type": "text", "length": 3}, {"type": "resource"}]
)
def test_an_object_that_merely_has_a_type_is_not_content(value: dict[str, Any]) -> None:
    block = mcp.tool_result(value)["content"][0]
    assert block["type"] == "text"
    assert json.loads(block["text"]) == value


def test_a_failure_is_for_the_model_to_read() -> None:
    result = mcp.tool_failure("it broke")
    assert result["isError"] is result["is_error"] is True
    assert result["content"][0]["text"] == "it broke"


def test_a_score_is_sent_where_there_is_one() -> None:
    plain = mcp.tool_result("x")
    assert mcp.with_score(plain, None, False) == plain
    assert mcp.with_score(plain, 0.0, False)["_meta"] == {"paddock/reward": 0.0, "paddock/done": False}
    assert mcp.with_score(plain, None, True)["_meta"]["paddock/done"] is True


@pytest.mark.parametrize("requested", mcp.SESSION_VERSIONS)
def test_a_known_revision_is_spoken(requested: str) -> None:
    assert mcp.choose_version(requested) == requested


@pytest.mark.parametrize("requested", [None, "1999-01-01", 5, ["2025-06-18"]])
def test_an_unknown_revision_is_answered_with_the_newest(requested: Any) -> None:
    assert mcp.choose_version(requested) == mcp.SESSION_VERSIONS[0]


def test_a_stateless_request_says_so_in_its_meta() -> None:
    meta = {"io.modelcontextprotocol/protocolVersion": mcp.STATELESS_VERSION}
    assert mcp.is_stateless({"_meta": meta})
    assert not mcp.is_stateless({})
    assert not mcp.is_stateless({"_meta": None})
    assert not mcp.is_stateless({"_meta": {}})


def test_discovery_names_the_stateless_revision_to_plain_clients() -> None:
    result = mcp.discovery({"name": "n", "version": "v"}, {})
    assert mcp.STATELESS_VERSION in result["supportedVersions"]
    assert result["serverInfo"] == {"name": "n", "version": "v"}
    assert "tools" in result["capabilities"]


@pytest.mark.parametrize(
    "data",
    [
        {"type": "resource", "resource": "cpu"},
        {"type": "text", "text": None},
        {"type": "resource_link", "uri": "file:///x"},
        {"type": "image", "data": 1, "mimeType": "image/png"},
        {"type": ["text"], "text": "x"},
    ],
)
def test_data_that_only_looks_like_content_is_sent_as_data(data: dict[str, Any]) -> None:
    [block] = mcp.tool_result(data)["content"]
    assert (block["type"], json.loads(block["text"])) == ("text", data)


def test_an_embedded_resource_is_content() -> None:
    resource = {"type": "resource", "resource": {"uri": "file:///x", "text": "x"}}
    assert mcp.tool_result(resource)["content"] == [resource]


def test_nothing_optional_is_null_for_a_client_that_keeps_to_the_spec() -> None:
    reply = mcp.for_mcp(mcp.tool_result(None, Kit.tools["win"]))
    assert "structuredContent" not in reply
    assert "structured_content" in reply
    listed_tools = mcp.for_mcp({"tools": [mcp.tool_listing(spec) for spec in Kit.tools.values()]})["tools"]
    assert not [key for each in listed_tools for key, value in each.items() if value is None and key != "meta"]


@pytest.mark.parametrize(
    ("sent", "decoded"), [("echo", "echo"), ("=?base64?w6Q=?=", "ä"), ("=?base64?!?=", "=?base64?!?=")]
)
def test_headers_say_what_ascii_cannot_in_base64(sent: str, decoded: str) -> None:
    assert mcp.header_value(sent) == decoded
