"""Ordinary steps are read without their envelope, and mean the same as when they are parsed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from paddock import Action
from paddock.protocol import messages
from paddock.protocol.messages import Wire
from paddock.server.fastpath.quick_step import QuickStep, QuickStepReader


class Add(Action):
    amount: float = Field(ge=0)


WIRE, READER = Wire(Add), QuickStepReader(Add)
SCRAPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)
NUMBERS = st.integers(0, 3) | st.integers(0, 10**16) | st.integers(-1, 0)


def written(kind: str, data: Any, rest: dict[str, Any], separators: tuple[str, str]) -> bytes:
    return json.dumps({"type": kind, "data": data, **rest}, separators=separators).encode()


STEPS = st.builds(
    written,
    st.sampled_from(["step", "step", "step", "reset"]),
    st.fixed_dictionaries({"amount": st.integers(-1, 3) | st.text(max_size=2)}) | SCRAPS,
    st.fixed_dictionaries({}, optional={"x": SCRAPS, "timeout_s": st.floats(), "id": NUMBERS, "ack": NUMBERS}),
    st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]),
)
ENDS = [b"}}", b',"id":1,"ack":0}', b'},"id":1,"ack":0}', b'},"timeout_s":2.5,"id":1,"ack":0}', b'},"id":01,"ack":0}']
TAILS = st.builds(
    lambda middle, end: b'{"type":"step","data":{"amount":1' + middle + end,
    st.binary(max_size=60) | st.sampled_from([b"", b',"metadata":{"id":1', b"},{"]),
    st.sampled_from(ENDS),
)


@given(STEPS | TAILS)
def test_a_quick_step_means_what_the_parsed_one_means(raw: bytes) -> None:
    step = READER.read(raw)
    if step is None:
        return
    message = WIRE.parse(raw)
    assert isinstance(message, messages.StepMessage)
    assert (message.data, message.id, message.ack, message.timeout_s, message.session) == (*step, None)


@pytest.mark.parametrize("spaced", [False, True])
def test_steps_of_stock_clients_are_quick(spaced: bool) -> None:
    raw = json.dumps({"type": "step", "data": {"amount": 3}}, separators=None if spaced else (",", ":")).encode()
    assert READER.read(raw) == QuickStep(Add(amount=3))


@pytest.mark.parametrize(
    ("written", "timeout"), [(b"", None), (b',"timeout_s":600.0', 600.0), (b',"timeout_s":5', 5.0)]
)
def test_numbered_steps_are_quick_with_and_without_a_deadline(written: bytes, timeout: float | None) -> None:
    raw = b'{"type":"step","data":{"amount":3}' + written + b',"id":7,"ack":6}'
    assert READER.read(raw) == QuickStep(Add(amount=3), 7, 6, timeout)


@pytest.mark.parametrize(
    "end",
    [
        b'},"id":07,"ack":6}',
        b'},"id":7}',
        b'},"ack":6,"id":7}',
        b'},"timeout_s":0,"id":7,"ack":6}',
        b'},"id":-1,"ack":0}',
    ],
)
def test_what_is_unusual_is_left_to_the_parser(end: bytes) -> None:
    assert READER.read(b'{"type":"step","data":{"amount":3' + end) is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", '"nan"', '"inf"'])
def test_a_number_that_is_not_finite_is_left_to_the_parser(number: str) -> None:
    assert READER.read(f'{{"type":"step","data":{{"amount":{number}}}}}'.encode()) is None
