"""Copies bytes between two connections until both directions have ended. Knows nothing of what they mean."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sandbox.network.egress import OutboundConnection

PIECE_BYTES = 64 * 1024


async def relay(
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    outbound: OutboundConnection,
    idle_seconds: float,
    first_bytes: bytes = b"",
) -> None:
    """Copy both ways; the end of one direction is passed on while the other goes on.

    Returns when both have ended, or nothing was sent for `idle_seconds`. `first_bytes` are sent out before the rest.
    """
    loop = asyncio.get_running_loop()
    live = outbound.live

    def count_sent(count: int) -> None:
        live.sent_bytes += count
        deadline.reschedule(loop.time() + idle_seconds)

    def count_received(count: int) -> None:
        live.received_bytes += count
        deadline.reschedule(loop.time() + idle_seconds)

    with suppress(TimeoutError):
        async with asyncio.timeout(idle_seconds) as deadline:
            if first_bytes:
                outbound.writer.write(first_bytes)
                count_sent(len(first_bytes))
            await asyncio.gather(
                _copy(client[0], outbound.writer, count_sent), _copy(outbound.reader, client[1], count_received)
            )


async def flush(writer: asyncio.StreamWriter, seconds: float) -> None:
    """Close the connection once all that was written is sent. Raises TimeoutError if that takes longer than that."""
    writer.close()
    async with asyncio.timeout(seconds):
        await writer.wait_closed()


def reset(writer: asyncio.StreamWriter) -> None:
    """Cut the connection with an error at the other end, not with an orderly end."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None]) -> None:
    """Waits for the writer after each piece, so no more is read than the other side takes."""
    while piece := await reader.read(PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
        count(len(piece))
    if writer.can_write_eof():
        writer.write_eof()
