"""Calls a tool over HTTP `POST /mcp`: keep-alive connections, each with a session of its own."""

import asyncio
import gc
import time
from typing import cast
from urllib.parse import urlsplit

import orjson

from bench.load.meter import Meter
from bench.load.program import Report, arguments, run

WARM_UP_SECONDS = 0.5
REPLY_SECONDS = 60.0
MESSAGE = "hello from the load generator"


class ToolConnection(asyncio.Protocol):
    """An HTTP/1.1 connection with one request in flight."""

    transport: asyncio.Transport

    def __init__(self, host: str) -> None:
        self._host = host
        self._buffer = bytearray()
        self._answer: asyncio.Future[bytes] | None = None
        self._meter: Meter | None = None
        self._call = b""
        self._sent = 0.0

    async def ask(self, method: str, params: dict[str, str]) -> bytes:
        """Make one JSON-RPC call and return the body of its answer."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(self._request(method, params))
        return await asyncio.wait_for(self._answer, REPLY_SECONDS)

    async def open(self) -> str:
        """Open a session on the server and return its id."""
        body = await self.ask("openenv/session/create", {})
        return str(orjson.loads(body)["result"]["session_id"])

    def begin(self, meter: Meter, session_id: str) -> None:
        """Call the tool until the meter stops."""
        arguments_of_tool = {"message": MESSAGE}
        self._call = self._request(
            "tools/call",
            {"name": "echo_message", "arguments": arguments_of_tool, "session_id": session_id},
        )
        self._meter = meter
        self._sent = time.perf_counter()
        self.transport.write(self._call)

    def end(self) -> None:
        self._meter = None
        self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        body_start = head_end + 4
        head = bytes(self._buffer[:head_end])
        if len(self._buffer) < body_start + _content_length(head):
            return
        body = bytes(self._buffer[body_start:])
        self._buffer.clear()
        self._answered(head, body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed a connection"))
        if self._meter is not None:
            self._meter.fail("the server closed a connection")

    def _answered(self, head: bytes, body: bytes) -> None:
        meter = self._meter
        if meter is None:
            assert self._answer is not None
            self._answer.set_result(body)
        elif b" 200 " not in head[:16] or b'"is_error":false' not in body:
            meter.fail(f"the server answered {head[:60]!r} {body[:300]!r}")
        elif not meter.stopped:
            now = time.perf_counter()
            meter.latencies.append(now - self._sent)
            self._sent = now
            self.transport.write(self._call)

    def _request(self, method: str, params: object) -> bytes:
        body = orjson.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: {self._host}\r\nAccept: application/json\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


def _content_length(head: bytes) -> int:
    _, has_length, rest = head.lower().partition(b"\r\ncontent-length:")
    if not has_length:
        raise RuntimeError(f"an answer without a length: {head[:300]!r}")
    return int(rest.partition(b"\r\n")[0])


async def connect(url: str) -> ToolConnection:
    address = urlsplit(url)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: ToolConnection(address.netloc), address.hostname or "", address.port or 80
    )
    return connection


async def call_tools(url: str, count: int, seconds: float) -> Report:
    connections = [await connect(url) for _ in range(count)]
    session_ids = [await connection.open() for connection in connections]
    meter = Meter()
    for connection, session_id in zip(connections, session_ids, strict=True):
        connection.begin(meter, session_id)
    report = await meter.measure(WARM_UP_SECONDS, seconds)
    for connection in connections:
        connection.end()
    await close_sessions(url, session_ids)
    return report


async def close_sessions(url: str, session_ids: list[str]) -> None:
    connection = await connect(url)
    for session_id in session_ids:
        await connection.ask("openenv/session/close", {"session_id": session_id})
    connection.end()


if __name__ == "__main__":
    options = arguments(__doc__, sessions=16, seconds=2.0)
    gc.disable()
    run(call_tools(options.url, options.sessions, options.seconds))
