"""WebSocket frames that hold one whole text message, as a server writes them."""

from __future__ import annotations

LARGEST = 0xFFFF
"""Larger messages take another form of length."""
WHOLE_TEXT, MEDIUM, LONG = 0x81, 126, 127
_HEADS = [bytes((WHOLE_TEXT, size)) for size in range(MEDIUM)]


def head_of(size: int) -> bytes:
    """What a server's frame with a text message of so many bytes begins with."""
    if size < MEDIUM:
        return _HEADS[size]
    if size <= LARGEST:
        return bytes((WHOLE_TEXT, MEDIUM, size >> 8, size & 0xFF))
    return bytes((WHOLE_TEXT, LONG)) + size.to_bytes(8, "big")


def frame_of(text: bytes) -> bytes:
    """A server's frame with a message of at most `LARGEST` bytes."""
    return head_of(len(text)) + text
