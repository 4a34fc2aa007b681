"""WebSockets through ASGI, for any server that speaks it. `paddock serve` uses the faster `fast.py`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paddock.server.access import lookup
from paddock.server.hello import Hello, greeting
from paddock.server.mcp_socket import McpConversation
from paddock.server.vector import VectorConversation
from paddock.server.ws import NORMAL, Conversation, Socket

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.errors import PaddockError
    from paddock.server.service import Service

MOST_UNREAD = 64
"""So many answers may wait for a client that goes on asking."""


def converse(service: Service, socket: Socket, hello: Hello) -> Conversation | McpConversation | VectorConversation:
    """The kind of talk that belongs to a path."""
    if hello.path.endswith("/mcp"):
        return McpConversation(service, socket, hello.queue_timeout)
    return VectorConversation(service, socket) if hello.vector else Conversation(service, socket, hello)


class AsgiSocket:
    """A `Socket` whose frames are written by a task, because ASGI's `send` has to be awaited."""

    send_aside: Callable[[bytes], bool] | None = None

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.closed = False

    def send(self, frame: bytes) -> None:
        if not self.closed:
            self.outbox.put_nowait({"type": "websocket.send", "text": frame.decode()})

    def close(self, code: int, reason: str = "") -> None:
        if not self.closed:
            self.closed = True
            self.outbox.put_nowait({"type": "websocket.close", "code": code, "reason": reason[:120]})

    async def write(self, send: Any) -> None:
        while True:
            event = await self.outbox.get()
            await send(event)
            self.outbox.task_done()
            if event["type"] == "websocket.close":
                return

    async def wait_until_read(self, writer: asyncio.Task[None]) -> None:
        """The client leaves its answers unread: take no more requests until it has them, or is gone."""
        if self.outbox.qsize() > MOST_UNREAD:
            reading = asyncio.create_task(self.outbox.join())
            await asyncio.wait([reading, writer], return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()


async def serve_socket(service: Service, scope: Any, receive: Any, send: Any) -> None:
    """The ASGI endpoint of `/ws` and `/mcp`."""
    await receive()
    socket = AsgiSocket()
    hello = Hello.read(scope["path"], scope["query_string"].decode("latin-1"), lookup(scope["headers"]))
    conversation = converse(service, socket, hello)
    token = conversation.token
    accepted = [(name.encode(), value.encode()) for name, value in greeting(service, token).items()]
    await send({"type": "websocket.accept", "headers": accepted, "subprotocol": hello.subprotocol})
    writer = asyncio.create_task(socket.write(send))
    conversation.begin()
    clean = False
    try:
        while True:
            await socket.wait_until_read(writer)
            event = await receive()
            if event["type"] == "websocket.disconnect":
                # uvicorn reports 1005 both for a close without a code and for a dropped connection.
                clean = not socket.closed and event.get("code") == NORMAL
                break
            text = event.get("text")
            if text is None:
                conversation.receive_binary()
            else:
                conversation.receive(text.encode())
    finally:
        conversation.lost(clean=clean)
        writer.cancel()


async def refuse_socket(scope: Any, receive: Any, send: Any, error: PaddockError) -> None:
    """Answer a handshake with an error instead."""
    await receive()
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": 1008, "reason": error.message[:120]})
        return
    body = error.message.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "websocket.http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
