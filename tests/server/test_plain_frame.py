"""The one form of frame that is read and written without picows."""

import random
import struct

import pytest

from paddock.server.plain_frame import LARGEST, frame_of, text_in


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 5000, 65535])
@pytest.mark.parametrize("mask", [bytes(4), b"\x01\xfe\x7f\x80"])
def test_a_whole_text_frame_is_unmasked(size: int, mask: bytes) -> None:
    payload = random.Random(size).randbytes(size)
    head = bytes([0x81, 0x80 | size]) if size < 126 else struct.pack("!BBH", 0x81, 0xFE, size)
    data = head + mask + bytes(byte ^ mask[place % 4] for place, byte in enumerate(payload))
    assert text_in(data) == payload
    assert text_in(data + b"\x81") is None
    assert all(text_in(data[:cut]) is None for cut in range(max(0, len(data) - 300), len(data)))


@pytest.mark.parametrize(
    ("first", "second"),
    [(0x01, 0x80), (0x80, 0x80), (0x82, 0x80), (0x88, 0x80), (0xC1, 0x80), (0x81, 0x00), (0x81, 0xFF)],
)
def test_any_other_frame_is_none(first: int, second: int) -> None:
    assert text_in(bytes([first, second]) + bytes(12)) is None
    assert all(text_in(bytes([first, second]) + bytes(more)) is None for more in range(4, 150))


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 5000, LARGEST])
def test_a_written_frame_says_its_length(size: int) -> None:
    text = b"x" * size
    head = bytes([0x81, size]) if size < 126 else struct.pack("!BBH", 0x81, 126, size)
    assert frame_of(text) == head + text
