"""Values as bytes and back."""

import math
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.errors import StoreError
from paddock.store.packing import (
    PrefixedIds,
    begins_with,
    compress,
    decode,
    decode_list,
    decompress,
    encode,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)

VALUES = [
    None,
    {"a": None, "b": [math.inf, -math.inf, -0.0, 5e-324, 0.1 + 0.2]},
    "\ud83d\ude00",  # two surrogates, not the character that they would make
    ["\udcff", "null", "\0", "\U0001f600"],
    [2**63, -(2**63), 2**64, -(2**70), True, 1, 1.0],
    {"deep": [[[[{"x": {}}]]]]},
]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert repr(decode(encode(value))) == repr(value)


def test_a_list_is_decoded_like_its_items() -> None:
    items = [encode(value) for value in VALUES]
    assert repr(decode_list(items)) == repr(VALUES)
    assert decode_list([b"1", b'"a"']) == [1, "a"]


def test_nan_stays_nan() -> None:
    assert math.isnan(decode(encode({"x": math.nan}))["x"])


@pytest.mark.parametrize("value", [{1: 2}, {"a": [{None: 1}]}, object(), {"a": b"bytes"}])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(StoreError) as caught:
        encode(value)
    assert caught.value.hint


def test_ids_are_packed_when_they_fit() -> None:
    ids = [0, 1, 151_643, 2**32 - 1]
    packed = pack_ids(ids)
    assert packed is not None
    assert unpack_ids(packed) == ids
    assert pack_ids([-1]) is None
    assert pack_ids([2**32]) is None
    assert pack_ids([1.5]) is None  # type: ignore[list-item]


def test_floats_keep_every_bit() -> None:
    values = [-0.1, -0.0, -math.inf, 5e-324, 1.7976931348623157e308, -0.30000000000000004]
    packed = pack_floats(values)
    assert packed is not None
    assert [value.hex() for value in unpack_floats(packed)] == [value.hex() for value in values]
    assert pack_floats([0.5, 1]) is None
    assert pack_floats([None]) is None  # type: ignore[list-item]


@pytest.mark.parametrize("data", [b"", b"\0", b"(\xb5/\xfd", b"a" * 10_000, bytes(range(256)) * 2])
def test_squeezed_bytes_come_back(data: bytes) -> None:
    assert decompress(compress(data)) == data
    assert len(compress(data)) <= len(data) + 1


SMALL_IDS = st.lists(st.integers(0, 3), max_size=5)


def pack(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()


@given(st.lists(st.tuples(SMALL_IDS, st.integers(0, 20)), min_size=1, max_size=6), SMALL_IDS)
def test_a_chain_of_prompts_is_the_same_as_lists(chain: list[tuple[list[int], int]], sampled: list[int]) -> None:
    whole: list[int] = []
    prompt: PrefixedIds | None = None
    for added, cut in chain:
        head = min(cut, len(whole))
        before, earlier = prompt, list(whole)
        whole = [*whole[:head], *added]
        prompt = PrefixedIds(pack(added), prompt, head)
        assert len(prompt) == len(whole)
        for start in range(len(whole) + 1):
            assert list(prompt[start:]) == whole[start:]
        if before is not None:
            expected = whole[: len(earlier) + len(sampled)] == earlier + sampled
            assert begins_with(prompt, before, array("I", sampled)) == expected
        assert list(prompt) == whole
        assert prompt == array("I", whole)
    assert prompt is not None
    assert prompt.tobytes() == pack(whole)
