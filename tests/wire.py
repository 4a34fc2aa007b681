"""Clients so plain that nothing hides what the server sends."""

import contextlib
import http.client
import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

TEXT, BINARY, CONTINUATION, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Http:
    """One kept-alive connection."""

    def __init__(self, port: int, timeout: float = 20) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)

    def __call__(self, method: str, path: str, document: Any = None, **headers: str) -> Answer:
        body = document if isinstance(document, (bytes, type(None))) else json.dumps(document).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body, named)
        return Answer(self.connection.getresponse())

    def rpc(self, method: str, params: Any = None, id: Any = 1, **headers: str) -> Any:
        document = {"jsonrpc": "2.0", "id": id, "method": method, "params": params or {}}
        return self("POST", "/mcp", document, **headers).json

    @property
    def local_port(self) -> int:
        """Tells whether two requests used the same connection."""
        port: int = self.connection.sock.getsockname()[1]
        return port

    def close(self) -> None:
        self.connection.close()


class Socket:
    """A WebSocket that speaks JSON objects."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def send(self, document: Any) -> None:
        self.connection.send(document if isinstance(document, (str, bytes)) else json.dumps(document))

    def receive(self, timeout: float = 10) -> Any:
        return json.loads(self.connection.recv(timeout))

    def ask(self, document: Any, timeout: float = 10) -> Any:
        self.send(document)
        return self.receive(timeout)

    def step(self, timeout: float = 10, **action: Any) -> Any:
        return self.ask({"type": "step", "data": action}, timeout)

    def code_of(self, document: Any) -> str:
        answer = self.ask(document)
        assert answer["type"] == "error", answer
        code: str = answer["data"]["code"]
        return code

    def end(self, timeout: float = 10) -> int | None:
        """Read until the server closes; the close code."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.connection.recv(timeout)
        return self.connection.close_code

    @property
    def token(self) -> str | None:
        assert self.connection.response is not None
        return self.connection.response.headers.get("Session-Id")


@contextlib.contextmanager
def open_socket(port: int, path: str = "/ws", **headers: str) -> Iterator[Socket]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"ws://127.0.0.1:{port}{path}"
    with connect(
        url, additional_headers=named, max_size=None, proxy=None, close_timeout=2, compression=None
    ) as result:
        yield Socket(result)


class RawSocket:
    """A WebSocket by hand: any frame, any order, and no goodbye."""

    def __init__(self, port: int, path: str = "/ws", headers: str = "") -> None:
        self.tcp = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.tcp.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n{headers}\r\n".encode(
                "latin-1"
            )
        )
        self.buffer = b""
        self.head = self._until(b"\r\n\r\n").decode("latin-1")
        self.status = int(self.head.split(" ", 2)[1]) if self.head else 0

    def send(self, payload: bytes | str, kind: int = TEXT, *, final: bool = True) -> None:
        data = payload.encode() if isinstance(payload, str) else payload
        size = len(data)
        length = bytes([0x80 | size]) if size < 126 else struct.pack("!BH", 0xFE, size) if size < 65536 else None
        self.tcp.sendall(
            bytes([(0x80 if final else 0) | kind])
            + (length or struct.pack("!BQ", 0xFF, size))
            + bytes(4)  # a mask of zeros leaves the payload as it is
            + data
        )

    def receive(self) -> tuple[int, bytes]:
        """Kind and payload of the next frame; kind -1 when the connection is gone."""
        try:
            first, second = self._take(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", self._take(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._take(8))
            return first & 0x0F, self._take(size)
        except (ConnectionError, EOFError):
            return -1, b""

    def answer(self) -> Any:
        """The next text frame."""
        while True:
            kind, payload = self.receive()
            if kind == TEXT:
                return json.loads(payload)
            assert kind in (PING, PONG), f"frame {kind} {payload!r}"

    def close_code(self) -> int | None:
        """Read until the server says goodbye; None if it just hung up."""
        while True:
            kind, payload = self.receive()
            if kind == CLOSE:
                return struct.unpack("!H", payload[:2])[0] if payload else 1005
            if kind == -1:
                return None

    def reset(self) -> None:
        """Drop the connection with a TCP RST, as a crashed machine's peer would see it."""
        self.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.tcp.close()

    def close(self) -> None:
        self.tcp.close()

    def _take(self, size: int) -> bytes:
        while len(self.buffer) < size:
            data = self.tcp.recv(1 << 20)
            if not data:
                raise EOFError
            self.buffer += data
        used, self.buffer = self.buffer[:size], self.buffer[size:]
        return used

    def _until(self, mark: bytes) -> bytes:
        with contextlib.suppress(ConnectionError):
            while mark not in self.buffer and (data := self.tcp.recv(65536)):
                self.buffer += data
        head, _, self.buffer = self.buffer.partition(mark)
        return head


def random_text(size: int) -> str:
    return os.urandom(size // 2).hex()
