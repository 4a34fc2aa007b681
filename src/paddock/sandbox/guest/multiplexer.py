"""The guest's end of its connection: frames, requests, streams and forwarded ports.

This is the one protocol between a guest and its owner. A frame is its length and the number of its stream (32 bits
each, big-endian), then that many bytes. Stream 0 carries messages:

    owner to guest   marshal: (number, name, arguments); number 0 wants no answer
    guest to owner   JSON: {"number", "result"}, {"number", "error"}, {"event": [...]} or {"grant": [stream, bytes]}

The guest trusts its owner, so it unmarshals what it receives; the owner only parses JSON. All other streams carry the
bytes of commands, files and connections. A frame without bytes ends its stream. Each stream has a credit: at most
`STREAM_CREDIT` bytes may be in flight until the receiver grants more.

Over a transport that passes descriptors, pipes and sockets are handed over and no streams are needed.

Knows nothing of what the requests do.
"""

from __future__ import annotations

import _socket
import errno
import marshal
import os
import select
from _json import encode_basestring_ascii

from paddock.sandbox.guest.transports import CHUNK_BYTES, FrameBuffer, close_descriptors, encode_frame

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from paddock.sandbox.guest.transports import PipeTransport, SocketTransport

STREAM_CREDIT = 1 << 20
GRANT_BYTES = STREAM_CREDIT // 4
MOST_UNSENT_BYTES = 4 << 20
"""Backpressure: above this many unsent bytes, no source of a stream is read."""
FIRST_UPLOAD, FIRST_ACCEPTED = 1 << 30, 1 << 31
"""Streams from these numbers on are the content of a later request, and connections accepted inside."""
BACKLOG = 128
DEFERRED = object()
"""Returned by a handler that answers later."""


class GuestError(Exception):
    """Reported to the owner as a SandboxError with this message."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


class Request:
    """One request while it is handled."""

    def __init__(self, multiplexer: Multiplexer, number: int, descriptors: list[int]) -> None:
        self._multiplexer = multiplexer
        self.number = number
        self.descriptors = descriptors
        """Received with the request; closed after its handler."""
        self.reply_descriptors: list[int] = []
        """Sent with the result; closed afterwards."""

    def answer(self, result: Any) -> None:
        if self.number:
            self._multiplexer.send_message({"number": self.number, "result": result}, self.reply_descriptors)
        close_descriptors(self.reply_descriptors)
        self.reply_descriptors = []

    def fail(self, error: Any) -> None:
        """Report an OSError, or an error with a `message`, a `hint` and perhaps the `limit` that was exceeded."""
        if isinstance(error, OSError):
            details = {"message": error.strerror or str(error), "errno": error.errno or 0, "name": error.filename}
        else:
            details = {"message": error.message, "hint": error.hint, "limit": error.data.get("limit")}
        if self.number:
            self._multiplexer.send_message({"number": self.number, "error": details})


class GuestStream:
    """A stream between the owner and descriptors of the guest, which it owns."""

    def __init__(
        self, number: int, source: int | None = None, sink: int | None = None, content: bytes | None = None
    ) -> None:
        self.number = number
        self.source = source
        """Read from and sent to the owner."""
        self.sink = sink
        """What the owner sends is written to it."""
        self.content = None if content is None else memoryview(content)
        """Sent to the owner instead of what a source yields."""
        self.credit = STREAM_CREDIT
        self.unwritten = bytearray()
        self.is_complete = False
        """Whether the owner has sent all it had."""
        self.ungranted = 0
        self.is_connection = False
        """Whether source and sink are one socket, whose halves end one by one."""
        self.is_terminal = False
        self.on_written: Callable[[OSError | None], None] | None = None
        """Called when everything has been written, or cannot be."""

    @property
    def is_idle(self) -> bool:
        return self.source is None and self.sink is None and self.content is None


class Multiplexer:
    """Handles one connection. A request is carried out by the function in `handlers` under its name."""

    def __init__(self, transport: SocketTransport | PipeTransport) -> None:
        self.transport = transport
        self.handlers: dict[str, Callable[..., Any]] = {
            "grant": self.add_credit,
            "drop": self.drop,
            "listen": self.listen,
            "unlisten": self.unlisten,
            "connect": self.connect,
        }
        self.readers: dict[int, Callable[[], object]] = {}
        """Further descriptors to wait for, and what to call when they are readable."""
        self.streams: dict[int, GuestStream] = {}
        self.is_closed = False
        """Whether the owner is gone."""
        self.is_ended = False
        """Whether nothing may be started any more."""
        self._frames = FrameBuffer()
        self._uploads: dict[int, bytearray] = {}
        self._listening: dict[int, _socket.socket] = {}
        self._connecting: dict[int, tuple[Request, int, _socket.socket]] = {}
        self._accepted_count = FIRST_ACCEPTED
        self._by_descriptor: dict[int, GuestStream] = {}

    def refuse_when_ended(self) -> None:
        if self.is_ended:
            raise GuestError("the sandbox has ended")

    # -- the loop -------------------------------------------------------------------------------------

    def wait(self, milliseconds: int | None) -> None:
        """Wait for something to happen, and handle it."""
        poll = select.poll()
        for descriptor, events in self._interests().items():
            poll.register(descriptor, events)
        for descriptor, _ in poll.poll(milliseconds):
            self._handle(descriptor)
        self.flush()

    def flush(self) -> None:
        if not self.transport.flush():
            self.is_closed = True

    def _interests(self) -> dict[int, int]:
        transport = self.transport
        is_congested = transport.unsent_bytes > MOST_UNSENT_BYTES
        events = {transport.incoming: select.POLLIN}
        events.update(dict.fromkeys(self.readers, select.POLLIN))
        events.update(dict.fromkeys(self._connecting, select.POLLOUT))
        if transport.unsent_bytes:
            events[transport.outgoing] = select.POLLOUT
        self._by_descriptor = {}
        for stream in self.streams.values():
            if stream.source is not None and stream.credit > 0 and not is_congested:
                events[stream.source] = select.POLLIN
                self._by_descriptor[stream.source] = stream
            if stream.sink is not None and stream.unwritten:
                events[stream.sink] = select.POLLOUT
                self._by_descriptor[stream.sink] = stream
            elif stream.content is not None and stream.credit > 0 and not is_congested:
                events[transport.outgoing] = select.POLLOUT
        return events

    def _handle(self, descriptor: int) -> None:
        if descriptor == self.transport.incoming:
            self._receive()
        elif descriptor == self.transport.outgoing:
            self.flush()
            for stream in [stream for stream in self.streams.values() if stream.content is not None]:
                self._send_next(stream)
        elif descriptor in self.readers:
            self.readers[descriptor]()
        elif descriptor in self._connecting:
            self._finish_connect(descriptor)
        elif (ready := self._by_descriptor.get(descriptor)) is not None:
            if descriptor == ready.sink:
                self._write_received(ready)
            elif descriptor == ready.source:
                self._send_next(ready)

    # -- frames and messages --------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            data, descriptors = self.transport.receive()
        except BlockingIOError:
            return
        if not data:
            self.is_closed = True
            return
        for number, payload in self._frames.add(data):
            if number == 0:
                self._handle_message(payload, descriptors)
            else:
                self._handle_data(number, payload)

    def _handle_message(self, payload: bytes, descriptors: list[int]) -> None:
        number, name, arguments = marshal.loads(payload)
        request = Request(self, number, descriptors)
        try:
            result = self.handlers[name](request, **arguments)
            if result is not DEFERRED:
                request.answer(result)
        except Exception as error:
            if not isinstance(error, OSError) and not hasattr(error, "message"):
                raise
            request.fail(error)
        finally:
            close_descriptors(descriptors)

    def send_event(self, *words: Any) -> None:
        """Report something that happened. Output that was written before arrives before it."""
        self.pump()
        self.send_message({"event": list(words)})

    def send_message(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        self._send_frame(0, to_json(message).encode(), descriptors)

    def _send_frame(self, number: int, payload: bytes, descriptors: list[int] | None = None) -> None:
        if not self.transport.send(encode_frame(number, payload), descriptors or []):
            self.is_closed = True

    # -- streams --------------------------------------------------------------------------------------

    def send_content(self, number: int, content: bytes) -> None:
        self.streams[number] = GuestStream(number, content=content)

    def take_upload(self, number: int) -> bytes:
        """The content that was sent ahead of a request."""
        return bytes(self._uploads.pop(number, b""))

    def add_credit(self, request: Request, stream: int, count: int) -> None:
        if stream in self.streams:
            self.streams[stream].credit += count

    def _grant(self, number: int, count: int) -> None:
        if count:
            self.send_message({"grant": [number, count]})

    def drop(self, request: Request, stream: int) -> None:
        """The owner does not want more of a stream."""
        if stream in self.streams:
            self.close_stream(self.streams[stream])

    def close_stream(self, stream: GuestStream) -> None:
        close_descriptors([one for one in (stream.source, stream.sink) if one is not None])
        stream.source = stream.sink = stream.content = None
        self.streams.pop(stream.number, None)

    def pump(self) -> None:
        """Send all that can be read without waiting, so that a command's exit does not overtake its output."""
        for stream in [stream for stream in self.streams.values() if stream.source is not None]:
            while self.transport.unsent_bytes < MOST_UNSENT_BYTES and self._send_next(stream):
                pass

    def _handle_data(self, number: int, payload: bytes) -> None:
        if FIRST_UPLOAD <= number < FIRST_ACCEPTED:
            self._uploads.setdefault(number, bytearray()).extend(payload)
            self._grant(number, len(payload))
            return
        stream = self.streams.get(number)
        if stream is None or stream.sink is None:
            self._grant(number, len(payload))
            return
        stream.unwritten += payload
        stream.is_complete = stream.is_complete or not payload
        self._write_received(stream)

    def _write_received(self, stream: GuestStream) -> None:
        """Write what has arrived, as far as the sink takes it."""
        if stream.sink is None:
            return
        failure = None
        try:
            while stream.unwritten:
                written = os.write(stream.sink, stream.unwritten[:CHUNK_BYTES])
                del stream.unwritten[:written]
                stream.ungranted += written
        except BlockingIOError:
            pass
        except OSError as error:
            failure = error
            stream.ungranted += len(stream.unwritten)
            stream.unwritten.clear()
        if stream.ungranted >= GRANT_BYTES or (stream.ungranted and not stream.unwritten):
            self._grant(stream.number, stream.ungranted)
            stream.ungranted = 0
        if failure is not None or (stream.is_complete and not stream.unwritten):
            self._close_sink(stream, failure)

    def _close_sink(self, stream: GuestStream, failure: OSError | None = None) -> None:
        if stream.sink is None or (stream.is_terminal and failure is None and stream.source is not None):
            return
        if stream.is_connection and failure is None:
            end_writing(stream.sink)
        os.close(stream.sink)
        stream.sink = None
        if stream.on_written is not None:
            stream.on_written(failure)
        self._forget_idle(stream)

    def _send_next(self, stream: GuestStream) -> bool:
        """Send the next bytes of a stream. True if there may be more."""
        if stream.credit <= 0:
            return False
        if stream.content is not None:
            data = bytes(stream.content[: min(CHUNK_BYTES, stream.credit)])
            stream.content = stream.content[len(data) :]
        elif stream.source is not None:
            try:
                data = os.read(stream.source, min(CHUNK_BYTES, stream.credit))
            except BlockingIOError:
                return False
            except OSError:  # the other end of a terminal, or of a connection, is gone
                data = b""
        else:
            return False
        stream.credit -= len(data)
        self._send_frame(stream.number, data)
        if data:
            return True
        if stream.source is not None:
            os.close(stream.source)
        stream.source = stream.content = None
        if stream.is_terminal:
            self._close_sink(stream)
        self._forget_idle(stream)
        return False

    def _forget_idle(self, stream: GuestStream) -> None:
        if stream.is_idle:
            self.streams.pop(stream.number, None)

    # -- ports ----------------------------------------------------------------------------------------

    def listen(self, request: Request, port: int) -> Any:
        """Listen inside. The owner gets the socket, or a stream and an event for each connection."""
        self.refuse_when_ended()
        self.unlisten(request, port)
        listening = _socket.socket(
            _socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        )
        try:
            listening.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen(BACKLOG)
            port = listening.getsockname()[1]
        except OSError:
            listening.close()
            raise
        if self.transport.passes_descriptors:
            request.reply_descriptors = [listening.detach()]
        else:
            self._listening[port] = listening
            self.readers[listening.fileno()] = lambda: self._accept(port)
        return {"port": port}

    def unlisten(self, request: Request | None, port: int) -> None:
        listening = self._listening.pop(port, None)
        if listening is not None:
            del self.readers[listening.fileno()]
            listening.close()

    def close_ports(self) -> None:
        for port in list(self._listening):
            self.unlisten(None, port)

    def _accept(self, port: int) -> None:
        try:
            descriptor, _ = self._listening[port]._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        self._accepted_count += 1
        self._forward(self._accepted_count, _socket.socket(fileno=descriptor))
        self.send_message({"event": ["accepted", port, self._accepted_count]})

    def connect(self, request: Request, port: int, stream: int = 0) -> Any:
        """Connect inside. Answered at once with the connecting socket, or later when the connection stands."""
        self.refuse_when_ended()
        connecting = _socket.socket(
            _socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        )
        failure = connecting.connect_ex(("127.0.0.1", port))
        if failure not in (0, errno.EINPROGRESS):
            connecting.close()
            raise OSError(failure, os.strerror(failure))
        if self.transport.passes_descriptors:
            request.reply_descriptors = [connecting.detach()]
            return None
        self._connecting[connecting.fileno()] = (request, stream, connecting)
        return DEFERRED

    def _finish_connect(self, descriptor: int) -> None:
        request, stream, connection = self._connecting.pop(descriptor)
        failure = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
        if failure:
            connection.close()
            request.fail(OSError(failure, os.strerror(failure)))
        else:
            self._forward(stream, connection)
            request.answer(None)

    def _forward(self, number: int, connection: _socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        descriptor = connection.detach()
        stream = GuestStream(number, source=descriptor, sink=os.dup(descriptor))
        stream.is_connection = True
        self.streams[number] = stream


def end_writing(descriptor: int) -> None:
    """End one half of a connection, unless its peer is gone already."""
    half = _socket.socket(fileno=os.dup(descriptor))
    try:
        half.shutdown(_socket.SHUT_WR)
    except OSError:
        return
    finally:
        half.close()


def to_json(value: Any) -> str:
    """As `json.dumps` does it for plain values; bytes that are no text become question marks."""
    if isinstance(value, str):
        text: str = encode_basestring_ascii(value.encode("utf-8", "replace").decode())
        return text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{to_json(name)}: {to_json(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_json, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
