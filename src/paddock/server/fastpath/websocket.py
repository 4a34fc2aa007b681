"""WebSockets on picows: no ASGI in between, frames are parsed in C.

uvicorn accepts the connection and parses the HTTP request; `server/upgrades.py` gives it to `FastProtocol`.

Measured gain over uvicorn's own implementation and ASGI: 1.9 times the steps with 16
sessions and more, `batch_writer` included.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from picows import WSAutoPingStrategy, WSCloseCode, WSListener, WSMsgType, WSUpgradeRequest, WSUpgradeResponse
from picows import WSUpgradeResponseWithListener as Upgrade
from picows.picows import WSProtocol  # type: ignore[attr-defined]

from paddock.errors import PaddockError
from paddock.server.access import check_access
from paddock.server.answers import POLICY
from paddock.server.backpressure import TOO_MANY, FlowControl, count_unread
from paddock.server.fastpath.batch_writer import BatchWriter, send_text
from paddock.server.fastpath.conversation import FastConversation, make_fast_conversation
from paddock.server.fastpath.off_loop import OffLoopWriter, can_write_past
from paddock.server.handshake import SUBPROTOCOL_HEADER, ClientHandshake, handshake_headers
from paddock.sessions.spec import Where

if TYPE_CHECKING:
    from collections.abc import Callable

    from picows import WSFrame, WSTransport

    from paddock.server.fastpath import FastPath

READ_BUFFER_BYTES = 2048
HANDSHAKE_TIMEOUT_SECONDS = 10
TEXT, CONTINUATION, PING, PONG, CLOSE = (
    WSMsgType.TEXT, WSMsgType.CONTINUATION, WSMsgType.PING, WSMsgType.PONG, WSMsgType.CLOSE,
)  # fmt: skip

logger = logging.getLogger("paddock.server")
# picows logs every connection; what matters is in the log of sessions.
picows_logger = logging.getLogger("paddock.picows")
picows_logger.setLevel(logging.CRITICAL)


class FastSocket(WSListener):
    """One connection: assembles frames into messages, keeps it alive, applies back-pressure."""

    __slots__ = (
        "_batch_writer", "_flow", "_has_sent_close", "_is_clean_close", "_limit", "_off_loop_writer", "_parts",
        "_parts_are_text", "_pinged_at", "_seen_at", "_size", "_unsent", "conversation", "fastpath", "has_received",
        "pause_requests", "resume_requests", "service", "transport",
    )  # fmt: skip

    def __init__(self, fastpath: FastPath, handshake: ClientHandshake) -> None:
        self.fastpath = fastpath
        self.service = service = fastpath.service
        self.conversation = make_fast_conversation(fastpath, self, handshake)
        self._flow = FlowControl(self.conversation, service.config.limits.message_bytes)
        self.pause_requests, self.resume_requests = self._flow.pause_requests, self._flow.resume_requests
        self.transport: WSTransport
        self._batch_writer: BatchWriter
        self._off_loop_writer: OffLoopWriter | None = None
        """Set if threads may write to this socket too."""
        self._limit = service.config.limits.message_bytes
        self._parts: list[bytes] = []
        self._parts_are_text = True
        self._size = 0
        self.has_received = True
        """Whether anything came since the last check; cheaper than taking the time of every frame."""
        self._seen_at = 0.0
        self._pinged_at: float | None = None
        self._unsent = 0
        """How many bytes the client had not read at the last check."""
        self._has_sent_close = False
        self._is_clean_close = False
        """Whether the client closed because it is done. A client that may resume sends another close code."""

    # -- Socket -----------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        if self._has_sent_close:
            return
        if self._off_loop_writer is None:
            self._batch_writer.put(self.transport, frame)
        else:
            self._off_loop_writer.write(send_text, self.transport, frame)

    @property
    def can_write(self) -> bool:
        return self._flow.can_write

    def close(self, code: int, reason: str = "") -> None:
        if not self._has_sent_close:
            self._has_sent_close = True
            self._flow.end()
            self._write(self.transport.send_close, WSCloseCode(code), reason.encode()[:120])
            self._end_off_loop_writes()
            asyncio.get_running_loop().call_later(1.0, self.transport.disconnect)

    # -- WSListener -------------------------------------------------------------------------------

    def on_ws_connected(self, transport: WSTransport) -> None:
        self.transport, tcp_transport = transport, transport.underlying_transport
        self._flow.transport = tcp_transport
        self.service.start()
        self._batch_writer = self.fastpath.batch_writer
        self.service.sockets.add(self)
        is_threaded = self.service.spec.step.where is Where.THREAD
        if is_threaded and isinstance(self.conversation, FastConversation) and can_write_past(tcp_transport):
            self._off_loop_writer = OffLoopWriter(tcp_transport)
            self.conversation.send_past_loop = self._off_loop_writer.send
        self.conversation.begin()

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        self.has_received = True
        kind = frame.msg_type
        try:
            if kind == CLOSE:
                self._handle_close(frame)
            elif frame.rsv1 or frame.rsv2 or frame.rsv3:
                self.close(1002, "a reserved bit is set")
            elif transport.is_close_frame_sent:
                # picows goes on reading after it has sent a close, also a message that it refused as too big.
                return
            elif kind == TEXT and frame.fin and not self._parts:
                # The path of every step: like `_receive`, with two calls less.
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
        self._end_off_loop_writes()
        self.conversation.on_connection_lost(clean=self._is_clean_close)

    def pause_writing(self) -> None:
        """The client does not read its answers: execute nothing more until it does."""
        self._flow.pause_writing()

    def resume_writing(self) -> None:
        self._flow.resume_writing()

    def _receive(self, message: bytes | None) -> None:
        """A whole message; None for a binary one."""
        if not self._flow.receive_message(message):
            self.close(POLICY, TOO_MANY)

    # -- keeping it alive -------------------------------------------------------------------------

    def check_alive(self, now: float) -> None:
        """Ping a silent client; drop one that does not answer, or does not read."""
        limits = self.service.config.limits
        if self.conversation.is_idle_too_long(now):
            self.close(POLICY, "no session was opened")
            return
        unsent = count_unread(self.transport.underlying_transport)
        # A client that still reads a long answer receives the ping only after it.
        has_read, self._unsent = unsent < self._unsent, unsent
        is_unread = unsent > 0 and not self._flow.can_write
        if self.has_received or has_read or (self._flow.is_paused and not is_unread):
            # While the socket is not read, no sign of life can arrive: requests of the client are being executed.
            self.has_received, self._seen_at, self._pinged_at = False, now, None
        elif is_unread:
            if now - self._seen_at > limits.unread_timeout:
                logger.warning(
                    "a client read nothing for %.0f s: disconnected, %d bytes unsent", now - self._seen_at, unsent
                )
                self.transport.underlying_transport.abort()
        elif self._pinged_at is None and now - self._seen_at >= limits.ping_interval:
            self._pinged_at = now
            self._write(self.transport.send_ping, b"")
        elif self._pinged_at is not None and now - self._pinged_at > limits.ping_timeout:
            self.transport.underlying_transport.abort()

    def _handle_close(self, frame: WSFrame) -> None:
        is_answer = self._has_sent_close or self.transport.is_close_frame_sent
        self._has_sent_close = True
        if not is_answer:
            code = frame.get_close_code()
            self._is_clean_close = code in (WSCloseCode.OK, WSCloseCode.NO_INFO)
            self._write(self.transport.send_close, WSCloseCode.OK if code == WSCloseCode.NO_INFO else code)
        self._end_off_loop_writes()
        self.transport.disconnect()

    def _write(self, write: Callable[..., object], *arguments: Any) -> None:
        if self._off_loop_writer is None:
            self._batch_writer.flush()
            write(*arguments)
        else:
            self._off_loop_writer.write(write, *arguments)

    def _end_off_loop_writes(self) -> None:
        """The last frame is written, or the socket is gone: threads must not write any more."""
        if self._off_loop_writer is not None:
            self._off_loop_writer.close()

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
        message, self._parts = b"".join(self._parts), []
        self._receive(message if self._parts_are_text else None)


class FastProtocol(WSProtocol):  # type: ignore[misc]
    """picows' protocol in the form uvicorn expects of a WebSocket implementation."""

    def __init__(self, fastpath: FastPath, server_state: Any) -> None:
        self.fastpath = fastpath
        self.service = service = fastpath.service
        limits = service.config.limits
        super().__init__(
            None, None, False, self._upgrade, picows_logger, True, HANDSHAKE_TIMEOUT_SECONDS,
            False, limits.ping_interval, limits.ping_timeout, WSAutoPingStrategy.PING_WHEN_IDLE,
            False, limits.message_bytes, None, READ_BUFFER_BYTES,
        )  # fmt: skip
        self._connections = server_state.connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.add(self)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        """uvicorn passes on what it has read; copy it into picows' buffer."""
        while data:
            buffer = self.get_buffer(len(data))
            size = min(len(buffer), len(data))
            buffer[:size] = data[:size]
            data = data[size:]
            self.buffer_updated(size)

    def shutdown(self) -> None:
        """uvicorn shuts down, after the service has drained."""
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
        handshake = ClientHandshake.read(path, query, request.headers.get)
        socket = FastSocket(self.fastpath, handshake)
        headers = handshake_headers(self.service, socket.conversation.token)
        if handshake.subprotocol is not None:
            headers[SUBPROTOCOL_HEADER] = handshake.subprotocol
        return Upgrade(WSUpgradeResponse.create_101_response(headers), socket)
