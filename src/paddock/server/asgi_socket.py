"""WebSockets through ASGI: the plain path, for any server that speaks ASGI.

`paddock serve` uses `fastpath/websocket.py` instead, unless that is disabled.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from paddock.server.access import lookup
from paddock.server.answers import INTERNAL_ERROR, NORMAL, POLICY
from paddock.server.backpressure import HIGH_WATER, LOW_WATER, TOO_MANY, FlowControl
from paddock.server.handshake import ClientHandshake, handshake_headers
from paddock.server.mcp_ws import McpConversation
from paddock.server.vector import VectorConversation
from paddock.server.ws import Conversation, Socket

if TYPE_CHECKING:
    from paddock.config import Limits
    from paddock.errors import PaddockError
    from paddock.server.service import Service

logger = logging.getLogger("paddock.server")


def make_conversation(
    service: Service, socket: Socket, handshake: ClientHandshake
) -> Conversation | McpConversation | VectorConversation:
    """The kind of conversation that belongs to a path."""
    if handshake.path.endswith("/mcp"):
        return McpConversation(service, socket, handshake.queue_timeout)
    return VectorConversation(service, socket) if handshake.vector else Conversation(service, socket, handshake)


class AsgiSocket:
    """A `Socket` whose frames are written by a task, because ASGI's `send` has to be awaited.

    Keeps the invariant of `backpressure.py`: while more than `HIGH_WATER` bytes wait to be sent, or enough waits to
    be executed, nothing is received.
    """

    def __init__(self, limits: Limits) -> None:
        self._outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.closed = False
        self._limits = limits
        self._flow: FlowControl
        self._unsent = 0
        self._may_receive = asyncio.Event()
        self._may_receive.set()

    def begin(self, conversation: Conversation | McpConversation | VectorConversation) -> None:
        self._conversation = conversation
        self._flow = FlowControl(conversation, self._limits.message_bytes)
        self._flow.transport = self
        self.pause_requests, self.resume_requests = self._flow.pause_requests, self._flow.resume_requests

    @property
    def can_write(self) -> bool:
        return self._flow.can_write

    def send(self, frame: bytes) -> None:
        if not self.closed:
            self._unsent += len(frame)
            self._outgoing.put_nowait({"type": "websocket.send", "text": frame.decode()})
            if self._unsent > HIGH_WATER:
                self._flow.pause_writing()

    def close(self, code: int, reason: str = "") -> None:
        if not self.closed:
            self.closed = True
            self._flow.end()
            self._outgoing.put_nowait({"type": "websocket.close", "code": code, "reason": reason[:120]})

    def receive(self, text: str | None) -> None:
        """A whole message; None for a binary one."""
        message = None if text is None else text.encode()
        try:
            if not self._flow.receive_message(message):
                self.close(POLICY, TOO_MANY)
        except Exception:
            logger.exception("a frame could not be handled")
            self.close(INTERNAL_ERROR)

    async def write(self, send: Any) -> None:
        """Until the socket is closed, or its client reads nothing for too long."""
        while True:
            event = await self._outgoing.get()
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

    def check_alive(self, now: float) -> None:
        """The ASGI server pings. Here only a connection without a session is closed."""
        if self._conversation.is_idle_too_long(now):
            self.close(POLICY, "no session was opened")

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
    handshake = ClientHandshake.read(scope["path"], scope["query_string"].decode("latin-1"), lookup(scope["headers"]))
    conversation = make_conversation(service, socket, handshake)
    socket.begin(conversation)
    token = conversation.token
    accepted = [(name.encode(), value.encode()) for name, value in handshake_headers(service, token).items()]
    await send({"type": "websocket.accept", "headers": accepted, "subprotocol": handshake.subprotocol})
    writer = asyncio.create_task(socket.write(send))
    service.sockets.add(socket)
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
        service.sockets.discard(socket)
        conversation.on_connection_lost(clean=clean)
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
