"""Messages as items, whatever shape an agent or a model gives them."""

import base64
from typing import Any

import pytest

from paddock.web.transcript_items import MAX_TEXT_CHARACTERS, file_changes, message_items, parse_arguments

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(40)).decode()


def items(message: dict[str, Any]) -> list[dict[str, Any]]:
    return list(message_items(message, {}))


ODD = (
    {}, {"role": "user"}, {"role": "user", "content": None}, {"role": "user", "content": 5},
    {"role": "user", "content": {"deep": [1]}}, {"role": "user", "content": [None, 3, "text", {"type": "text"}]},
    {"role": "assistant", "tool_calls": [None, {}, {"function": None}, {"function": {"name": None, "arguments": 7}}]},
    {"role": "tool", "content": [{"type": "image_url", "image_url": "x"}, "y"]}, {"role": 7, "content": "x"},
    {"role": "assistant", "content": "x", "tool_calls": {"0": 1}}, {"role": "user", "content": [{"type": "image"}]},
)  # fmt: skip


@pytest.mark.parametrize("message", ODD, ids=str)
def test_odd_messages_break_nothing(message: dict[str, Any]) -> None:
    for item in items(message):
        assert item["kind"] in ("message", "thinking", "tool_call", "tool_result", "image", "note")


def test_parts_are_sent_in_their_order() -> None:
    content = [
        {"type": "text", "text": "look"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
    ]
    assert [item["kind"] for item in items({"role": "user", "content": content})] == ["message", "image"]


@pytest.mark.parametrize(
    "address",
    [
        "data:image/svg+xml;base64,PHN2Zy8+",
        "data:image/png;base64,PHN2Zy8+",
        f"data:text/html;base64,{base64.b64encode(b'<script>').decode()}",
        "data:image/png;base64,not base64!",
        "data:image/png," + "x" * 50,
        "http://192.0.2.1/a.png",
        "javascript:alert(1)",
        "",
    ],
)
def test_what_is_no_raster_image_is_not_shown(address: str) -> None:
    [item] = items({"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]})
    assert item["kind"] == "note"
    assert "data" not in item


def test_the_bytes_decide_what_an_image_is() -> None:
    [item] = items({"role": "user", "content": [{"type": "image_url", "image_url": f"data:text/html;base64,{PNG}"}]})
    assert (item["kind"], item["mime"]) == ("image", "image/png")


def test_long_texts_are_cut_and_counted() -> None:
    [item] = items({"role": "user", "content": "x" * (MAX_TEXT_CHARACTERS + 5)})
    assert (len(item["text"]), item["length"]) == (MAX_TEXT_CHARACTERS, MAX_TEXT_CHARACTERS + 5)


@pytest.mark.parametrize(
    ("name", "arguments", "changes"),
    [
        ("write", {"filePath": "a", "content": "x"}, [("a", None, "x")]),
        ("Edit", {"file_path": "a", "old_string": "x", "new_string": ""}, [("a", "x", "")]),
        ("edit", {"path": "a", "edits": [{"oldText": "x", "newText": "y"}, {}, 3]}, [("a", "x", "y")]),
        ("str_replace_based_edit_tool", {"command": "create", "path": "a", "file_text": "x"}, [("a", None, "x")]),
        ("str_replace_based_edit_tool", {"command": "view", "path": "a"}, []),
        ("replace", {"file_path": "a", "old_string": "x", "new_string": "y"}, [("a", "x", "y")]),
        ("bash", {"path": "a", "content": "x"}, []),
        ("read", {"filePath": "a"}, []),
        ("write", "not an object", []),
        ("write", {"filePath": 5, "content": "x"}, []),
    ],
)
def test_tools_that_edit_files_are_known(name: str, arguments: Any, changes: list[tuple[Any, ...]]) -> None:
    assert [tuple(change.values()) for change in file_changes(name, arguments)] == changes


def test_arguments_that_are_no_object_stay_text() -> None:
    assert parse_arguments('{"a": 1}') == {"a": 1}
    assert parse_arguments("{broken") == "{broken"
    assert parse_arguments("[1]") == "[1]"
    assert parse_arguments(None) == ""
