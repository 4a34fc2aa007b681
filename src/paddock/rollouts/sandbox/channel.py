"""The owner's end of the line to a steward: requests with answers, events, and streams.

Knows frames and descriptors, not what they mean. A stream is joined to a descriptor of the host (a pipe, a
connection), or to bytes. Nothing is sent that the other side has not said to have room for.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from paddock.errors import SandboxError
from paddock.rollouts.sandbox.switchboard import CHUNK, GRANT, HEADER, LETTERS, MOST_WAITING, ROOM

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT = 10.0
CLOSE_TIMEOUT = 5.0
"""Seconds for a line to end in an orderly way. What it leads to is taken away after that, and the line with it."""
LONGEST_FRAME = 64 << 20


class Line(Protocol):
    """Bytes to the steward and back."""

    async def receive(self) -> bytes:
        """The next bytes; none at the end."""

    async def send(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


class Listener(Protocol):
    def happened(self, words: list[Any]) -> None:
        """The steward told something by itself."""

    def ended(self) -> None:
        """The line is gone."""


class Channel:
    """One line. Use it from one event loop only."""

    def __init__(self, line: Line, listener: Listener) -> None:
        self._line = line
        self._listener = listener
        self._numbers = itertools.count(1)
        self._letters = itertools.count(LETTERS)
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, Joined | Heard] = {}
        self._outbox = bytearray()
        self._news = asyncio.Event()
        self._room: dict[int, int] = {}
        self._granted = asyncio.Event()
        self.open = True
        self._tasks = [asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._send())]

    # -- requests -------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """For a request or a stream: they are counted together."""
        return next(self._numbers)

    async def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        *,
        number: int | None = None,
        timeout: float | None = ANSWER_TIMEOUT,
    ) -> Any:
        """The answer. Raises OSError or SandboxError as the steward met it, SandboxError if there is no answer."""
        number = number or self.new_number()
        answer = self.request(name, arguments, number=number)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer to {name} within {timeout:g} s") from None
        finally:
            self._asked.pop(number, None)

    def request(self, name: str, arguments: dict[str, Any], *, number: int | None = None) -> asyncio.Future[Any]:
        """Ask, and come back at once: what is sent next arrives after it."""
        number = number or self.new_number()
        self._write({"number": number, "do": name, "with": arguments})
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        return answer

    def tell(self, name: str, arguments: dict[str, Any]) -> None:
        """Ask without waiting for the answer."""
        with suppress(SandboxError):
            self._write({"number": self.new_number(), "do": name, "with": arguments})

    # -- streams --------------------------------------------------------------------------------------

    def join(self, descriptor: int, *, number: int | None = None, both: bool = False, fed: bool = False) -> int:
        """Join a stream to a descriptor, which belongs to it from here on: what comes is written to it, or read
        from it and sent (`fed`), or `both` for a connection. Returns the number of the stream."""
        number = number or self.new_number()
        self._streams[number] = Joined(self, number, descriptor, reads=both or fed, writes=both or not fed)
        return number

    def hear(self, take: Callable[[bytes], None] | None = None) -> Heard:
        """A stream whose bytes are kept, or handed to `take` as they come, and none at its end. Whoever takes
        them also grants room for more."""
        number = self.new_number()
        heard = self._streams[number] = Heard(self, number, take)
        return heard

    async def write(self, number: int, data: bytes, *, end: bool = False) -> None:
        """Send bytes on a stream, when there is room. Raises SandboxError if the line ends before."""
        rest = memoryview(data)
        while rest:
            room = self._room.setdefault(number, ROOM)
            if room <= 0 or len(self._outbox) > MOST_WAITING:
                self._granted.clear()
                await self._granted.wait()
                self._living()
                continue
            chunk = rest[: min(room, CHUNK)]
            self._room[number] -= len(chunk)
            self.frame(number, chunk)
            rest = rest[len(chunk) :]
        if end:
            self.frame(number, b"")
            self._room.pop(number, None)

    async def post(self, data: bytes) -> int:
        """Send the content of a request ahead of it. Returns its number."""
        number = next(self._letters)
        await self.write(number, data)
        self._room.pop(number, None)
        return number

    def frame(self, number: int, payload: bytes | memoryview) -> None:
        self._living()
        self._outbox += HEADER.pack(len(payload), number)
        self._outbox += payload
        self._news.set()

    def grant(self, number: int, count: int) -> None:
        if self.open:
            self._write({"grant": [number, count]})

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    @property
    def crowded(self) -> bool:
        return len(self._outbox) > MOST_WAITING

    # -- the line -------------------------------------------------------------------------------------

    def _living(self) -> None:
        if not self.open:
            raise SandboxError("the sandbox has ended")

    def _write(self, message: dict[str, Any]) -> None:
        self.frame(0, orjson.dumps(message))

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            data, self._outbox = bytes(self._outbox), bytearray()
            try:
                await self._line.send(data)
            except (OSError, SandboxError):
                self._end()
                return
            self._granted.set()
            for stream in list(self._streams.values()):
                stream.resume()

    async def _receive(self) -> None:
        received = bytearray()
        try:
            while data := await self._line.receive():
                received += data
                start = 0
                while len(received) - start >= HEADER.size:
                    length, number = HEADER.unpack_from(received, start)
                    if length > LONGEST_FRAME:
                        raise SandboxError("the sandbox does not speak as it should")
                    end = start + HEADER.size + length
                    if len(received) < end:
                        break
                    payload = bytes(received[start + HEADER.size : end])
                    start = end
                    self._take(number, payload)
                del received[:start]
        except (OSError, SandboxError, ValueError):
            pass
        finally:
            self._end()

    def _take(self, number: int, payload: bytes) -> None:
        if number != 0:
            stream = self._streams.get(number)
            if stream is not None:
                stream.arrived(payload)
            elif payload:
                self.grant(number, len(payload))
            return
        message = orjson.loads(payload)
        if "grant" in message:
            number, count = message["grant"]
            if number in self._streams:
                self._streams[number].granted(count)
            elif number in self._room:
                self._room[number] += count
                self._granted.set()
        elif "event" in message:
            self._listener.happened(message["event"])
        else:
            answer = self._asked.pop(message["number"], None)
            if answer is not None and not answer.done():
                if "failed" in message:
                    answer.set_exception(failure(message["failed"]))
                else:
                    answer.set_result(message["answer"])

    def _end(self) -> None:
        if not self.open:
            return
        self.open = False
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(SandboxError("the sandbox ended before it answered"))
        self._asked.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cut()
        self._granted.set()
        self._listener.ended()

    async def close(self) -> None:
        self._end()
        for task in self._tasks:
            task.cancel()
        closing = asyncio.ensure_future(self._close_line())
        # A line may be in the hands of a library that does not heed cancellation: it is left behind, not waited for.
        await asyncio.wait([closing], timeout=CLOSE_TIMEOUT)
        if closing.done():
            closing.result()
        else:
            closing.cancel()
            logger.warning("a line to a sandbox did not close within %g s", CLOSE_TIMEOUT)

    async def _close_line(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(OSError, SandboxError):
            await self._line.close()


class Joined:
    """A stream and a descriptor of the host, which it owns."""

    def __init__(self, channel: Channel, number: int, descriptor: int, *, reads: bool, writes: bool) -> None:
        self._channel = channel
        self._number = number
        self._descriptor = descriptor
        self._reads, self._writes = reads, writes
        self._both = reads and writes
        self._room = ROOM
        self._reading = False
        self._waiting = bytearray()
        self._ended = False
        self._writing = False
        self._ungranted = 0
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self.resume()

    # -- from the host --------------------------------------------------------------------------------

    def resume(self) -> None:
        wanted = self._reads and self._room > 0 and not self._channel.crowded
        if wanted and not self._reading:
            self._loop.add_reader(self._descriptor, self._readable)
        elif self._reading and not wanted:
            self._loop.remove_reader(self._descriptor)
        self._reading = wanted

    def granted(self, count: int) -> None:
        self._room += count
        self.resume()

    def _readable(self) -> None:
        try:
            data = os.read(self._descriptor, min(CHUNK, self._room))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._room -= len(data)
        with suppress(SandboxError):
            self._channel.frame(self._number, data)
        if not data:
            self._reads = False
        self.resume()
        self._forget_idle()

    # -- from the sandbox -----------------------------------------------------------------------------

    def arrived(self, payload: bytes) -> None:
        if not self._writes:
            self._channel.grant(self._number, len(payload))
            return
        self._waiting += payload
        self._ended = self._ended or not payload
        self._writable()

    def _writable(self) -> None:
        broken = False
        try:
            while self._waiting:
                written = os.write(self._descriptor, self._waiting[:CHUNK])
                del self._waiting[:written]
                self._ungranted += written
        except BlockingIOError:
            pass
        except OSError:
            # Nobody reads it any more: whoever writes inside should hear of that.
            broken = True
            self._waiting.clear()
        if self._ungranted >= GRANT:
            self._channel.grant(self._number, self._ungranted)
            self._ungranted = 0
        if broken:
            self._channel.tell("drop", {"stream": self._number})
            self.cut()
            self._channel.forget(self._number)
            return
        if self._ended and not self._waiting:
            self._writes = False
            if self._both and self._reads:
                with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as half:
                    half.shutdown(socket.SHUT_WR)
        self._wait_to_write(bool(self._waiting))
        self._forget_idle()

    def _wait_to_write(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._loop.add_writer(self._descriptor, self._writable)
        elif self._writing and not wanted:
            self._loop.remove_writer(self._descriptor)
        self._writing = wanted

    # -- the end --------------------------------------------------------------------------------------

    def _forget_idle(self) -> None:
        if not self._reads and not self._writes:
            self.cut()
            self._channel.forget(self._number)

    def cut(self) -> None:
        """The descriptor is given back; what waits for its reader is lost only if the line is."""
        if self._descriptor < 0:
            return
        if self._waiting:
            with suppress(OSError):
                os.write(self._descriptor, self._waiting)
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        self._reads = self._writes = self._reading = self._writing = False


class Heard:
    """A stream that is kept as bytes, or handed on."""

    def __init__(self, channel: Channel, number: int, take: Callable[[bytes], None] | None) -> None:
        self._channel = channel
        self.number = number
        self._take = take
        self._kept = bytearray()
        self._over = asyncio.Event()
        self._whole = False

    def arrived(self, payload: bytes) -> None:
        if self._take is not None:
            self._take(payload)
        elif payload:
            self._kept += payload
            self._channel.grant(self.number, len(payload))
        if not payload:
            self._whole = True
            self._channel.forget(self.number)
            self._over.set()

    async def whole(self) -> bytes:
        """Everything, at the end. Raises SandboxError if the line ended before."""
        await self._over.wait()
        if not self._whole:
            raise SandboxError("the sandbox ended before all was read")
        return bytes(self._kept)

    def granted(self, count: int) -> None:
        """Nothing is sent here."""

    def resume(self) -> None:
        """Nothing is sent here."""

    def cut(self) -> None:
        if self._take is not None and not self._over.is_set():
            self._take(b"")
        self._over.set()


def failure(told: dict[str, Any]) -> Exception:
    """What the steward met, as the exception it was."""
    number = told.get("errno")
    if number is None:
        return SandboxError(told["message"], hint=told.get("hint"))
    if number == errno.ENOENT:
        return FileNotFoundError(number, "no such file in the sandbox", told.get("name"))
    return OSError(number, told["message"], told.get("name"))


class SocketLine:
    """A line over a connected socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def receive(self) -> bytes:
        return await self._reader.read(4 * CHUNK)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
