"""Tool schemas and tool results in the formats of chat models."""

from typing import Any

import pytest

from paddock.fleet.client.tool_format import NO_IMAGE, convert_result, convert_tool_format, find_error


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/jpeg"}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}


@pytest.mark.parametrize(
    ("result", "value"),
    [
        ({"content": text("hello")}, "hello"),
        ({"content": text('{"a": 1}')}, {"a": 1}),
        ({"content": text("5")}, 5),
        ({"content": text("null")}, None),
        ({"content": text("NaN")}, "NaN"),
        ({"content": text(str(10**30))}, 10**30),
        ({"content": text("1", "2")}, ["1", "2"]),
        ({"content": [IMAGE, *text("seen")]}, [*text("seen"), IMAGE_PART]),
        ({"content": [{"type": "image", "data": None}]}, [*text(NO_IMAGE)]),
        ({"content": text('{"base64_image": null}')}, NO_IMAGE),
        (
            {"content": text('{"base64_image": "AAAA"}')},
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        ),
        (
            {"content": text('{"base64_image": "data:image/jpeg;base64,AAAA"}')},
            [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAAA"}}],
        ),
        (
            {"content": [{"type": "image", "data": "data:image/webp;base64,AAAA", "mimeType": "image/png"}]},
            [{"type": "image_url", "image_url": {"url": "data:image/webp;base64,AAAA"}}],
        ),
        ({"content": text("no"), "isError": True}, {"error": "no"}),
        ({"content": text("no"), "is_error": True}, {"error": "no"}),
        ({"content": [], "isError": True}, {"error": "Tool execution failed"}),
        ({"content": [], "structuredContent": {"x": 1}}, {"x": 1}),
        ({"content": [], "structured_content": {"x": 1}}, {"x": 1}),
        ({"content": text("shown"), "structuredContent": {"x": 1}}, "shown"),
        ({"content": []}, {}),
        ({"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]}, "inside"),
        ({"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": "AA"}}]}, "[resource file:///a]"),
    ],
)
def test_results_become_values(result: dict[str, Any], value: Any) -> None:
    assert convert_result(result) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"error": "x"}, "x"),
        ({"error": None}, None),
        ({"error": ""}, None),
        ({"status": "failed", "message": "m"}, "m"),
        ({"isError": True}, "Tool execution failed"),
        ({"error": {"code": 1}}, '{"code":1}'),
        ("error", None),
        ([], None),
    ],
)
def test_an_error_in_a_value_is_recognised(value: Any, message: str | None) -> None:
    assert find_error(value) == message


def test_references_are_written_out_and_nothing_is_lost() -> None:
    schema = {
        "type": "object",
        "title": "T",
        "description": "about",
        "additionalProperties": False,
        "properties": {
            "who": {"$ref": "#/$defs/Person", "description": "whose"},
            "when": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "When"},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "integer"}]},
            "title": {"type": "string"},
        },
        "required": ["who"],
        "$defs": {"Person": {"type": "object", "properties": {"name": {"type": "string", "title": "Name"}}}},
    }
    made = convert_tool_format({"name": "t", "description": None, "inputSchema": schema})["function"]
    assert made["description"] == ""
    assert made["parameters"] == {
        "type": "object",
        "description": "about",
        "additionalProperties": False,
        "properties": {
            "who": {"type": "object", "properties": {"name": {"type": "string"}}, "description": "whose"},
            "when": {"type": "string"},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "pair": {"type": "array", "items": {"type": "integer"}},
            "title": {"type": "string"},
        },
        "required": ["who"],
    }


def test_a_definition_that_contains_itself_stays_a_reference_that_resolves() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    schema = {"properties": {"list": {"$ref": "#/$defs/Node"}}, "$defs": {"Node": node}}
    parameters = convert_tool_format({"name": "t", "input_schema": schema})["function"]["parameters"]
    assert parameters["properties"]["list"]["properties"]["next"] == {"$ref": "#/$defs/Node"}
    assert parameters["$defs"]["Node"]["properties"]["next"] == {"$ref": "#/$defs/Node"}
