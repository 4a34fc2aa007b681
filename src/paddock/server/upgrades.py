"""WebSocket upgrades: which worker takes a connection, and which implementation serves it.

uvicorn parses the HTTP request and gives every upgrade to the class in its `ws` setting, which is `UpgradeRouter`.
With several workers it may pass the socket on first. Paddock's own paths go to the fast path if there is one; all
others, and all without it, go to uvicorn's WebSocket implementation and so to the ASGI application
(`server/asgi_socket.py`).
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from paddock.server.backpressure import count_unread
from paddock.server.http_protocol import UnreadDeadline

if TYPE_CHECKING:
    import socket

    from paddock.server.service import Service

PATHS = ("/ws", "/mcp")
_SESSION_TOKEN = re.compile(rb"(?i)[?&]session_id=([^&\s]+)|\r\nsession-resume:[ \t]*(\S+)")
_CONNECTION = re.compile(rb"(?i)\r\nconnection:[^\r\n]*")


class PlainProtocol(UnreadDeadline, WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, with a deadline for the peer to read its answers."""

    def is_write_paused(self) -> bool:
        return not self.writable.is_set()

    _unread_at_ping = 0
    """How many bytes the client had to read before the last ping."""

    def send_keepalive_ping(self) -> None:
        self._unread_at_ping = count_unread(self.transport)
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        """No pong came. The client is not to blame while it reads what is before the ping, or if we do not read.

        If it reads nothing of a long answer, `UnreadDeadline` ends the connection."""
        has_read = count_unread(self.transport) < self._unread_at_ping
        if self.read_paused or self.is_write_paused() or has_read:
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()


def make_protocol(service: Service, path: str, uvicorn_arguments: dict[str, Any]) -> Any:
    """The protocol that serves an upgrade on `path`."""
    if service.fastpath is not None and path in PATHS:
        return service.fastpath.make_websocket_protocol(uvicorn_arguments["server_state"])
    protocol = PlainProtocol(**uvicorn_arguments)
    protocol.limits = service.config.limits
    return protocol


class UpgradeRouter(asyncio.Protocol):
    """Made by uvicorn for each upgrade: chooses the protocol that serves it."""

    service: Service

    def __init__(self, config: Any, server_state: Any, app_state: dict[str, Any]) -> None:
        self._arguments = {"config": config, "server_state": server_state, "app_state": app_state}
        self._chosen: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        """A refused upgrade ends before the chosen protocol has taken over."""
        if self._chosen is not None:
            self._chosen.connection_lost(error)

    def data_received(self, data: bytes) -> None:
        head, end, body = data.partition(b"\r\n\r\n")
        # Firefox sends `keep-alive, Upgrade`. uvicorn accepts that, picows only the one word.
        data = _CONNECTION.sub(b"\r\nconnection: Upgrade", head) + end + body
        target = data.split(b" ", 2)[1]
        path = target.partition(b"?")[0].decode("latin-1")
        if path in PATHS and self._belongs_elsewhere(data):
            return
        self._serve(path, data)

    def _serve(self, path: str, data: bytes) -> None:
        self._chosen = protocol = make_protocol(self.service, path, self._arguments)
        protocol.connection_made(self._transport)
        protocol.data_received(data)
        # uvicorn makes this router the transport's protocol once we return; replace it right after.
        asyncio.get_running_loop().call_soon(self._transport.set_protocol, protocol)

    def _belongs_elsewhere(self, data: bytes) -> bool:
        """Give the socket to the worker that keeps its session, or has more room for a new one."""
        siblings = self.service.siblings
        if siblings is None:
            return False
        match = _SESSION_TOKEN.search(data.partition(b"\r\n\r\n")[0])
        token = next((group for group in match.groups() if group), b"").decode("latin-1") if match else ""
        if token and token != "new":
            worker = siblings.owner(token)
            return worker is not None and siblings.hand_over(worker, self._transport, data)
        worker = siblings.best_for_new_client()
        path = data.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")
        return worker is not None and siblings.offer(worker, self._transport, data, lambda: self._serve(path, data))


def adopt(service: Service, config: Any, server_state: Any, connection: socket.socket, request: bytes) -> None:
    """Serve a WebSocket that another worker received. `request` is what that worker has read of it."""
    connection.setblocking(False)
    arguments = {"config": config, "server_state": server_state, "app_state": {}}
    path = request.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")

    async def take_over() -> None:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.connect_accepted_socket(lambda: make_protocol(service, path, arguments), connection)
        protocol.data_received(request)

    service.spawn(take_over())
