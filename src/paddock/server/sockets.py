"""WebSockets through ASGI, for any server that speaks it. `paddock serve` uses the faster `fast.py`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from paddock.server.access import lookup
from paddock.server.answers import INTERNAL_ERROR, NORMAL, POLICY
from paddock.server.flow import HIGH_WATER, LOW_WATER, TOO_MANY, Flow
from paddock.server.hello import Hello, greeting
from paddock.server.mcp_socket import McpConversation
from paddock.server.vector import VectorConversation
from paddock.server.ws import Conversation, Socket

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.config import Limits
    from paddock.errors import PaddockError
    from paddock.server.flow import Requests
    from paddock.server.service import Service

logger = logging.getLogger("paddock.server")


def converse(service: Service, socket: Socket, hello: Hello) -> Conversation | McpConversation | VectorConversation:
    """The kind of talk that belongs to a path."""
    if hello.path.endswith("/mcp"):
        return McpConversation(service, socket, hello.queue_timeout)
    return VectorConversation(service, socket) if hello.vector else Conversation(service, socket, hello)


class AsgiSocket:
    """A `Socket` whose frames are written by a task, because ASGI's `send` has to be awaited.

    Keeps the invariant of `flow.py`: while more than `HIGH_WATER` bytes wait to be sent, or enough waits to be
    executed, nothing is received.
    """

    send_aside: Callable[[bytes], bool] | None = None

    def __init__(self, limits: Limits) -> None:
        self.outbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.closed = False
        self._limits = limits
        self._flow: Flow
        self._unsent = 0
        self._may_receive = asyncio.Event()
        self._may_receive.set()

    def begin(self, conversation: Requests) -> None:
        self._flow = Flow(conversation, self._limits.message_bytes)
        self._flow.transport = self
        self.pause_requests, self.resume_requests = self._flow.pause_requests, self._flow.resume_requests

    @property
    def can_write(self) -> bool:
        return self._flow.can_write

    def send(self, frame: bytes) -> None:
        if not self.closed:
            self._unsent += len(frame)
            self.outbox.put_nowait({"type": "websocket.send", "text": frame.decode()})
            if self._unsent > HIGH_WATER:
                self._flow.pause_writing()

    def close(self, code: int, reason: str = "") -> None:
        if not self.closed:
            self.closed = True
            self._flow.end()
            self.outbox.put_nowait({"type": "websocket.close", "code": code, "reason": reason[:120]})

    def receive(self, text: str | None) -> None:
        """A whole message; None for a binary one."""
        message = None if text is None else text.encode()
        if not self._flow.take(message):
            self.close(POLICY, TOO_MANY)

    async def write(self, send: Any) -> None:
        """Until the socket is closed, or its client reads nothing for too long."""
        while True:
            event = await self.outbox.get()
            try:
                async with asyncio.timeout(self._limits.unread_timeout):
                    await send(event)
            except TimeoutError:
                logger.warning("a client read nothing for %.0f s: disconnected", self._limits.unread_timeout)
                return
            if event["type"] == "websocket.close":
                return
            self._unsent -= len(event["text"])
            if self._unsent <= LOW_WATER and not self._flow.can_write:
                self._flow.resume_writing()

    def pause_reading(self) -> None:
        self._may_receive.clear()

    def resume_reading(self) -> None:
        self._may_receive.set()

    def abort(self) -> None:
        self.close(INTERNAL_ERROR)

    async def wait_until_readable(self, writer: asyncio.Task[None]) -> bool:
        """Until the next message may be received. False if none may: the writing has ended."""
        if not self._may_receive.is_set() and not self.closed:
            waiting = asyncio.create_task(self._may_receive.wait())
            await asyncio.wait([waiting, writer], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
        return not writer.done() or self.closed


async def serve_socket(service: Service, scope: Any, receive: Any, send: Any) -> None:
    """The ASGI endpoint of `/ws` and `/mcp`."""
    await receive()
    socket = AsgiSocket(service.config.limits)
    hello = Hello.read(scope["path"], scope["query_string"].decode("latin-1"), lookup(scope["headers"]))
    conversation = converse(service, socket, hello)
    socket.begin(conversation)
    token = conversation.token
    accepted = [(name.encode(), value.encode()) for name, value in greeting(service, token).items()]
    await send({"type": "websocket.accept", "headers": accepted, "subprotocol": hello.subprotocol})
    writer = asyncio.create_task(socket.write(send))
    conversation.begin()
    clean = False
    try:
        while await socket.wait_until_readable(writer):
            event = await receive()
            if event["type"] == "websocket.disconnect":
                # uvicorn reports 1005 both for a close without a code and for a dropped connection.
                clean = not socket.closed and event.get("code") == NORMAL
                break
            socket.receive(event.get("text"))
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
