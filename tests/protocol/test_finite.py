import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from paddock import Action, State
from paddock.errors import InvalidMessage
from paddock.protocol.finite import check_finite, find_nonfinite
from paddock.protocol.messages import Wire


@dataclass
class Point:
    x: float


class Move(Action):
    speed: float = 0.0


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (math.nan, []),
        (-math.inf, []),
        (np.float32("inf"), []),
        ({"a": [1, 2.5, math.inf]}, ["a", 2]),
        ([["x", math.nan]], [0, 1]),
        ((1, {"b": math.nan}), [1, "b"]),
        (np.array([[1.0, 2.0], [3.0, np.nan]]), [1, 1]),
        ({"a": np.array([1.0, math.inf])}, ["a", 1]),
        (np.array([1, math.nan], dtype=object), [1]),
        (Point(math.nan), ["x"]),
        (Move(speed=math.nan), ["speed"]),
        (Move(metadata={"a": math.inf}), ["metadata", "a"]),
        (State(extra=math.nan), ["extra"]),
        ([10**400, math.nan], [1]),
    ],
)
def test_the_place_of_a_number_that_is_not_finite(value: Any, place: list[Any]) -> None:
    assert find_nonfinite(value) == place
    with pytest.raises(InvalidMessage) as error:
        check_finite(value, "action")
    assert error.value.data["errors"][0]["loc"] == ["action", *place]


@pytest.mark.parametrize(
    "value", [None, 1, 10**400, 0.5, "nan", [], [1, 2.5], [10**400], {"a": [None, "NaN"]}, np.arange(3), Move(), b"x"]
)
def test_everything_else_is_finite(value: Any) -> None:
    assert find_nonfinite(value) is None


NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', '"inf"', "9" * 400 + ".0"]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_way_of_writing_it_gets_into_an_action(number: str) -> None:
    wire, frame = Wire(Move), f'{{"type":"step","data":{{"speed":{number}}}}}'
    for read in (lambda: wire.parse(frame), lambda: wire.parse_batch(f"[{frame}]")):
        with pytest.raises(InvalidMessage, match="speed: Input should be a finite number"):
            read()


@pytest.mark.parametrize("number", NUMBERS[:4])
def test_it_is_refused_in_what_has_no_type(number: str) -> None:
    for data in (f'"step","data":{{"metadata":{{"a":{number}}}}}', f'"reset","data":{{"level":{number}}}'):
        with pytest.raises(InvalidMessage, match="finite"):
            Wire(Move).parse(f'{{"type":{data}}}')
