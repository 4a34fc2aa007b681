"""Raw HTTP and WebSocket: every byte sent is chosen by the test, every answer is seen as it came.

Knows nothing about environments; a client library would hide the very things tested here.
"""

import base64
import http.client
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
PATIENCE_SECONDS = 20.0


class Closed(Exception):
    """The server closed the socket. `code` is None when no close frame came first."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"closed with code {code}")
        self.code = code


class Socket:
    """One WebSocket connection."""

    def __init__(self, url: str, path: str = "/ws") -> None:
        address = urlsplit(url)
        self._connection = socket.create_connection((address.hostname, address.port), PATIENCE_SECONDS)
        self._stream = self._connection.makefile("rb")
        key = base64.b64encode(os.urandom(16)).decode()
        self._connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        status = self._stream.readline().decode().strip()
        http.client.parse_headers(self._stream)
        if " 101 " not in status:
            self._release()
            raise ConnectionRefusedError(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close politely: the server has answered the close, so it is letting go of the session."""
        try:
            self._send_frame(CLOSE, struct.pack("!H", 1000))
            self.closing_code()
        except OSError:
            pass
        finally:
            self._release()

    def send(self, message: Any) -> None:
        """Send text as it is, bytes as a binary frame, and anything else as JSON text."""
        if isinstance(message, bytes):
            self._send_frame(BINARY, message)
        else:
            text = message if isinstance(message, str) else json.dumps(message)
            self._send_frame(TEXT, text.encode())

    def send_text_bytes(self, payload: bytes) -> None:
        """Send a text frame whose payload need not be UTF-8."""
        self._send_frame(TEXT, payload)

    def receive(self) -> Any:
        """The next message, decoded.

        Raises:
            Closed: the server closed instead.
        """
        while True:
            opcode, payload = self._read_frame()
            if opcode == CLOSE:
                raise Closed(struct.unpack("!H", payload[:2])[0] if payload else None)
            if opcode == PING:
                self._send_frame(PONG, payload)
            elif opcode in (TEXT, BINARY):
                return json.loads(payload)

    def ask(self, message: Any) -> Any:
        self.send(message)
        return self.receive()

    def closing_code(self) -> int | None:
        """Wait for the close, skipping what comes before it."""
        while True:
            try:
                self.receive()
            except Closed as closed:
                return closed.code

    def abort(self) -> None:
        """Vanish without a word, as a killed process does."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._release()

    def _send_frame(self, opcode: int, payload: bytes) -> None:
        size = len(payload)
        if size < 126:
            length = struct.pack("!B", 0x80 | size)
        elif size < 65536:
            length = struct.pack("!BH", 0x80 | 126, size)
        else:
            length = struct.pack("!BQ", 0x80 | 127, size)
        # A mask of zeros is legal and leaves the payload readable.
        self._connection.sendall(bytes([0x80 | opcode]) + length + bytes(4) + payload)

    def _read_frame(self) -> tuple[int, bytes]:
        head = self._stream.read(2)
        if len(head) < 2:
            raise Closed(None)
        size = head[1] & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", self._stream.read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._stream.read(8))
        return head[0] & 0x0F, self._stream.read(size)

    def _release(self) -> None:
        self._stream.close()
        self._connection.close()


@contextmanager
def occupied(url: str, slots: int) -> Iterator[list[Socket]]:
    """Hold that many sessions, first waiting for those that are still being closed."""
    with ExitStack() as stack:
        yield [seated(url, stack) for _ in range(slots)]


def seated(url: str, stack: ExitStack) -> Socket:
    """A socket that has a session, tried again until a slot is free."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        connection = stack.enter_context(Socket(url))
        answer = connection.ask({"type": "state"})
        if answer["type"] == "state":
            return connection
        if time.monotonic() > deadline:
            raise TimeoutError(f"no slot within {PATIENCE_SECONDS} s: {answer}")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer; `body` is decoded when the server says it is JSON."""

    status: int
    body: Any
    headers: http.client.HTTPMessage


def request(url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
    """Send text and bytes as they are, and anything else but None as JSON."""
    content = body if body is None or isinstance(body, str | bytes) else json.dumps(body)
    described = {} if content is None else {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, content, {**described, **(headers or {})})
        response = connection.getresponse()
        text = response.read().decode()
        is_json = response.headers.get_content_type() == "application/json"
        return Reply(response.status, json.loads(text) if text and is_json else text, response.headers)
    finally:
        connection.close()
