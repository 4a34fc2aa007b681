"""Rendered frames as text: PNG in a data URL, written and read with the standard library alone."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy

PREFIX = "data:image/png;base64,"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
COLOURS = {1: 0, 3: 2, 4: 6}
"""PNG's colour types by the number of channels."""


def to_url(frame: Any) -> str:
    """A frame of 8-bit pixels, height x width (x channels), as a data URL."""
    pixels = numpy.ascontiguousarray(frame, dtype=numpy.uint8)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    height, width, channels = pixels.shape
    # Each row begins with its filter: 0, none.
    rows = numpy.concatenate([numpy.zeros((height, 1), numpy.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)) + _chunk(b"IEND", b"")
    return PREFIX + base64.b64encode(SIGNATURE + chunks).decode()


def from_url(url: str) -> Any:
    """The pixels in a data URL that `to_url` wrote."""
    data = base64.b64decode(url.removeprefix(PREFIX))
    width, height, _, colour = struct.unpack(">IIBB", data[16:26])
    channels = next(count for count, known in COLOURS.items() if known == colour)
    (length,) = struct.unpack(">I", data[33:37])
    rows = numpy.frombuffer(zlib.decompress(data[41 : 41 + length]), numpy.uint8).reshape(
        height, 1 + width * channels
    )
    return rows[:, 1:].reshape((height, width, channels) if channels > 1 else (height, width)).copy()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
