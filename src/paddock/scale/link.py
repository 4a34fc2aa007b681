"""Messages between a driver and what it placed on a node, over one socket that tells both when the other is gone.

A message has a kind, a JSON value and perhaps raw bytes. Both ends send a beat each second: a socket that breaks, or
stays silent for too long, raises LinkLost. Knows nothing of rollouts, stores or Ray.

Who connects shows that it knows the driver's token by signing what the driver challenges it with. The token itself
and the keys of models go neither over the wire in the clear nor through Ray: within the cluster's network the rest is
as open as Ray's own traffic.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.rollouts.store.packing import decode, encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 8.0
"""Eight beats that did not come. A process that is killed is known at once: its socket closes."""
SLICES = 8
GREETING_SECONDS = 10.0
MOST_BYTES = 1 << 30
READ_BYTES = 1 << 20
_SIZES = struct.Struct("!II")
_BEAT = "beat"
_WELCOME = b"welcome\n"


class LinkLost(ConnectionError):
    """The other end is gone, or has been silent for too long."""


@dataclass(frozen=True, slots=True)
class Message:
    kind: str
    value: Any = None
    raw: bytes = b""

    def frame(self) -> bytes:
        words = encode([self.kind, self.value])
        return b"".join((_SIZES.pack(len(words), len(self.raw)), words, self.raw))


class Link:
    """One end. Use `beating` around its life; receive in one task only."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, silence: float = SILENCE_SECONDS
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._silence = silence
        self._reading: asyncio.Task[Message] | None = None

    def post(self, kind: str, value: Any = None, raw: bytes = b"") -> None:
        """Send without waiting. What is posted to a lost link is dropped: `receive` tells of the loss."""
        self.post_frames([Message(kind, value, raw).frame()])

    def post_frames(self, frames: list[bytes]) -> None:
        if not self._writer.is_closing():
            self._writer.writelines(frames)

    async def drain(self) -> None:
        """Until the other end has taken most of what was posted. Raises LinkLost."""
        try:
            await self._writer.drain()
        except OSError as error:
            raise LinkLost(_words(error)) from error

    async def receive(self) -> Message:
        """The next message. Raises LinkLost. Cancelling it loses nothing: the next call goes on."""
        quiet = 0
        while True:
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read())
                self._reading.add_done_callback(_seen)
            done, _ = await asyncio.wait((self._reading,), timeout=self._silence / SLICES)
            if done:
                reading, self._reading = self._reading, None
                message = reading.result()
                if message.kind != _BEAT:
                    return message
                quiet = 0
            else:
                # Counted, not timed: while this process itself stood still, it could not hear anybody.
                quiet += 1
                if quiet == SLICES:
                    raise LinkLost(f"nothing was heard for {self._silence:g} s")

    async def _read(self) -> Message:
        try:
            words, raw = _SIZES.unpack(await self._reader.readexactly(_SIZES.size))
            if words + raw > MOST_BYTES:
                raise LinkLost(f"a message of {words + raw} bytes is too large")
            kind, value = decode(await self._reader.readexactly(words))
            return Message(kind, value, await self._reader.readexactly(raw) if raw else b"")
        except asyncio.IncompleteReadError:
            raise LinkLost("the connection ended") from None
        except LinkLost:
            raise
        except OSError as error:
            raise LinkLost(_words(error)) from error

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[Link]:
        """Tell the other end each second that this one is there; close it afterwards."""
        beats = asyncio.ensure_future(self._beat())
        try:
            yield self
        finally:
            beats.cancel()
            self.close()

    def close(self) -> None:
        self._writer.close()
        if self._reading is not None:
            self._reading.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self.post(_BEAT)


@asynccontextmanager
async def listening(
    host: str, admit: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
) -> AsyncIterator[int]:
    """Listen on a free port and give each caller to `admit`, in a task that ends with the block at the latest."""
    callers: set[asyncio.Task[None]] = set()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        caller = asyncio.ensure_future(admit(reader, writer))
        callers.add(caller)
        caller.add_done_callback(callers.discard)

    server = await asyncio.start_server(begin, host, 0, limit=READ_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for caller in callers:
            caller.cancel()
        if callers:
            await asyncio.wait(callers)


async def call(host: str, port: int, token: str, *words: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a driver and say what for. Raises LinkLost if nobody is there or it does not want us."""
    try:
        async with asyncio.timeout(GREETING_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=READ_BYTES)
            try:
                challenge = await reader.readline()
                purpose = " ".join(words)
                writer.write(f"{sign(token, challenge, purpose)} {purpose}\n".encode())
                if await reader.readline() != _WELCOME:
                    raise LinkLost(f"the driver at {host}:{port} does not expect this")
            except BaseException:
                writer.close()
                raise
            return reader, writer
    except TimeoutError:
        raise LinkLost(f"the driver at {host}:{port} did not answer within {GREETING_SECONDS:g} s") from None
    except LinkLost:
        raise
    except OSError as error:
        raise LinkLost(f"the driver at {host}:{port} cannot be reached: {_words(error)}") from error


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> list[str] | None:
    """What the caller wants, once it has shown that it knows the token; None if it does not. `welcome` it then."""
    challenge = secrets.token_hex(16).encode() + b"\n"
    with suppress(OSError, ValueError):
        async with asyncio.timeout(GREETING_SECONDS):
            writer.write(challenge)
            signature, _, purpose = (await reader.readline()).decode().rstrip("\n").partition(" ")
            if hmac.compare_digest(signature.encode(), sign(token, challenge, purpose).encode()):
                return purpose.split(" ")
    return None


def welcome(writer: asyncio.StreamWriter) -> None:
    writer.write(_WELCOME)


def sign(token: str, challenge: bytes, purpose: str) -> str:
    return hmac.new(token.encode(), challenge + purpose.encode(), "sha256").hexdigest()


async def splice(
    first: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    second: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Bytes both ways, until one side ends or breaks; then both are closed."""
    ways = [
        asyncio.ensure_future(_pour(first[0], second[1])),
        asyncio.ensure_future(_pour(second[0], first[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (first, second):
            writer.close()


async def _pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()


def _seen(reading: asyncio.Task[Message]) -> None:
    if not reading.cancelled():
        reading.exception()


def _words(error: OSError) -> str:
    return error.strerror or type(error).__name__
