"""WebSocket frames that hold one whole text message, as a server writes them."""

from __future__ import annotations

LARGEST = 0xFFFF
"""Larger messages take another form of length."""
WHOLE_TEXT, MEDIUM = 0x81, 126
_HEADS = [bytes((WHOLE_TEXT, size)) for size in range(MEDIUM)]


def frame_of(text: bytes) -> bytes:
    """A server's frame with a message of at most `LARGEST` bytes."""
    size = len(text)
    head = _HEADS[size] if size < MEDIUM else bytes((WHOLE_TEXT, MEDIUM, size >> 8, size & 0xFF))
    return head + text
