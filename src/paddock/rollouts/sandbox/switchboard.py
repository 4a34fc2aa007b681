"""Streams and messages over one line, as a sandbox' end of it keeps them. Knows nothing of what they are for.

A frame is its length, the number of its stream (both 32 bits), and that many bytes. Stream 0 carries JSON:
requests and answers, events, and grants of room in a stream. A frame without bytes is the end of its stream.

Part of the steward: it runs inside, from source text, with the standard library only.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import select
import socket
import struct
from collections import deque
from contextlib import suppress

from paddock.errors import SandboxError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

HEADER = struct.Struct(">II")
CHUNK = 65536
ROOM = 1 << 20
"""Bytes of a stream that may be on their way before whoever gets them has said that there is room again."""
GRANT = ROOM // 4
MOST_WAITING = 4 << 20
"""Bytes that may wait for the line before nothing more is read for it."""
LETTERS, ACCEPTED = 1 << 30, 1 << 31
"""Streams from these numbers on are the content of a request, and connections that were accepted inside."""


class Stream:
    """What comes from a descriptor (or is there already) and goes to one."""

    def __init__(
        self, number: int, source: int | None = None, sink: int | None = None, content: bytes | None = None
    ) -> None:
        self.number = number
        self.source = source
        self.sink = sink
        self.content = None if content is None else memoryview(content)
        self.room = ROOM
        self.waiting = bytearray()
        self.ended = False
        """Whether the other side has sent all it had."""
        self.ungranted = 0
        self.shared = False
        """Whether both ends are one connection, of which one half can be ended."""
        self.terminal = False
        self.finished: Callable[[OSError | None], None] | None = None
        """Called when everything has been written, or cannot be."""

    @property
    def idle(self) -> bool:
        return self.source is None and self.sink is None and self.content is None


class Switchboard:
    """A request named `x` is carried out by the method `do_x`."""

    def __init__(self, incoming: int, outgoing: int, *, text: bool) -> None:
        self.incoming, self.outgoing, self.text = incoming, outgoing, text
        self.received = bytearray()
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.streams: dict[int, Stream] = {}
        self.by_descriptor: dict[int, Stream] = {}
        self.letters: dict[int, bytearray] = {}
        self.listening: dict[int, socket.socket] = {}
        self.connecting: dict[int, tuple[int, int, socket.socket]] = {}
        self.accepted = ACCEPTED
        self.over = False
        self.gone = False
        self.watched: dict[int, Callable[[], object]] = {}
        """Other descriptors to read from, and what to do then."""
        os.set_blocking(incoming, False)
        os.set_blocking(outgoing, False)

    def refuse_when_over(self) -> None:
        if self.over:
            raise SandboxError("the sandbox has ended")

    # -- connections ----------------------------------------------------------------------------------

    def do_listen(self, number: int, port: int) -> Any:
        self.refuse_when_over()
        self.do_unlisten(number, port)
        listening = socket.socket()
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen(128)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        at: int = listening.getsockname()[1]
        self.listening[at] = listening
        self.watched[listening.fileno()] = lambda: self.accept(at)
        return {"port": at}

    def do_unlisten(self, number: int, port: int) -> Any:
        found = self.listening.pop(port, None)
        if found is not None:
            del self.watched[found.fileno()]
            found.close()

    def accept(self, port: int) -> None:
        try:
            connection, _ = self.listening[port].accept()
        except OSError:
            return
        self.accepted += 1
        self.carry(self.accepted, connection)
        self.write({"event": ["accepted", port, self.accepted]})

    def do_connect(self, number: int, port: int, stream: int) -> Any:
        """Answered when the connection is there, or is not."""
        self.refuse_when_over()
        connecting = socket.socket()
        connecting.setblocking(False)
        failure = connecting.connect_ex(("127.0.0.1", port))
        if failure not in (0, errno.EINPROGRESS):
            connecting.close()
            raise OSError(failure, os.strerror(failure))
        self.connecting[connecting.fileno()] = (number, stream, connecting)
        return Later

    def connected(self, descriptor: int) -> None:
        number, stream, connection = self.connecting.pop(descriptor)
        failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            connection.close()
            self.fail(number, OSError(failure, os.strerror(failure)))
        else:
            self.carry(stream, connection)
            self.write({"number": number, "answer": None})

    def carry(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = Stream(number, source=connection.detach())
        stream.sink, stream.shared = os.dup(stream.source), True  # type: ignore[arg-type]
        self.streams[number] = stream

    # -- the line -------------------------------------------------------------------------------------

    def interests(self) -> dict[int, int]:
        full = self.unsent_bytes > MOST_WAITING
        wanted = {self.incoming: select.POLLIN}
        wanted.update(dict.fromkeys(self.watched, select.POLLIN))
        wanted.update(dict.fromkeys(self.connecting, select.POLLOUT))
        if self.unsent:
            wanted[self.outgoing] = select.POLLOUT
        self.by_descriptor = {}
        for stream in self.streams.values():
            if stream.source is not None and stream.room > 0 and not full:
                wanted[stream.source] = select.POLLIN
                self.by_descriptor[stream.source] = stream
            if stream.sink is not None and stream.waiting:
                wanted[stream.sink] = select.POLLOUT
                self.by_descriptor[stream.sink] = stream
            elif stream.content is not None and stream.room > 0 and not full:
                wanted[self.outgoing] = select.POLLOUT
        return wanted

    def happened(self, descriptor: int, events: int) -> None:
        if descriptor == self.incoming:
            self.take()
        elif descriptor == self.outgoing:
            self.flush()
            for stream in [stream for stream in self.streams.values() if stream.content is not None]:
                self.send_some(stream)
        elif descriptor in self.watched:
            self.watched[descriptor]()
        elif descriptor in self.connecting:
            self.connected(descriptor)
        elif (found := self.by_descriptor.get(descriptor)) is not None:
            if descriptor == found.sink:
                self.drain(found)
            elif descriptor == found.source:
                self.send_some(found)

    def take(self) -> None:
        try:
            data = os.read(self.incoming, 4 * CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.gone = True
            return
        self.received += data
        start = 0
        while len(self.received) - start >= HEADER.size:
            length, number = HEADER.unpack_from(self.received, start)
            end = start + HEADER.size + length
            if len(self.received) < end:
                break
            payload = bytes(self.received[start + HEADER.size : end])
            start = end
            if number == 0:
                self.asked(json.loads(payload))
            else:
                self.arrived(number, payload)
        del self.received[:start]

    def asked(self, message: dict[str, Any]) -> None:
        if "grant" in message:
            number, room = message["grant"]
            if number in self.streams:
                self.streams[number].room += room
            return
        number = message["number"]
        try:
            answer = getattr(self, "do_" + message["do"])(number, **message["with"])
        except (OSError, SandboxError) as error:
            self.fail(number, error)
            return
        if answer is not Later:
            self.write({"number": number, "answer": answer})

    def fail(self, number: int, error: OSError | SandboxError) -> None:
        if isinstance(error, SandboxError):
            told: dict[str, Any] = {"message": error.message, "hint": error.hint}
        else:
            told = {"message": error.strerror or str(error), "errno": error.errno or 0, "name": error.filename}
        self.write({"number": number, "failed": told})

    def arrived(self, number: int, payload: bytes) -> None:
        if LETTERS <= number < ACCEPTED:
            self.letters.setdefault(number, bytearray()).extend(payload)
            self.grant(number, len(payload))
            return
        stream = self.streams.get(number)
        if stream is None or stream.sink is None:
            self.grant(number, len(payload))
            return
        stream.waiting += payload
        stream.ended = stream.ended or not payload
        self.drain(stream)

    def drain(self, stream: Stream) -> None:
        """Write what has arrived, as far as it can be taken."""
        if stream.sink is None:
            return
        failure = None
        try:
            while stream.waiting:
                written = os.write(stream.sink, stream.waiting[:CHUNK])
                del stream.waiting[:written]
                stream.ungranted += written
        except BlockingIOError:
            pass
        except OSError as error:
            failure = error
            stream.ungranted += len(stream.waiting)
            stream.waiting.clear()
        if stream.ungranted >= GRANT or (stream.ungranted and not stream.waiting):
            self.grant(stream.number, stream.ungranted)
            stream.ungranted = 0
        if failure is not None or (stream.ended and not stream.waiting):
            self.close_sink(stream, failure)

    def close_sink(self, stream: Stream, failure: OSError | None = None) -> None:
        if stream.sink is None or (stream.terminal and failure is None and stream.source is not None):
            return
        if stream.shared and failure is None:
            half = socket.socket(fileno=os.dup(stream.sink))
            with suppress(OSError):
                half.shutdown(socket.SHUT_WR)
            half.close()
        os.close(stream.sink)
        stream.sink = None
        if stream.finished is not None:
            stream.finished(failure)
        self.forget_idle(stream)

    def send_some(self, stream: Stream) -> bool:
        """Put the next bytes of a stream on the line. True if there may be more."""
        if stream.room <= 0:
            return False
        if stream.content is not None:
            data = bytes(stream.content[: min(CHUNK, stream.room)])
            stream.content = stream.content[len(data) :]
        elif stream.source is not None:
            try:
                data = os.read(stream.source, min(CHUNK, stream.room))
            except BlockingIOError:
                return False
            except OSError:  # the other end of a terminal, or of a connection, is gone
                data = b""
        else:
            return False
        stream.room -= len(data)
        self.frame(stream.number, data)
        if data:
            return True
        if stream.source is not None:
            os.close(stream.source)
        stream.source = stream.content = None
        if stream.terminal:
            self.close_sink(stream)
        self.forget_idle(stream)
        return False

    def pump(self) -> None:
        """Send all that can be read at once, so that a command's end does not overtake its output."""
        for stream in [stream for stream in self.streams.values() if stream.source is not None]:
            while self.unsent_bytes < MOST_WAITING and self.send_some(stream):
                pass

    def forget_idle(self, stream: Stream) -> None:
        if stream.idle:
            self.streams.pop(stream.number, None)

    def close(self, stream: Stream) -> None:
        for descriptor in (stream.source, stream.sink):
            if descriptor is not None:
                os.close(descriptor)
        stream.source = stream.sink = stream.content = None
        self.streams.pop(stream.number, None)

    def do_drop(self, number: int, stream: int) -> Any:
        """Nobody wants to hear more of a stream."""
        found = self.streams.get(stream)
        if found is not None:
            self.close(found)

    def grant(self, number: int, count: int) -> None:
        if count:
            self.write({"grant": [number, count]})

    def write(self, message: dict[str, Any]) -> None:
        self.frame(0, json.dumps(message).encode())

    def frame(self, number: int, payload: bytes) -> None:
        data = HEADER.pack(len(payload), number) + payload
        if self.text:
            data = base64.b64encode(data) + b"\n"
        self.unsent.append(memoryview(data))
        self.unsent_bytes += len(data)
        if self.unsent_bytes > CHUNK:
            self.flush()

    def flush(self) -> None:
        try:
            while self.unsent:
                written = os.write(self.outgoing, self.unsent[0])
                self.unsent_bytes -= written
                if written == len(self.unsent[0]):
                    self.unsent.popleft()
                else:
                    self.unsent[0] = self.unsent[0][written:]
        except BlockingIOError:
            return
        except OSError:
            self.gone = True

    def give(self, number: int, content: bytes) -> None:
        self.streams[number] = Stream(number, content=content)

    def letter(self, number: int) -> bytes:
        return bytes(self.letters.pop(number, b""))


class Later:
    """The answer to a request that will be given when there is one."""
