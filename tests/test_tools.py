"""Tools: schemas from signature and docstring, hints, arguments."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, RootModel

from paddock import ToolEnvironment, ToolReturn, tool
from paddock.errors import ConfigError, InvalidToolArguments, ToolFailure
from paddock.protocol.codec import encode
from paddock.protocol.mcp import tool_result
from paddock.sessions.spec import EnvironmentSpec
from paddock.tools import ToolOptions, ToolSpec, parse_docstring


class Point(BaseModel):
    x: int
    y: int = 0


class Side(Enum):
    LEFT = "left"
    RIGHT = "right"


class Box(ToolEnvironment):
    @tool
    def move(self, where: Point, side: Side = Side.LEFT, speed: Literal["slow", "fast"] = "slow") -> Point:
        """Move the box.

        It moves at once.

        Args:
            where: The place to go to,
                as a point.
            side (Side): Which side to hold.

        Returns:
            Where it is now.
        """
        return where

    @tool
    def count(self, times: Annotated[int, Field(ge=1, le=9, description="How often")], *, loud: bool = False) -> int:
        return times

    @tool
    def untyped(self, value, other=3):  # type: ignore[no-untyped-def]
        return value

    @tool(name="hidden-name", title="Nice", read_only=True, idempotent=True)
    def renamed(self) -> None:
        """Do nothing."""

    @tool(destructive=True)
    def wipe(self, names: list[str], limits: dict[str, int] | None = None) -> list[str]:
        return names

    @tool
    def scored(self) -> ToolReturn:
        return ToolReturn(1)

    @tool
    def typed_dict(self) -> dict[str, Any]:
        return {}


def schema(name: str) -> dict[str, Any]:
    return Box.tools[name].input_schema


def test_the_signature_is_the_schema() -> None:
    result = schema("count")
    assert result["type"] == "object"
    assert result["properties"]["times"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 9,
        "description": "How often",
    }
    assert result["properties"]["loud"] == {"type": "boolean", "default": False}
    assert result["required"] == ["times"]
    assert result["additionalProperties"] is False


def test_models_enums_and_literals_are_described() -> None:
    result = schema("move")
    assert result["$defs"]["Point"]["required"] == ["x"]
    assert result["$defs"]["Side"]["enum"] == ["left", "right"]
    assert result["properties"]["speed"]["enum"] == ["slow", "fast"]
    assert result["required"] == ["where"]


def test_the_docstring_is_the_description() -> None:
    assert Box.tools["move"].description == "Move the box.\n\nIt moves at once."
    described = schema("move")["properties"]
    assert described["where"]["description"] == "The place to go to, as a point."
    assert described["side"]["description"] == "Which side to hold."


def test_a_tool_without_a_docstring_has_an_empty_description() -> None:
    assert Box.tools["count"].description == ""


def test_a_tool_without_arguments_takes_an_object() -> None:
    assert schema("hidden-name") == {"type": "object", "properties": {}, "additionalProperties": False}


def test_untyped_arguments_may_be_anything() -> None:
    result = schema("untyped")
    assert result["required"] == ["value"]
    assert Box.tools["untyped"].check({"value": [1]}) == {"value": [1]}


def test_no_pydantic_titles_are_shown() -> None:
    assert "title" not in schema("move")
    assert all("title" not in described for described in schema("move")["properties"].values())


@pytest.mark.parametrize(
    ("name", "wrapped"), [("count", True), ("move", False), ("wipe", True), ("typed_dict", False)]
)
def test_the_output_is_always_an_object(name: str, wrapped: bool) -> None:
    result = Box.tools[name].output_schema
    assert result is not None
    assert result["type"] == "object"
    assert ("result" in result.get("properties", {})) is wrapped


@pytest.mark.parametrize("name", ["hidden-name", "untyped", "scored"])
def test_an_output_that_is_not_known_has_no_schema(name: str) -> None:
    assert Box.tools[name].output_schema is None


def test_options_are_kept() -> None:
    options = Box.tools["hidden-name"].options
    assert (options.title, options.read_only, options.idempotent, options.destructive) == ("Nice", True, True, None)
    assert Box.tools["wipe"].options.destructive is True


def test_arguments_become_their_types() -> None:
    checked = Box.tools["move"].check({"where": {"x": "3"}, "side": "right"})
    assert checked == {"where": Point(x=3), "side": Side.RIGHT}


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("move", {}, "where"),
        ("move", {"where": {"y": 1}}, "where.x"),
        ("move", {"where": {"x": 1}, "side": "up"}, "side"),
        ("count", {"times": 10}, "times"),
        ("count", {"times": 1, "extra": 2}, "extra"),
        ("wipe", {"names": "abc"}, "names"),
    ],
)
def test_wrong_arguments_are_named(name: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidToolArguments, match=text) as refused:
        Box.tools[name].check(arguments)
    assert refused.value.data["tool_name"] == name


@pytest.mark.parametrize("name", ["reset", "step", "state", "close"])
def test_the_environments_own_names_are_reserved(name: str) -> None:
    def method(self: Any) -> str:
        return ""

    with pytest.raises(ConfigError, match=name):
        type("Wrong", (ToolEnvironment,), {"method": tool(name=name)(method)})


@pytest.mark.parametrize(
    "name", ["json", "schema", "copy", "model_name", "dict", "validate", "model_config", "_private", "cls"]
)
def test_an_argument_may_have_any_name(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def method(self, {name}: int) -> int:\n    return {name}", namespace)
    made: Any = type("Names", (ToolEnvironment,), {"method": tool(namespace["method"])})
    assert made.tools["method"].input_schema["required"] == [name]
    assert made().call_tool("method", {name: 3}) == 3


def test_a_mutable_default_is_not_shared_or_sent() -> None:
    class Defaults(ToolEnvironment):
        @tool
        def gather(self, items: list[int] = []) -> list[int]:  # noqa: B006
            return [*items, 1]

    assert Defaults().call_tool("gather", {}) == [1]
    assert Defaults().call_tool("gather", {"items": [5]}) == [5, 1]


@pytest.mark.parametrize("signature", ["self, *args", "self, **kwargs"])
def test_every_argument_needs_a_name(signature: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def method({signature}):\n    pass", namespace)
    with pytest.raises(ConfigError, match="takes"):
        _ = type("Wrong", (ToolEnvironment,), {"method": tool(namespace["method"])}).tools["method"].arguments  # type: ignore[attr-defined]


def test_async_is_noticed() -> None:
    async def wait(self: Any) -> str:
        return ""

    tool(wait)
    assert ToolSpec(wait, getattr(wait, "__paddock_tool__")).is_async  # noqa: B009


@pytest.mark.parametrize(
    ("text", "description", "arguments"),
    [
        (None, "", {}),
        ("", "", {}),
        ("One line.", "One line.", {}),
        (
            "Say.\n\nArgs:\n    a: First.\n    b (int): Second: with colon.",
            "Say.",
            {"a": "First.", "b": "Second: with colon."},
        ),
        ("Say.\n\nParameters:\n    a: x\n\nRaises:\n    ValueError: never\n", "Say.", {"a": "x"}),
        ("Note: not a section.\nMore.", "Note: not a section.\nMore.", {}),
        ("Say.\n\nArgs:\n    *rest: All.", "Say.", {"rest": "All."}),
    ],
)
def test_docstrings(text: str | None, description: str, arguments: dict[str, str]) -> None:
    assert parse_docstring(text) == (description, arguments)


# -- what is announced is what is sent ----------------------------------------------------------------


class Named(BaseModel):
    name: str = Field(alias="myName")


class Node(BaseModel):
    child: "Node | None" = None


class Numbers(RootModel[list[int]]):
    pass


@dataclass
class Spot:
    x: int


class Sending(ToolEnvironment):
    @tool
    def maybe(self) -> str | None:
        return None

    @tool
    def maybe_object(self) -> dict[str, int] | None:
        return {"a": 1}

    @tool
    def either(self) -> dict[str, int] | str:
        return {"a": 1}

    @tool
    def recursive(self) -> Node:
        return Node(child=Node())

    @tool
    def point(self) -> Spot:
        return Spot(1)

    @tool
    def named(self) -> Named:
        return Named(myName="x")

    @tool
    def numbers(self) -> Numbers:
        return Numbers([1])

    @tool
    def scored(self) -> ToolReturn | str:
        return "x"


SENT: dict[str, Any] = {
    "maybe": {"result": None},
    "maybe_object": {"result": {"a": 1}},
    "either": {"result": {"a": 1}},
    "recursive": {"result": {"child": {"child": None}}},
    "point": {"x": 1},
    "named": {"name": "x"},
    "numbers": {"result": [1]},
}


@pytest.mark.parametrize("name", SENT)
def test_a_result_has_the_form_that_was_announced(name: str) -> None:
    environment, spec = Sending(), Sending.tools[name]
    sent = tool_result(environment.call_tool(name, {}), spec)["structuredContent"]
    sent = json.loads(encode(sent))
    assert sent == SENT[name]
    assert spec.output_schema is not None
    Draft202012Validator(spec.output_schema).validate(sent)


def test_a_result_that_may_be_scored_announces_nothing() -> None:
    assert Sending.tools["scored"].output_schema is None


def of(function: Any) -> ToolSpec:
    return ToolSpec(function, ToolOptions())


def test_a_result_that_no_schema_describes_is_not_announced() -> None:
    def later(self: Any) -> Callable[[], int]: ...

    of(later).build_schemas()
    assert of(later).output_schema is None


class Unknown:
    pass


def takes_any_class(self: Any, thing: Unknown) -> str: ...
def takes_what_cannot_be_found(self: Any, thing: "Nowhere") -> str: ...  # type: ignore[name-defined] # noqa: F821
def takes_all(self: Any, *things: int) -> str: ...
def takes_by_position(self: Any, thing: int, /) -> str: ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (takes_any_class, "JSON Schema"),
        (takes_what_cannot_be_found, "Nowhere"),
        (takes_all, "things"),
        (takes_by_position, "by position"),
    ],
)
def test_what_cannot_be_announced_is_refused_before_it_is_served(function: Any, message: str) -> None:
    class Broken(ToolEnvironment):
        broken = tool(function)

    with pytest.raises(ConfigError, match=message) as refused:
        EnvironmentSpec(Broken)
    assert refused.value.hint


def test_a_tool_is_a_plain_method() -> None:
    with pytest.raises(ConfigError, match="plain method"):
        type("Static", (ToolEnvironment,), {"odd": staticmethod(tool(lambda: 1))})
    with pytest.raises(ConfigError, match="plain method"):
        tool(classmethod(lambda cls: 1))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_whatever_a_tool_raises_is_its_failure(error: BaseException) -> None:
    class Raising(ToolEnvironment):
        @tool
        def leave(self) -> str:
            raise error

    with pytest.raises(ToolFailure, match=type(error).__name__):
        Raising().call_tool("leave", {})
