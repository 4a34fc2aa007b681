"""Writing to a socket past its transport: `send` never waits, and keeps the GIL.

The methods of `socket` release the GIL around the call. Where other threads want it, taking it back costs more than
the call itself.
"""

from __future__ import annotations

import ctypes
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import Transport


def is_plain(transport: Transport) -> bool:
    """Whether the bytes of this transport are those on its socket, where they can be written past it."""
    return sys.platform == "linux" and transport.get_extra_info("sslcontext") is None


def send(descriptor: int, data: bytes) -> int:
    """How many bytes were taken; not more than 0 if none can be."""
    return _send(descriptor, data, len(data), _SEND_FLAGS)  # type: ignore[no-any-return]


if sys.platform == "linux":
    # The types of arguments are left for ctypes to see: for bytes and small integers that is twice as quick as to be
    # told.
    _send = ctypes.PyDLL(None).send
    _SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
