import datetime
import enum
import ipaddress
import math
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from paddock.testing.schema_examples import NoExample, counterexamples, example, has_type


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    model_config = ConfigDict(extra="forbid")

    x: int
    y: Annotated[float, Field(gt=0, lt=1)]
    label: str = "here"


class Move(BaseModel):
    kind: Literal["move"]
    to: Point


class Say(BaseModel):
    kind: Literal["say"]
    text: str


class Tree(BaseModel):
    children: "list[Tree]"
    parent: "Tree | None" = None


TYPES: list[Any] = [
    bool,
    int,
    float,
    str,
    bytes,
    None,
    Any,
    Colour,
    Literal["a", "b"],
    int | None,
    list[int],
    dict[str, int],
    tuple[int, str],
    set[str],
    Decimal,
    uuid.UUID,
    datetime.datetime,
    datetime.date,
    datetime.timedelta,
    ipaddress.IPv4Address,
    Point,
    Tree,
    list[Point],
    Annotated[int, Field(ge=5)],
    Annotated[int, Field(gt=5, lt=7)],
    Annotated[int, Field(le=-3)],
    Annotated[int, Field(multiple_of=7)],
    Annotated[int, Field(ge=10, multiple_of=7)],
    Annotated[float, Field(gt=0)],
    Annotated[float, Field(gt=1)],
    Annotated[float, Field(lt=1)],
    Annotated[float, Field(ge=0.25, le=0.5)],
    Annotated[float, Field(gt=0.25, lt=0.5)],
    Annotated[str, Field(min_length=9)],
    Annotated[str, Field(max_length=2)],
    Annotated[str, Field(pattern="^x+$", examples=["xx"])],
    Annotated[list[int], Field(min_length=3)],
    Annotated[set[int], Field(min_length=3)],
    Annotated[set[str], Field(min_length=2)],
    Annotated[set[Colour], Field(min_length=2)],
    Annotated[dict[str, int], Field(min_length=2)],
    Annotated[Move | Say, Field(discriminator="kind")],
    Annotated[str, Field(pattern="^x$")] | int,
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_an_example_fits_its_type(kind: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    adapter.validate_python(example(adapter.json_schema()))


@given(st.integers(-1000, 1000), st.integers(0, 50), st.integers(1, 20))
def test_an_integer_lies_within_its_bounds(low: int, room: int, unit: int) -> None:
    fitting = [value for value in range(low, low + room + 1) if value % unit == 0]
    schema = {"type": "integer", "minimum": low, "maximum": low + room, "multipleOf": unit}
    if fitting:
        assert example(schema) in fitting
    else:
        with pytest.raises(NoExample):
            example(schema)


@given(st.floats(-1e6, 1e6), st.floats(0.001, 1e6))
def test_a_number_lies_inside_open_bounds(low: float, room: float) -> None:
    value = example({"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + room})
    assert low < value < low + room
    assert math.isfinite(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^x$"},
        {"$ref": "#/$defs/Nowhere"},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {
            "$ref": "#/$defs/A",
            "$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}},
        },
    ],
)
def test_a_schema_without_an_example_is_reported(schema: dict[str, Any]) -> None:
    with pytest.raises(NoExample):
        example(schema)


def test_examples_of_the_author_come_first() -> None:
    assert example({"type": "string", "examples": ["e2e4"], "default": "d2d4"}) == "e2e4"
    assert example({"type": "string", "default": "d2d4", "pattern": "x"}) == "d2d4"
    assert example({"type": "object", "examples": [{"a": 1}], "required": ["b"]}) == {"a": 1}


def test_parts_of_a_schema_are_merged() -> None:
    schema = {"allOf": [{"type": "integer"}, {"minimum": 4}]}
    assert example(schema) == 4


@pytest.mark.parametrize("kind", [Point, Move, Say, Tree], ids=str)
def test_a_counterexample_is_refused(kind: type[BaseModel]) -> None:
    result = dict(counterexamples(kind.model_json_schema()))
    assert result
    for document in result.values():
        with pytest.raises(ValidationError):
            kind.model_validate(document)


def test_counterexamples_say_what_is_wrong() -> None:
    assert {problem for problem, _ in counterexamples(Point.model_json_schema())} == {
        "an unknown field 'no_such_field'",
        "no 'x'",
        "no 'y'",
        "a list as 'x'",
        "a list as 'y'",
        "a list as 'label'",
    }


def test_a_type_may_be_behind_a_reference() -> None:
    schema = Move.model_json_schema()
    assert has_type(schema["properties"]["to"], schema)
    assert not has_type({"title": "Anything"}, schema)
    assert not has_type({"$ref": "#/$defs/Any", "$defs": {"Any": {}}}, {"$defs": {"Any": {}}})
