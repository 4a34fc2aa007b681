"""What comes from outside and is turned into values: tool results, schemas, verifiers, partial credit, events."""

import base64
import io
import pickle
import zipfile
from typing import Any

import pytest

from paddock.fleet.errors import VerifierInvalid
from paddock.fleet.http import retry_after
from paddock.fleet.partial import partial_reward
from paddock.fleet.results import NO_IMAGE, error_of, extract
from paddock.fleet.schemas import convert_tool_format
from paddock.fleet.sse import EventReader
from paddock.fleet.verifiers import entry_point, execute_body

from .plane import DataOnly


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
    assert extract(result) == value


@pytest.mark.parametrize(
    ("value", "said"),
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
def test_an_error_in_a_value_is_recognised(value: Any, said: str | None) -> None:
    assert error_of(value) == said


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


@pytest.mark.parametrize(
    ("source", "named", "name"),
    [
        ("def verify(env): ...", None, "verify"),
        ("def helper(env): ...\nasync def verify(env): ...", None, "verify"),
        ("def helper(env): ...\n@verifier(key='x')\ndef check(env): ...", None, "check"),
        ("def helper(): ...\ndef validate_task(env): ...", None, "validate_task"),
        ("def only(env): ...", None, "only"),
        ("def one(env): ...\ndef two(env): ...", "one", "one"),
        ("this is (not python", "verify", "verify"),
    ],
)
def test_the_entry_point_is_found(source: str, named: str | None, name: str) -> None:
    assert entry_point(source, named).name == name


@pytest.mark.parametrize(
    ("source", "named", "said"),
    [
        ("def one(env): ...\ndef two(env): ...", None, "one, two"),
        ("x = 1", None, "no function"),
        ("this is (not python", None, "parsed"),
        ("def verify(env): ...", "other", "other"),
    ],
)
def test_an_entry_point_that_is_not_clear_is_refused(source: str, named: str | None, said: str) -> None:
    with pytest.raises(VerifierInvalid, match=said):
        entry_point(source, named)


def test_a_verifier_travels_as_plain_data_and_the_same_source_as_the_same_bundle() -> None:
    entry = entry_point("def verify(env, **more): ...")
    assert entry.takes("anything")
    given = {"final_answer": "é", "n": [1, {"a": None}]}
    first, second = (
        execute_body(key="k", source="def verify(env, **more): ...", entry=entry, instance_id="i", arguments=given)
        for _ in range(2)
    )
    assert first == second
    packed = DataOnly(io.BytesIO(base64.b64decode(first["args"]))).load()
    assert packed == {"args": (None, {"env": "i"}), "kwargs": given}
    assert first["args_array"] == [{"env": "i"}]
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(first["bundle"]))) as bundle:
        assert bundle.namelist() == ["requirements.txt", "verifier.py"]
    assert pickle.loads(base64.b64decode(first["args"]))


def block(kind: str, items: list[str]) -> str:
    return f">>> {kind}_ACCUMULATOR >>>\n{items!r}\n<<< {kind}_ACCUMULATOR <<<\n"


def application(name: str, passed: int, *notes: str, errors: tuple[str, ...] = ()) -> str:
    """What a verifier of several applications prints for one of them."""
    wrong = block("ERROR", list(errors)) if errors else ""
    text = f"{wrong}{block('SUCCESS', list(notes))}"
    return f"<<< VERIFY_{name} <<<\n{text}>>> VERIFY_{name} >>>\nApp {name}: {passed}\n"


FAILED = application("lifeline", 0, errors=("[X] No appointment found",))
DONE = application("outlook", 1, "[C] Email sent", "[C] Database diff validated - no unexpected changes")


@pytest.mark.parametrize(
    ("stdout", "share"),
    [
        (block("ERROR", ["a"]) + block("SUCCESS", ["b", "c", "d"]), 0.75),
        (block("ERROR", ["a"]), 0.0),
        (block("ERROR", []) + block("SUCCESS", []), None),
        ("nothing of the kind", None),
        (">>> ERROR_ACCUMULATOR >>>\n__import__('os')\n<<< ERROR_ACCUMULATOR <<<\n", None),
        ("App 1: 1 done\nApp 2: 0 missing\n", 0.5),
        ("App 1: 1 (no unexpected changes)\nApp 2: 0 missing\n", 0.0),
        ("App 1: 1 (no unexpected changes)\n", None),
        (DONE + FAILED, 0.5),
        (DONE + FAILED + application("medora", 1, "[C] Verified no unexpected changes in the Medora database"), 0.5),
        (DONE + FAILED + application("files", 1, "[C] No filesystem changes required for this task"), 0.5),
        (DONE + FAILED + application("seal", 1, "[C] No-unexpected-envelopes check passed"), 0.5),
        (DONE + FAILED + application("seal", 0, "[C] No unexpected envelopes", errors=("[X] one",)), 1 / 3),
        (application("medora", 1, "[C] No unexpected changes") + FAILED, 0.0),
        (application("medora", 1, "[C] No unexpected changes"), None),
        (
            DONE
            + FAILED
            + "<<< VERIFY_files <<<\nPASS: [C] No filesystem changes expected\n>>> VERIFY_files >>>\nApp files: 1\n",
            0.5,
        ),
        (DONE + "Error in app lifeline: boom\n" + FAILED + "Combined result: 1/2 apps passed\n", 0.5),
    ],
)
def test_partial_credit_is_read_from_what_was_printed(stdout: str, share: float | None) -> None:
    assert partial_reward(stdout) == share


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_events_are_read_however_they_are_cut(size: int) -> None:
    whole = b": hi\r\nid: 1\r\ndata: a\r\ndata: b\r\n\r\nid: 2\ndata: c\n\nevent: x\n\ndata: last"
    reader = EventReader()
    events = [event for at in range(0, len(whole), size) for event in reader.feed(whole[at : at + size])]
    assert [(event.data, event.id) for event in events] == [("a\nb", "1"), ("c", "2")]
    assert reader.last_id == "2"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("2", 2.0),
        ("0.5", 0.5),
        ("-1", 0.0),
        ("99999", 120.0),
        ("", None),
        ("soon", None),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
    ],
)
def test_the_wish_to_be_left_alone_is_read(value: str, seconds: float | None) -> None:
    assert retry_after({"Retry-After": value}) == seconds
