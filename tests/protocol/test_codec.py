import enum
import json
import math
import uuid
from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    computed_field,
    field_serializer,
    model_serializer,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from paddock import Observation, State
from paddock.errors import EnvironmentFailure
from paddock.protocol.codec import encode, model_fields, observation_body, observation_data


def sent(value: Any) -> Any:
    """What a client reads."""
    return json.loads(encode(value))


def observed(observation: Any) -> Any:
    """The observation as a client of `/ws` reads it."""
    return sent(observation_data(observation))["observation"]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_json_values_come_back_as_they_were(value: Any) -> None:
    assert sent(value) == value


@given(JSON_VALUES)
def test_json_values_in_an_observation_come_back_as_they_were(value: Any) -> None:
    class Free(Observation):
        value: Any

    assert observed(Free(value=value))["value"] == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")])
def test_what_is_no_number_is_null(value: Any) -> None:
    assert sent([value]) == [None]


def test_nan_is_null_beside_a_long_integer() -> None:
    assert sent({"a": math.nan, "b": 10**30, "c": {1: math.inf}}) == {
        "a": None,
        "b": 10**30,
        "c": {"1": None},
    }


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, np.float32("nan")])
@pytest.mark.parametrize("write", [observation_data, observation_body])
def test_a_reward_that_is_not_finite_is_the_environments_error(write: Any, reward: Any) -> None:
    with pytest.raises(EnvironmentFailure, match=f"returned a reward that is {float(reward)}"):
        write({"reward": reward, "done": False})


@pytest.mark.parametrize(
    ("array", "plain"),
    [
        (np.arange(3), [0, 1, 2]),
        (np.zeros((2, 2), np.float32), [[0, 0], [0, 0]]),
        (np.arange(6).reshape(2, 3).T, [[0, 3], [1, 4], [2, 5]]),
        (np.arange(10)[::2], [0, 2, 4, 6, 8]),
        (np.array([1.0, np.nan]), [1.0, None]),
        (np.array([True, False]), [True, False]),
        (np.array(5), 5),
        (np.array([1, 2], dtype=np.uint8), [1, 2]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([{"a": np.int64(1)}], dtype=object), [{"a": 1}]),
        (np.array([], dtype=np.float16), []),
        (np.asfortranarray(np.arange(4).reshape(2, 2)), [[0, 1], [2, 3]]),
        (np.array([1, 2], dtype=">i4"), [1, 2]),
    ],
)
def test_a_numpy_array_is_a_list(array: Any, plain: Any) -> None:
    assert sent({"a": array}) == {"a": plain}


@pytest.mark.parametrize(
    ("scalar", "plain"),
    [
        (np.int64(3), 3),
        (np.uint8(3), 3),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
    ],
)
def test_a_numpy_scalar_is_its_value(scalar: Any, plain: Any) -> None:
    assert sent({"a": scalar}) == {"a": plain}
    assert sent({"a": scalar, "long": 10**30})["a"] == plain


@pytest.mark.parametrize("reward", [np.float32(0.5), np.float64(0.5), np.int64(1), np.bool_(True)])
def test_a_numpy_reward_is_a_number(reward: Any) -> None:
    assert float(sent(observation_data(Observation(reward=reward)))["reward"]) == float(reward)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ({3}, [3]),
        (frozenset("a"), ["a"]),
        ({np.int64(3)}, [3]),
        ((1, 2), [1, 2]),
        (deque([1]), [1]),
        (namedtuple("Point", "x y")(1, 2), [1, 2]),
        (datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC), "2024-05-06T07:08:09Z"),
        (datetime(2024, 5, 6, 7, 8, 9), "2024-05-06T07:08:09"),
        (date(2024, 5, 6), "2024-05-06"),
        (time(7, 8), "07:08:00"),
        (timedelta(seconds=90), "PT1M30S"),
        (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.50"),
        (Path("a/b"), "a/b"),
        (b"text", "text"),
        (enum.Enum("Colour", {"RED": "red"}).RED, "red"),  # type: ignore[attr-defined]
        (OrderedDict(a=1), {"a": 1}),
    ],
)
def test_common_python_values_have_a_json_form(value: Any, plain: Any) -> None:
    assert sent({"v": value}) == {"v": plain}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (1, "1"),
        (1.5, "1.5"),
        (True, "true"),
        (None, "null"),
        (date(2024, 5, 6), "2024-05-06"),
        (10**30, str(10**30)),
    ],
)
def test_a_key_that_is_no_string_becomes_one(key: Any, text: str) -> None:
    assert sent({"outer": {key: 1}}) == {"outer": {text: 1}}


def test_keys_may_be_strings_in_disguise() -> None:
    class Name(str):
        __slots__ = ()

    class Side(enum.StrEnum):
        LEFT = "left"

    assert sent({Name("a"): 1, Side.LEFT: 2, np.str_("n"): 3}) == {"a": 1, "left": 2, "n": 3}


def test_numpy_integers_may_be_keys() -> None:
    assert sent({"count": {np.int64(3): 1}}) == {"count": {"3": 1}}


def test_integers_may_have_thirty_digits() -> None:
    assert sent({"n": 10**30, "m": -(10**30)}) == {"n": 10**30, "m": -(10**30)}


class Inner(BaseModel):
    size: int = 1


class Outer(Observation):
    inner: Inner = Inner()
    many: list[Inner] = Field(default_factory=lambda: [Inner(size=2)])
    by_name: dict[str, Inner] = Field(default_factory=lambda: {"a": Inner(size=3)})


def test_nested_models_are_objects() -> None:
    fields = observed(Outer())
    assert fields["inner"] == {"size": 1}
    assert fields["many"] == [{"size": 2}]
    assert fields["by_name"] == {"a": {"size": 3}}


def test_nested_models_are_objects_beside_a_long_integer() -> None:
    assert sent({"outer": Outer(), "n": 10**30})["outer"]["many"] == [{"size": 2}]


def test_a_subclass_in_a_field_keeps_its_own_fields() -> None:
    class More(Inner):
        colour: str = "red"

    assert observed(Outer(inner=More()))["inner"] == {"size": 1, "colour": "red"}


def test_a_computed_field_is_sent() -> None:
    class Square(Observation):
        side: int

        @computed_field  # type: ignore[prop-decorator]
        @property
        def area(self) -> int:
            return self.side**2

    assert observed(Square(side=3))["area"] == 9


def test_a_field_serializer_is_asked() -> None:
    class Secretive(Observation):
        word: str = "hunter2"

        @field_serializer("word")
        def hide(self, word: str) -> str:
            return "*" * len(word)

    assert observed(Secretive())["word"] == "*******"
    assert sent({"deep": [Secretive()]})["deep"][0]["word"] == "*******"


def test_a_model_serializer_is_asked() -> None:
    class Terse(BaseModel):
        x: int = 1

        @model_serializer
        def short(self) -> str:
            return f"<{self.x}>"

    assert sent([Terse()]) == ["<1>"]


def test_a_field_that_is_excluded_is_not_sent() -> None:
    class Quiet(Observation):
        visible: int = 1
        hidden: int = Field(default=2, exclude=True)

    assert observed(Quiet()) == {"visible": 1, "metadata": {}}


def test_a_field_with_an_alias_goes_by_its_own_name() -> None:
    class Named(Observation):
        model_config = ConfigDict(populate_by_name=True)
        from_: int = Field(default=1, alias="from")

    assert observed(Named())["from_"] == 1


def test_a_model_that_serialises_by_alias_does() -> None:
    class Named(Observation):
        model_config = ConfigDict(serialize_by_alias=True)
        from_: int = Field(default=1, serialization_alias="from")

    assert observed(Named())["from"] == 1


def test_a_root_model_is_what_it_holds() -> None:
    class Names(RootModel[list[str]]):
        pass

    assert sent({"names": Names(["a"])}) == {"names": ["a"]}


def test_how_a_model_writes_bytes_is_its_own_business() -> None:
    class Blob(Observation):
        model_config = ConfigDict(ser_json_bytes="base64")
        data: bytes = b"\xff\x00"

    assert observed(Blob())["data"] == "_wA="


def test_how_a_model_writes_durations_is_its_own_business() -> None:
    class Timed(Observation):
        model_config = ConfigDict(ser_json_timedelta="float")
        took: timedelta = timedelta(seconds=1.5)

    assert observed(Timed())["took"] == 1.5


def test_a_dataclass_is_an_object() -> None:
    @dataclass
    class Point:
        x: int
        y: Any

    assert sent({"p": Point(1, np.arange(2))}) == {"p": {"x": 1, "y": [0, 1]}}


def test_a_pydantic_dataclass_serialises_as_it_says() -> None:
    @pydantic_dataclass
    class Hidden:
        word: str = "hunter2"

        @field_serializer("word")
        def hide(self, word: str) -> str:
            return "*"

    assert sent({"p": Hidden()}) == {"p": {"word": "*"}}


def test_numpy_in_a_model_with_a_serializer() -> None:
    class Mixed(Observation):
        frame: Any = None
        word: str = "a"

        @field_serializer("word")
        def loud(self, word: str) -> str:
            return word.upper()

    assert observed(Mixed(frame=np.arange(2)))["frame"] == [0, 1]
    assert observed(Mixed(frame={"x": np.float32(0.5)}))["frame"] == {"x": 0.5}
    assert observed(Mixed(frame=math.nan))["frame"] is None


def test_extra_fields_of_a_state_are_sent() -> None:
    assert sent(model_fields(State(step_count=1, level=3)))["level"] == 3  # type: ignore[call-arg]


def test_a_models_fields_are_a_copy() -> None:
    observation = Observation(metadata={"a": 1})
    model_fields(observation).pop("metadata")
    assert observation.metadata == {"a": 1}


@pytest.mark.parametrize(
    "value",
    [b"\xff\xfe", "\ud800", {"\ud800": 1}, object(), {(1, object()): 1}, 10**5000, lambda: 0],
    ids=["bytes", "surrogate", "surrogate key", "object", "odd key", "5,000 digits", "function"],
)
def test_what_json_cannot_say_is_a_clear_error(value: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="cannot be written as JSON") as failure:
        encode({"v": value})
    assert failure.value.hint


def test_a_circle_is_a_clear_error() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(EnvironmentFailure, match="cannot be written as JSON"):
        encode(circle)


def test_very_deep_values_are_a_clear_error() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(EnvironmentFailure, match="cannot be written as JSON"):
        encode(deep)
    while isinstance(deep, list):
        deep = deep.pop()


class Loud(Observation):
    value: Any = None

    @field_serializer("value")
    def shout(self, value: Any) -> Any:
        if value == "raise":
            raise RuntimeError("no")
        return value


@pytest.mark.parametrize("value", [b"\xff", "\ud800", object(), "raise"])
def test_a_model_with_serializers_fails_as_clearly(value: Any) -> None:
    with pytest.raises(EnvironmentFailure, match="cannot be written as JSON"):
        encode(observation_data(Loud(value=value)))


@pytest.mark.parametrize("returned", [None, 5, "text", [1]])
def test_what_is_no_observation_is_a_clear_error(returned: Any) -> None:
    with pytest.raises(EnvironmentFailure, match=type(returned).__name__):
        observation_data(returned)


def test_a_dict_will_do_for_an_observation() -> None:
    data = sent(observation_data({"total": 1, "reward": 2, "done": True}))
    assert data == {"observation": {"total": 1}, "reward": 2, "done": True}


def test_metadata_is_present_only_when_there_is_any() -> None:
    assert "metadata" not in observation_data(Observation())
    assert observation_data(Observation(metadata={"a": 1}))["metadata"] == {"a": 1}
    assert observation_body(Observation())["metadata"] is None


@pytest.mark.parametrize(("reward", "over_ws", "over_http"), [(True, True, 1.0), (3, 3, 3.0), (None, None, None)])
def test_a_reward_keeps_its_kind_on_sockets_and_is_a_float_on_http(reward: Any, over_ws: Any, over_http: Any) -> None:
    observation = Observation(reward=reward)
    assert repr(sent(observation_data(observation))["reward"]) == repr(over_ws)
    assert repr(sent(observation_body(observation))["reward"]) == repr(over_http)
