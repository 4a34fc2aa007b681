"""The owner's end of the connection to a guest: requests with answers, events, and streams.

`paddock.sandbox.guest.multiplexer` describes the protocol. Knows frames and descriptors, not what requests mean. A
stream is joined to a descriptor of the host (a pipe, a socket), or collected as bytes. No more is sent on a stream
than the guest has granted.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import marshal
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from paddock.errors import SandboxError
from paddock.sandbox.bundle import MARSHAL_VERSION
from paddock.sandbox.guest.multiplexer import FIRST_UPLOAD, GRANT_BYTES, STREAM_CREDIT
from paddock.sandbox.guest.transports import CHUNK_BYTES, FrameBuffer, close_descriptors, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.sandbox.transports import GuestTransport

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0


class GuestListener(Protocol):
    """Receives what the guest reports."""

    def handle_event(self, event: list[Any]) -> None:
        """The guest reported something by itself."""

    def handle_end(self) -> None:
        """The connection is gone."""

    def handle_late_result(self, name: str, result: Any) -> None:
        """The result of a request whose caller was cancelled or has timed out."""


class GuestReply(NamedTuple):
    """The result of a request to the guest."""

    result: Any
    descriptors: list[int]
    """The receiver closes them."""


class GuestConnection:
    """One connection. Use it from one event loop only."""

    def __init__(self, transport: GuestTransport, listener: GuestListener) -> None:
        self._transport = transport
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._uploads = itertools.count(FIRST_UPLOAD)
        self._pending: dict[int, tuple[str, asyncio.Future[GuestReply]]] = {}
        self._streams: dict[int, JoinedStream | CollectedStream] = {}
        self._frames = FrameBuffer()
        self._credits: dict[int, int] = {}
        self._has_credit = asyncio.Event()
        self.is_open = True
        transport.start(self)

    @property
    def passes_descriptors(self) -> bool:
        """Whether descriptors can be sent and received. Otherwise there are streams."""
        return self._transport.passes_descriptors

    # -- requests -------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """For a request or a stream: they are counted together."""
        return next(self._numbers)

    async def ask(self, name: str, arguments: dict[str, Any], descriptors: Sequence[int] = (), **options: Any) -> Any:
        """As `call`, without the descriptors of the answer."""
        reply = await self.call(name, arguments, descriptors, **options)
        close_descriptors(reply.descriptors)
        return reply.result

    async def call(
        self,
        name: str,
        arguments: dict[str, Any],
        descriptors: Sequence[int] = (),
        *,
        number: int | None = None,
        timeout: float | None = ANSWER_SECONDS,
    ) -> GuestReply:
        """The answer. Raises OSError or SandboxError as the guest met it, SandboxError if there is no answer."""
        pending = self._request(name, arguments, descriptors, number)
        try:
            async with asyncio.timeout(timeout):
                return await pending
        except TimeoutError:
            if pending.done() and not pending.cancelled():  # the guest itself met a timeout
                raise
            raise SandboxError(f"the sandbox did not answer to {name} within {timeout:g} s") from None
        except asyncio.CancelledError:
            if pending.done() and not pending.cancelled() and pending.exception() is None:
                reply = pending.result()
                close_descriptors(reply.descriptors)
                self._listener.handle_late_result(name, reply.result)
            raise

    def request(self, name: str, arguments: dict[str, Any]) -> asyncio.Future[GuestReply]:
        """Send a request and return at once: what is sent next arrives after it."""
        return self._request(name, arguments, (), None)

    def _request(
        self, name: str, arguments: dict[str, Any], descriptors: Sequence[int], number: int | None
    ) -> asyncio.Future[GuestReply]:
        number = number or self.new_number()
        self._send_message(number, name, arguments, descriptors)
        pending: asyncio.Future[GuestReply] = self._loop.create_future()
        self._pending[number] = (name, pending)
        return pending

    def notify(self, name: str, arguments: dict[str, Any]) -> None:
        """Send a request that is not answered. Nothing happens if the connection is gone."""
        with suppress(SandboxError):
            self._send_message(0, name, arguments)

    def _send_message(
        self, number: int, name: str, arguments: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> None:
        self._send_frame(0, marshal.dumps((number, name, arguments), MARSHAL_VERSION), descriptors)

    # -- streams --------------------------------------------------------------------------------------

    def join(self, descriptor: int, *, number: int | None = None, is_connection: bool = False) -> int:
        """Join a stream to a descriptor, which it owns from here on. Returns the number of the stream.

        What arrives is written to the descriptor. What a connection receives is also read from it and sent.
        """
        number = number or self.new_number()
        self._streams[number] = JoinedStream(self, number, descriptor, is_connection=is_connection)
        return number

    def collect(self, take: Callable[[bytes], None] | None = None) -> CollectedStream:
        """A stream whose bytes are kept, or passed to `take` as they arrive, and none at its end. Whoever takes them
        also grants credit for more."""
        number = self.new_number()
        stream = self._streams[number] = CollectedStream(self, number, take)
        return stream

    async def write(self, number: int, data: bytes, *, end: bool = False) -> None:
        """Send bytes on a stream when there is credit. Raises SandboxError if the connection ends before."""
        rest = memoryview(data)
        while rest:
            available = self._credits.setdefault(number, STREAM_CREDIT)
            if available <= 0 or self.is_congested:
                self._has_credit.clear()
                await self._has_credit.wait()
                self._check_open()
                continue
            chunk = rest[: min(available, CHUNK_BYTES)]
            self._credits[number] -= len(chunk)
            self.send_data(number, chunk)
            rest = rest[len(chunk) :]
        if end:
            self.send_data(number, b"")
            self._credits.pop(number, None)

    async def upload(self, data: bytes) -> int:
        """Send the content of a request ahead of it. Returns the number of the stream."""
        number = next(self._uploads)
        await self.write(number, data)
        self._credits.pop(number, None)
        return number

    def send_data(self, number: int, payload: bytes | memoryview) -> None:
        self._send_frame(number, payload)

    def grant(self, number: int, count: int) -> None:
        """Allow the guest to send so many more bytes on a stream."""
        self.notify("grant", {"stream": number, "count": count})

    def drop(self, number: int) -> None:
        """Receive no more of a stream; the guest closes its end."""
        self.forget(number)
        self.notify("drop", {"stream": number})

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    @property
    def is_congested(self) -> bool:
        return self._transport.is_congested

    def resume_streams(self) -> None:
        """The transport has sent what was queued."""
        self._has_credit.set()
        for stream in list(self._streams.values()):
            stream.resume()

    # -- frames ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self.is_open:
            raise SandboxError("the sandbox has ended")

    def _send_frame(self, number: int, payload: bytes | memoryview, descriptors: Sequence[int] = ()) -> None:
        self._check_open()
        self._transport.write(encode_frame(number, bytes(payload)), descriptors)

    def receive(self, data: bytes, descriptors: list[int]) -> None:
        """Called by the transport. Ends the connection if the other end does not follow the protocol."""
        try:
            for number, payload in self._frames.add(data):
                if number == 0:
                    self._handle_message(orjson.loads(payload), descriptors)
                elif number in self._streams:
                    self._streams[number].receive(payload)
                elif payload:
                    self.grant(number, len(payload))
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("the connection to a guest is closed, because it does not follow the protocol: %s", error)
            self.end()

    def _handle_message(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if "grant" in message:
            number, count = message["grant"]
            if number in self._streams:
                self._streams[number].add_credit(count)
            elif number in self._credits:
                self._credits[number] += count
                self._has_credit.set()
        elif "event" in message:
            self._listener.handle_event(message["event"])
        else:
            name, pending = self._pending.pop(message["number"], ("", None))
            if pending is None or pending.done():
                close_descriptors(descriptors)
                if name and "result" in message:
                    self._listener.handle_late_result(name, message["result"])
            elif "error" in message:
                pending.set_exception(to_exception(message["error"]))
            else:
                pending.set_result(GuestReply(message["result"], descriptors))

    # -- the end --------------------------------------------------------------------------------------

    def end(self) -> None:
        """The connection is gone: whatever waits for the guest fails."""
        if not self.is_open:
            return
        self.is_open = False
        pending, self._pending = self._pending, {}
        for name, future in pending.values():
            if not future.done():
                future.set_exception(SandboxError(f"the sandbox ended before it answered to {name}"))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.cut()
        self._has_credit.set()
        self._transport.stop()
        self._listener.handle_end()

    async def close(self) -> None:
        self.end()
        await self._transport.close()


class JoinedStream:
    """A stream and a descriptor of the host, which it owns."""

    def __init__(self, connection: GuestConnection, number: int, descriptor: int, *, is_connection: bool) -> None:
        self._connection, self._number, self._descriptor = connection, number, descriptor
        self._is_connection = is_connection
        self._reads, self._writes = is_connection, True
        """Whether this direction has not ended."""
        self._credit = STREAM_CREDIT
        self._is_reading = False
        self._unwritten = bytearray()
        self._is_complete = False
        self._is_writing = False
        self._ungranted = 0
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self.resume()

    # -- from the host --------------------------------------------------------------------------------

    def resume(self) -> None:
        can_read = self._reads and self._credit > 0 and not self._connection.is_congested
        if can_read and not self._is_reading:
            self._loop.add_reader(self._descriptor, self._readable)
        elif self._is_reading and not can_read:
            self._loop.remove_reader(self._descriptor)
        self._is_reading = can_read

    def add_credit(self, count: int) -> None:
        self._credit += count
        self.resume()

    def _readable(self) -> None:
        try:
            data = os.read(self._descriptor, min(CHUNK_BYTES, self._credit))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._credit -= len(data)
        with suppress(SandboxError):
            self._connection.send_data(self._number, data)
        if not data:
            self._reads = False
        self.resume()
        self._forget_idle()

    # -- from the sandbox -----------------------------------------------------------------------------

    def receive(self, payload: bytes) -> None:
        if not self._writes:
            self._connection.grant(self._number, len(payload))
            return
        self._unwritten += payload
        self._is_complete = self._is_complete or not payload
        self._writable()

    def _writable(self) -> None:
        is_broken = False
        try:
            while self._unwritten:
                written = os.write(self._descriptor, self._unwritten[:CHUNK_BYTES])
                del self._unwritten[:written]
                self._ungranted += written
        except BlockingIOError:
            pass
        except OSError:
            # The reader is gone: whoever writes inside gets a broken pipe.
            is_broken = True
            self._unwritten.clear()
        if self._ungranted >= GRANT_BYTES:
            self._connection.grant(self._number, self._ungranted)
            self._ungranted = 0
        if is_broken:
            self.cut()
            self._connection.drop(self._number)
            return
        if self._is_complete and not self._unwritten:
            self._writes = False
            if self._is_connection and self._reads:
                with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as half:
                    half.shutdown(socket.SHUT_WR)
        has_more = bool(self._unwritten)
        if has_more and not self._is_writing:
            self._loop.add_writer(self._descriptor, self._writable)
        elif self._is_writing and not has_more:
            self._loop.remove_writer(self._descriptor)
        self._is_writing = has_more
        self._forget_idle()

    # -- the end --------------------------------------------------------------------------------------

    def _forget_idle(self) -> None:
        if not self._reads and not self._writes:
            self.cut()
            self._connection.forget(self._number)

    def cut(self) -> None:
        """Close the descriptor. Unwritten bytes are lost only if its reader does not take them now."""
        if self._descriptor < 0:
            return
        if self._unwritten:
            with suppress(OSError):
                os.write(self._descriptor, self._unwritten)
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        self._reads = self._writes = self._is_reading = self._is_writing = False


class CollectedStream:
    """A stream that is kept as bytes, or passed on."""

    def __init__(self, connection: GuestConnection, number: int, take: Callable[[bytes], None] | None) -> None:
        self._connection = connection
        self.number = number
        self._take = take
        self._content = bytearray()
        self._is_over = asyncio.Event()
        self._is_complete = False

    def receive(self, payload: bytes) -> None:
        if self._take is not None:
            self._take(payload)
        elif payload:
            self._content += payload
            self._connection.grant(self.number, len(payload))
        if not payload:
            self._is_complete = True
            self._connection.forget(self.number)
            self._is_over.set()

    async def read_all(self) -> bytes:
        """Everything, at the end. Raises SandboxError if the connection ended before."""
        await self._is_over.wait()
        if not self._is_complete:
            raise SandboxError("the sandbox ended before all was read")
        return bytes(self._content)

    def add_credit(self, count: int) -> None:
        """Nothing is sent here."""

    def resume(self) -> None:
        """Nothing is sent here."""

    def cut(self) -> None:
        if self._take is not None and not self._is_over.is_set():
            self._take(b"")
        self._is_over.set()


def to_exception(error: dict[str, Any]) -> Exception:
    """What the guest reported, as the exception it was."""
    number = error.get("errno")
    if number is None:
        limit = {} if error.get("limit") is None else {"limit": error["limit"]}
        return SandboxError(error["message"], hint=error.get("hint"), **limit)
    if number == errno.ENOENT:
        return FileNotFoundError(number, "no such file in the sandbox", error.get("name"))
    return OSError(number, error["message"], error.get("name"))
