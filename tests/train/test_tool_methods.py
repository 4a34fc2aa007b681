"""Tools become methods whose signature says what their schema says."""

import inspect
from typing import Any, Literal, get_type_hints

import pytest

from paddock.train.tool_methods import annotation, identifier, make_method, make_methods
from paddock.types import ToolInfo

SEARCH = ToolInfo(
    name="search-files",
    description="Find files.\n\nReturns:\n    Their names.",
    input_schema={
        "type": "object",
        "properties": {
            "limit": {"type": "integer", "default": 10},
            "from": {"type": "string", "description": "Where to\n begin."},
            "kind": {"enum": ["file", "folder"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["from"],
    },
)


def echo(self: Any, name: str, arguments: dict[str, Any]) -> Any:
    return name, arguments


def test_required_arguments_come_first_and_the_others_have_defaults() -> None:
    signature = inspect.signature(make_method(SEARCH, echo))
    assert list(signature.parameters) == ["self", "from_", "limit", "kind", "tags"]
    assert signature.parameters["from_"].default is inspect.Parameter.empty
    assert signature.parameters["limit"].default == 10
    assert signature.parameters["tags"].default is None


def test_types_are_those_of_the_schema() -> None:
    hints = get_type_hints(make_method(SEARCH, echo))
    assert hints == {
        "from_": str,
        "limit": int,
        "kind": Literal["file", "folder"] | None,
        "tags": list[str] | None,
        "return": str,
    }


def test_the_docstring_has_a_line_for_every_argument() -> None:
    lines = (make_method(SEARCH, echo).__doc__ or "").splitlines()
    assert lines[:3] == ["Find files.", "", "Args:"]
    assert "    from_: Where to begin." in lines
    assert "    limit: limit" in lines


def test_a_call_passes_on_what_was_given_under_the_names_of_the_tool() -> None:
    method = make_method(SEARCH, echo)
    assert method(None, from_="here", tags=["a"]) == ("search-files", {"from": "here", "tags": ["a"]})


def test_a_call_that_does_not_fit_is_refused() -> None:
    with pytest.raises(TypeError, match="from_"):
        make_method(SEARCH, echo)(None, limit=3)
    with pytest.raises(TypeError, match="nonsense"):
        make_method(SEARCH, echo)(None, from_="x", nonsense=1)


def test_a_tool_keeps_its_name_where_the_attribute_cannot_have_it() -> None:
    tools = [ToolInfo(name=name, description="", input_schema={}) for name in ("reset", "_hidden", "a.b", "a b")]
    methods = make_methods(tools, echo, taken=("reset",))
    assert {attribute: method.__name__ for attribute, method in methods.items()} == {
        "reset_": "reset",
        "hidden": "_hidden",
        "a_b": "a.b",
        "a_b_": "a b",
    }


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": ["string", "null"]}, str | None),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, int | float),
        ({"const": 3}, Literal[3]),
        ({"enum": [1.5, {"a": 1}]}, Any),
        ({"type": "object"}, dict[str, Any]),
        ({"type": "array"}, list[Any]),
        ({"$ref": "#/$defs/Place"}, dict[str, Any]),
        ({"$ref": "#/$defs/Loop"}, list[Any]),
        (True, Any),
        ({}, Any),
    ],
)
def test_a_schema_as_a_type(schema: Any, kind: Any) -> None:
    definitions = {"Place": {"type": "object"}, "Loop": {"type": "array", "items": {"$ref": "#/$defs/Loop"}}}
    assert annotation(schema, definitions) == kind


@pytest.mark.parametrize(
    ("name", "expected"), [("class", "class_"), ("2nd", "tool_2nd"), ("__x", "x"), ("_", "tool_"), ("a-b", "a_b")]
)
def test_names_that_python_takes(name: str, expected: str) -> None:
    assert identifier(name) == expected
