"""WebSockets without ASGI in between: picows reads the frames, uvicorn keeps the port.

uvicorn parses the HTTP request and hands every upgrade to the class in its `ws` setting. Ours takes
the paths that Paddock owns; all others go to uvicorn's own implementation and so to the ASGI app.
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from picows import WSAutoPingStrategy, WSCloseCode, WSListener, WSMsgType, WSUpgradeRequest, WSUpgradeResponse
from picows import WSUpgradeResponseWithListener as Upgrade
from picows.picows import WSProtocol  # type: ignore[attr-defined]
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from paddock.errors import PaddockError
from paddock.server.access import check_access
from paddock.server.aside import SideWriter
from paddock.server.flow import TOO_MANY, Flow
from paddock.server.hello import SUBPROTOCOL_HEADER, Hello, greeting
from paddock.server.kernel import is_plain
from paddock.server.outbox import send_text
from paddock.server.rare_log import late_log
from paddock.server.sockets import converse
from paddock.server.vector import VectorConversation
from paddock.sessions.blueprint import Where

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from picows import WSFrame, WSTransport

    from paddock.server.outbox import Outbox
    from paddock.server.service import Service

PATHS = ("/ws", "/mcp")
READ_BUFFER = 2048
_SESSION_NAMED = re.compile(rb"(?i)[?&]session_id=([^&\s]+)|\r\nsession-resume:[ \t]*(\S+)")
_CONNECTION = re.compile(rb"(?i)\r\nconnection:[^\r\n]*")
HANDSHAKE_TIMEOUT = 10
TEXT, CONTINUATION, PING, PONG, CLOSE = (
    WSMsgType.TEXT, WSMsgType.CONTINUATION, WSMsgType.PING, WSMsgType.PONG, WSMsgType.CLOSE,
)  # fmt: skip

logger = logging.getLogger("paddock.server")
# picows reports every connection; what matters is in the log of sessions.
quiet = logging.getLogger("paddock.picows")
quiet.setLevel(logging.CRITICAL)


class FastSocket(WSListener):
    """One connection: assembles frames into messages, keeps it alive, applies back-pressure."""

    __slots__ = (
        "_began", "_client_left", "_flow", "_limit", "_outbox", "_parts", "_parts_are_text", "_pinged",
        "_said_goodbye", "_seen", "_side", "_size", "_unsent", "conversation", "heard",
        "pause_requests", "resume_requests", "send_aside", "service", "transport",
    )  # fmt: skip
    """What is small stays in the cache."""

    def __init__(self, service: Service, hello: Hello) -> None:
        self.service = service
        self.conversation = converse(service, self, hello)
        self._flow = Flow(self.conversation, service.config.limits.message_bytes)
        self.pause_requests, self.resume_requests = self._flow.pause_requests, self._flow.resume_requests
        self.transport: WSTransport
        self._outbox: Outbox
        self.send_aside: Callable[[bytes], bool] | None = None
        self._side: SideWriter | None = None
        self._limit = service.config.limits.message_bytes
        self._parts: list[bytes] = []
        self._parts_are_text = True
        self._size = 0
        self.heard = True
        """Whether anything came since the last look; cheaper than taking the time of every frame."""
        self._seen = 0.0
        self._began = 0.0
        self._pinged: float | None = None
        self._unsent = 0
        """How much it had not taken yet at the last look."""
        self._said_goodbye = False
        self._client_left = False
        """Whether the client said that it is done. One that gave up on us says another code, and may return."""

    # -- Socket -----------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        if self._said_goodbye:
            return
        if self._side is None:
            self._outbox.put(self.transport, frame)
        else:
            self._side.write(send_text, self.transport, frame)

    @property
    def can_write(self) -> bool:
        return self._flow.can_write

    def close(self, code: int, reason: str = "") -> None:
        if not self._said_goodbye:
            self._said_goodbye = True
            self._flow.end()
            self._write(self.transport.send_close, WSCloseCode(code), reason.encode()[:120])
            self._end_aside()
            asyncio.get_running_loop().call_later(1.0, self.transport.disconnect)

    # -- WSListener -------------------------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self.transport, below = transport, transport.underlying_transport
        self._flow.transport = below
        self.service.start()
        self._outbox = self.service.outbox
        self.service.sockets.add(self)
        if is_plain(below) and self.service.blueprint.step.where is Where.THREAD:
            self._side = SideWriter(below)
            self.send_aside = self._side.send
        self.conversation.begin()

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self.heard = True
        kind = frame.msg_type
        try:
            if kind == CLOSE:
                self._goodbye(frame)
            elif frame.rsv1 or frame.rsv2 or frame.rsv3:
                self.close(1002, "a reserved bit is set")
            elif transport.is_close_frame_sent:
                # picows goes on reading after a close, also what it has just refused as too big.
                return
            elif kind == TEXT and frame.fin and not self._parts:
                # The path of every step: `_receive` without its two calls.
                if self._flow.is_paused:
                    self._receive(frame.get_payload_as_bytes())
                else:
                    self.conversation.receive(frame.get_payload_as_bytes())
            elif kind == PING:
                self._write(transport.send_pong, frame.get_payload_as_bytes())
            elif kind != PONG:
                self._assemble(kind, frame)
        except Exception:
            logger.exception("a frame could not be handled")
            raise

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        self.service.sockets.discard(self)
        self._flow.end()
        self._end_aside()
        self.conversation.lost(clean=self._client_left)

    def pause_writing(self) -> None:
        """The client does not read its answers: execute nothing more until it does."""
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def _receive(self, message: bytes | None) -> None:
        """A whole message; None for a binary one."""
        if not self._flow.take(message):
            self.close(1008, TOO_MANY)

    # -- keeping it alive -------------------------------------------------------------------------

    def look_after(self, now: float) -> None:
        """Ping a silent client; drop one that does not answer, or does not read."""
        limits = self.service.config.limits
        if isinstance(self.conversation, VectorConversation) and not self.conversation.has_opened:
            self._began = self._began or now
            if now - self._began > limits.body_timeout:
                late_log.warning("a vector opened no session for %.0f s: disconnected", now - self._began)
                self.close(1008, "no session was opened")
                return
        unsent = self.transport.underlying_transport.get_write_buffer_size()
        # One that is busy with a long answer gets to the ping behind it later.
        reads, self._unsent = unsent < self._unsent, unsent
        is_unread = unsent > 0 and not self._flow.can_write
        if self.heard or reads or (self._flow.is_paused and not is_unread):
            # A socket that is not read shows no sign of life. What its client has sent already is being executed.
            self.heard, self._seen, self._pinged = False, now, None
        elif is_unread:
            if now - self._seen > limits.unread_timeout:
                logger.warning(
                    "a client read nothing for %.0f s: disconnected, %d bytes unsent", now - self._seen, unsent
                )
                self.transport.underlying_transport.abort()
        elif self._pinged is None and now - self._seen >= limits.ping_interval:
            self._pinged = now
            self._write(self.transport.send_ping, b"")
        elif self._pinged is not None and now - self._pinged > limits.ping_timeout:
            self.transport.underlying_transport.abort()

    def _goodbye(self, frame: WSFrame) -> None:
        is_answer = self._said_goodbye or self.transport.is_close_frame_sent
        self._said_goodbye = True
        if not is_answer:
            code = frame.get_close_code()
            self._client_left = code in (WSCloseCode.OK, WSCloseCode.NO_INFO)
            self._write(self.transport.send_close, WSCloseCode.OK if code == WSCloseCode.NO_INFO else code)
        self._end_aside()
        self.transport.disconnect()

    def _write(self, write: Callable[..., object], *arguments: Any) -> None:
        if self._side is None:
            self._outbox.empty()
            write(*arguments)
        else:
            self._side.write(write, *arguments)

    def _end_aside(self) -> None:
        """Threads have nothing more to say here: the last frame is written, or the socket is gone."""
        if self._side is not None:
            self._side.close()

    def _assemble(self, kind: WSMsgType, frame: WSFrame) -> None:
        """A fragment, or a binary message: text is put together, binary is refused but read to its end."""
        if (kind == CONTINUATION) != bool(self._parts):
            self.close(1002, "a fragment out of order")
            return
        if not self._parts:
            self._parts_are_text = kind == TEXT
            self._size = 0
        self._size += frame.payload_size
        if self._size > self._limit:
            self.close(1009, f"messages are limited to {self._limit} bytes")
            return
        self._parts.append(frame.get_payload_as_bytes())
        if not frame.fin:
            return
        whole, self._parts = b"".join(self._parts), []
        self._receive(whole if self._parts_are_text else None)


class FastProtocol(WSProtocol):  # type: ignore[misc]
    """picows' protocol in the form uvicorn expects of a WebSocket implementation."""

    def __init__(self, service: Service, server_state: Any) -> None:
        limits = service.config.limits
        super().__init__(
            None, None, False, self._upgrade, quiet, True, HANDSHAKE_TIMEOUT,
            False, limits.ping_interval, limits.ping_timeout, WSAutoPingStrategy.PING_WHEN_IDLE,
            False, limits.message_bytes, None, READ_BUFFER,
        )  # fmt: skip
        self.service = service
        self._connections = server_state.connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """uvicorn repeats here what it has read, for picows to go on with."""
        while data:
            room = self.get_buffer(len(data))
            taken = min(len(room), len(data))
            room[:taken] = data[:taken]
            data = data[taken:]
            self.buffer_updated(taken)

    def shutdown(self) -> None:
        """uvicorn is going down, after the service has drained."""
        if isinstance(self.listener, FastSocket) and self.listener in self.service.sockets:
            self.listener.close(1012, "the server is shutting down")
        else:
            self.transport.disconnect()

    def _upgrade(self, request: WSUpgradeRequest) -> Upgrade:
        path, _, query = request.path.decode("latin-1").partition("?")
        try:
            check_access(self.service.config.access, request.headers.get)
        except PaddockError as error:
            response = WSUpgradeResponse.create_error_response(HTTPStatus(error.http_status), error.message.encode())
            return Upgrade(response, None)
        hello = Hello.read(path, query, request.headers.get)
        socket = FastSocket(self.service, hello)
        headers = greeting(self.service, socket.conversation.token)
        if hello.subprotocol is not None:
            headers[SUBPROTOCOL_HEADER] = hello.subprotocol
        return Upgrade(WSUpgradeResponse.create_101_response(headers), socket)


class UpgradeRouter(asyncio.Protocol):
    """Looks at the path of an upgrade and gives it to picows or to uvicorn's own implementation."""

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
        head, end, rest = data.partition(b"\r\n\r\n")
        # uvicorn has found the upgrade among several words, as Firefox sends them; picows wants it alone.
        data = _CONNECTION.sub(b"\r\nconnection: Upgrade", head) + end + rest
        target = data.split(b" ", 2)[1]
        path = target.partition(b"?")[0].decode("latin-1")
        if path in PATHS and self._belongs_elsewhere(data):
            return
        self._serve(path, data)

    def _serve(self, path: str, data: bytes) -> None:
        protocol: Any
        if path in PATHS:
            protocol = FastProtocol(self.service, self._arguments["server_state"])
        else:
            protocol = WebSocketsSansIOProtocol(**self._arguments)
        self._chosen = protocol
        protocol.connection_made(self._transport)
        protocol.data_received(data)
        # uvicorn makes this router the transport's protocol once we return; replace it right after.
        asyncio.get_running_loop().call_soon(self._transport.set_protocol, protocol)

    def _belongs_elsewhere(self, data: bytes) -> bool:
        """Give the socket to the worker that keeps its session, or has more room for a new one."""
        colleagues = self.service.colleagues
        if colleagues is None:
            return False
        named = _SESSION_NAMED.search(data.partition(b"\r\n\r\n")[0])
        token = next((group for group in named.groups() if group), b"").decode("latin-1") if named else ""
        if token and token != "new":
            worker = colleagues.owner(token)
            return worker is not None and colleagues.hand_over(worker, self._transport, data)
        worker = colleagues.best_for_newcomer()
        path = data.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")
        return worker is not None and colleagues.offer(worker, self._transport, data, lambda: self._serve(path, data))


def adopt(service: Service, server_state: Any, connection: socket.socket, request: bytes) -> None:
    """Go on with a WebSocket that another worker received."""
    connection.setblocking(False)

    async def take_over() -> None:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.connect_accepted_socket(lambda: FastProtocol(service, server_state), connection)
        protocol.data_received(request)

    service.spawn(take_over())
