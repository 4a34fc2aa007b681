"""The one form of frame that is written without picows."""

import struct

import pytest

from paddock.server.plain_frame import LARGEST, frame_of, head_of


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 5000, LARGEST])
def test_a_written_frame_says_its_length(size: int) -> None:
    text = b"x" * size
    head = bytes([0x81, size]) if size < 126 else struct.pack("!BBH", 0x81, 126, size)
    assert frame_of(text) == head + text


def test_a_long_frame_says_its_length_in_eight_bytes() -> None:
    assert head_of(LARGEST + 1) == struct.pack("!BBQ", 0x81, 127, LARGEST + 1)
