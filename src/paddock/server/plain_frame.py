"""The form of nearly all WebSocket frames: a text message, whole, in one frame. All others are left to picows."""

from __future__ import annotations

from websockets.frames import apply_mask  # type: ignore[attr-defined]

LARGEST = 0xFFFF
"""Larger messages take another form of length."""
WHOLE_TEXT, MASKED, MEDIUM = 0x81, 0x80, 126
_HEADS = [bytes((WHOLE_TEXT, size)) for size in range(MEDIUM)]


def text_in(data: bytes) -> bytes | None:
    """The message of a client, if `data` is a single one in one masked frame, and all of it."""
    size = len(data)
    if size < 6 or data[0] != WHOLE_TEXT:
        return None
    length, begins = data[1] - MASKED, 6
    if length == MEDIUM and size >= 8:
        length, begins = data[2] << 8 | data[3], 8
    elif not 0 <= length < MEDIUM:
        return None
    if size != begins + length:
        return None
    return apply_mask(data[begins:], data[begins - 4 : begins])


def frame_of(text: bytes) -> bytes:
    """A server's frame with a message of at most `LARGEST` bytes."""
    size = len(text)
    head = _HEADS[size] if size < MEDIUM else bytes((WHOLE_TEXT, MEDIUM, size >> 8, size & 0xFF))
    return head + text
