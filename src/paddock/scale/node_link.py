"""Messages between a process and what it placed on a node, over one socket that tells both when the other is gone.

The process that places (the driver of rollouts, the control plane of instances) listens, and the node connects. A
message has a kind, a JSON value and perhaps raw bytes. Both ends send heartbeats: a socket that breaks, or is silent
for too long, raises LinkLost, long before Ray notices. This module does not know Ray, nor what the messages mean.

A caller proves that it knows the token by signing a challenge (HMAC), so the token does not go over the wire in the
clear. Everything else is as open as Ray's own traffic in the cluster.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.store.packing import decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 8.0
"""Sixteen missed heartbeats. The death of a process is known at once: its socket closes."""
SILENCE_CHECKS = 8
HANDSHAKE_SECONDS = 10.0
MAX_MESSAGE_BYTES = 1 << 30
READ_BYTES = 1 << 20
_FRAME_HEADER = struct.Struct("!II")
_HEARTBEAT = "beat"
_ACCEPTED = b"accepted\n"


class LinkLost(ConnectionError):
    """The other end is gone, or was silent for too long."""


@dataclass(frozen=True, slots=True)
class LinkMessage:
    """A message between a node and the driver: a kind, a JSON value, and bytes."""

    kind: str
    value: Any = None
    raw: bytes = b""

    def frame(self) -> bytes:
        head = encode([self.kind, self.value])
        return b"".join((_FRAME_HEADER.pack(len(head), len(self.raw)), head, self.raw))


class NodeLink:
    """One end of the connection. Use it inside `keep_alive`, and receive in one task only."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silence: float = SILENCE_SECONDS
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._silence = silence
        self._reading: asyncio.Task[LinkMessage] | None = None

    def send(self, kind: str, value: Any = None, raw: bytes = b"") -> None:
        """Send without waiting. On a lost link the message is dropped, and `receive` raises."""
        self.send_frames([LinkMessage(kind, value, raw).frame()])

    def send_frames(self, frames: list[bytes]) -> None:
        if not self._writer.is_closing():
            self._writer.writelines(frames)

    async def drain(self) -> None:
        """Wait until most of what was sent has left (backpressure). Raises LinkLost."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise LinkLost(_reason(error)) from error

    async def receive(self) -> LinkMessage:
        """The next message. Raises LinkLost. A cancelled call loses nothing: the next one goes on."""
        silent_checks = 0
        while True:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read())
                self._reading.add_done_callback(_retrieve_exception)
            done, _ = await asyncio.wait((self._reading,), timeout=self._silence / SILENCE_CHECKS)
            if done:
                reading, self._reading = self._reading, None
                if reading.cancelled():
                    raise LinkLost("the link was closed")
                message = reading.result()
                if message.kind != _HEARTBEAT:
                    return message
                silent_checks = 0
            else:
                # Count intervals, not time: a process that was itself suspended could not receive anything.
                silent_checks += 1
                if silent_checks == SILENCE_CHECKS:
                    raise LinkLost(f"nothing was heard for {self._silence:g} s")

    async def _read(self) -> LinkMessage:
        try:
            head_size, raw_size = _FRAME_HEADER.unpack(await self._reader.readexactly(_FRAME_HEADER.size))
            if head_size + raw_size > MAX_MESSAGE_BYTES:
                raise LinkLost(f"a message of {head_size + raw_size} bytes is too large")
            kind, value = decode(await self._reader.readexactly(head_size))
            return LinkMessage(kind, value, await self._reader.readexactly(raw_size) if raw_size else b"")
        except asyncio.IncompleteReadError:
            raise LinkLost("the connection ended") from None
        except LinkLost:
            raise
        except OSError as error:
            raise LinkLost(_reason(error)) from error

    @asynccontextmanager
    async def keep_alive(self) -> AsyncIterator[NodeLink]:
        """Send a heartbeat each second; close the link at the end."""
        heartbeats = asyncio.ensure_future(self._send_heartbeats())
        try:
            yield self
        finally:
            heartbeats.cancel()
            self.close()

    def close(self) -> None:
        self._writer.close()
        if self._reading is not None:
            self._reading.cancel()

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self.send(_HEARTBEAT)


@asynccontextmanager
async def listen(
    host: str, admit: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
) -> AsyncIterator[int]:
    """Listen on a free port and pass each connection to `admit`, in a task that ends with the block at the latest."""
    tasks: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(admit(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(begin, host, 0, limit=READ_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def connect_to_driver(
    host: str, port: int, token: str, *purpose_words: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a driver and state the purpose. Raises LinkLost if it is gone or refuses."""
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
            try:
                challenge = await reader.readline()
                purpose = " ".join(purpose_words)
                writer.write(f"{sign(token, challenge, purpose)} {purpose}\n".encode())
                if await reader.readline() != _ACCEPTED:
                    raise LinkLost(f"the driver at {host}:{port} does not expect this")
            except BaseException:
                writer.close()
                raise
            return reader, writer
    except TimeoutError:
        raise LinkLost(f"the driver at {host}:{port} did not answer within {HANDSHAKE_SECONDS:g} s") from None
    except LinkLost:
        raise
    except OSError as error:
        raise LinkLost(f"the driver at {host}:{port} cannot be reached: {_reason(error)}") from error


async def challenge_caller(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str
) -> list[str] | None:
    """The purpose of a caller that knows the token; None for any other. Then call `accept_caller`."""
    challenge = secrets.token_hex(16).encode() + b"\n"
    with suppress(OSError, ValueError):
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            writer.write(challenge)
            signature, _, purpose = (await reader.readline()).decode().rstrip("\n").partition(" ")
            if hmac.compare_digest(signature.encode(), sign(token, challenge, purpose).encode()):
                return purpose.split(" ")
    return None


def accept_caller(writer: asyncio.StreamWriter) -> None:
    writer.write(_ACCEPTED)


def sign(token: str, challenge: bytes, purpose: str) -> str:
    return hmac.new(token.encode(), challenge + purpose.encode(), "sha256").hexdigest()


async def relay_streams(
    first: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    second: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Copy bytes both ways until one side ends or breaks; then close both."""
    directions = [
        asyncio.ensure_future(_copy(first[0], second[1])),
        asyncio.ensure_future(_copy(second[0], first[1])),
    ]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        for _, writer in (first, second):
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


def _retrieve_exception(reading: asyncio.Task[LinkMessage]) -> None:
    if not reading.cancelled():
        reading.exception()


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
