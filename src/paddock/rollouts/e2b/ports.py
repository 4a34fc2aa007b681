"""The door of a front: HTTP for the front itself, and any port of a guest at `PORT-ID.domain`.

What is meant for a guest is not understood here: after the head of the first request, bytes go both ways, so
that WebSockets and everything else that begins as HTTP works too.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import TYPE_CHECKING, cast

import orjson

from paddock.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.e2b.lifecycle import Guests

logger = logging.getLogger(__name__)

ENVD_PORT = 49983
LONGEST_HEAD = 65536
HEAD_SECONDS = 20.0
"""From the connection to the end of the headers of its first request."""
DIAL_SECONDS = 10.0
HOST = re.compile(rb"\r\nhost:[ \t]*(\d{1,5})-([a-z0-9-]+)\.", re.IGNORECASE)


class Door(asyncio.Protocol):
    """One connection, until it is known whose it is."""

    def __init__(self, guests: Guests, front: Callable[[], asyncio.Protocol]) -> None:
        self._guests, self._front = guests, front
        self._head = bytearray()
        self._transport: asyncio.Transport | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._work: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._patience = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._close_late)

    def connection_lost(self, error: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or self._work is not None:
            self._head += data
            return
        self._head += data
        if b"\r\n\r\n" not in self._head and len(self._head) < LONGEST_HEAD:
            return
        if self._patience is not None:
            self._patience.cancel()
        found = HOST.search(self._head.partition(b"\r\n\r\n")[0])
        if found is None or int(found[1]) == ENVD_PORT:
            protocol = self._front()
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
            protocol.data_received(bytes(self._head))
        else:
            transport.pause_reading()
            self._work = asyncio.ensure_future(self._lead(transport, found[2].decode().lower(), int(found[1])))

    def _close_late(self) -> None:
        assert self._transport is not None
        peer = self._transport.get_extra_info("peername")
        logger.warning("a connection of %s was closed: the headers of its request did not arrive in time", peer)
        self._transport.close()

    async def _lead(self, transport: asyncio.Transport, guest_id: str, port: int) -> None:
        guest = self._guests.find(guest_id)
        if guest is None:
            refuse(transport, {"sandboxId": guest_id, "message": "The sandbox was not found", "code": 502})
            return
        try:
            inside = await guest.sandbox.dial(port, timeout=DIAL_SECONDS)
        except (OSError, SandboxError):
            told = {"sandboxId": guest_id, "message": "The sandbox is running but port is not open", "port": port}
            refuse(transport, {**told, "code": 502})
            return
        loop = asyncio.get_running_loop()
        there, _ = await loop.create_connection(lambda: Half(transport), sock=inside)
        there.write(bytes(self._head))
        half = Half(there)
        half.connection_made(transport)
        transport.set_protocol(half)
        transport.resume_reading()


class Half(asyncio.Protocol):
    """One direction of a connection that is only passed on."""

    def __init__(self, other: asyncio.Transport) -> None:
        self._other = other
        self._own: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._own = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._other.write(data)

    def eof_received(self) -> bool:
        if self._other.can_write_eof() and not self._other.is_closing():
            self._other.write_eof()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self._other.close()

    def pause_writing(self) -> None:
        """Our own side is full: whoever fills it waits."""
        if not self._other.is_closing():
            self._other.pause_reading()

    def resume_writing(self) -> None:
        if not self._other.is_closing():
            self._other.resume_reading()


def refuse(transport: asyncio.Transport, told: dict[str, object]) -> None:
    body = orjson.dumps(told)
    head = f"HTTP/1.1 502 Bad Gateway\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
    transport.close()
