"""One `/mcp` WebSocket: JSON-RPC frames, all in the session of that socket."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from paddock.protocol import jsonrpc
from paddock.protocol.codec import encode
from paddock.protocol.jsonrpc import RpcCall, RpcError
from paddock.server.answers import (
    CLOSE_CODES,
    GOING_AWAY,
    INVALID_TEXT,
    NORMAL,
    POLICY,
    RESTART,
    is_utf8,
    refusal,
)
from paddock.server.rpc import SocketCaller, encode_response, respond, respond_to_batch
from paddock.server.ws import MAX_EARLY_FRAMES, Socket
from paddock.sessions.session import Origin, Session

if TYPE_CHECKING:
    import asyncio

    from paddock.errors import PaddockError
    from paddock.server.service import Service
    from paddock.sessions.work import Work


MAX_CALLS = 16
"""How many calls of one connection may run at once. It bounds the answers for a client that does not read."""


class McpConversation:
    token = None

    def __init__(self, service: Service, socket: Socket, queue_timeout: float | None = None) -> None:
        """`queue_timeout` is how long the client waits for a slot; None waits as the server is set up."""
        self.service = service
        self.socket = socket
        self._queue_timeout = queue_timeout
        self._caller: SocketCaller | None = None
        self._session: Session | None = None
        self._pending: deque[bytes] = deque()
        """Frames that wait: for the session, for a running call to end, or for the client to read."""
        self._pending_bytes = 0
        self._running = 0
        self._opening: asyncio.Task[None] | None = None
        self._is_over = False

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        self._opening = self.service.spawn(self._open())

    def receive(self, raw: bytes) -> None:
        if self._is_over:
            return
        self._pending.append(raw)
        self._pending_bytes += len(raw)
        if self._caller is not None:
            self._begin_pending()
        elif self._pending_bytes > self.service.config.limits.message_bytes or len(self._pending) > MAX_EARLY_FRAMES:
            self.socket.close(POLICY, "too many frames before the session was open")

    def is_idle_too_long(self, now: float) -> bool:
        """Never: a session is opened with the connection."""
        return False

    def resume(self) -> None:
        """The client reads its answers again: continue with what waits."""
        if self._session is not None:
            self._session.proceed()
        self._begin_pending()

    def is_blocked(self, work: Work) -> bool:
        # Nobody else can name this session, so every answer of it goes here.
        return not self.socket.can_write

    def _begin_pending(self) -> None:
        """Begin what waits, as long as the client reads its answers and fewer than `MAX_CALLS` run."""
        while self._pending and self._caller and self._running < MAX_CALLS and self.socket.can_write:
            raw = self._pending.popleft()
            self._pending_bytes -= len(raw)
            self._begin(self._caller, raw)
        if self._pending:
            self.socket.pause_requests()
        else:
            self.socket.resume_requests()

    def _begin(self, caller: SocketCaller, raw: bytes) -> None:
        try:
            calls = jsonrpc.parse(raw)
        except RpcError as error:
            if not is_utf8(raw):
                self.socket.close(INVALID_TEXT, "invalid UTF-8")
            else:
                self.socket.send(encode(jsonrpc.failure(error)))
            return
        self._running += 1
        self.service.spawn(self._answer(caller, calls)).add_done_callback(self._end_call)

    def _end_call(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
        if self._pending and not self._is_over:
            self._begin_pending()

    def receive_binary(self) -> None:
        error = RpcError(jsonrpc.INVALID_REQUEST, "Invalid request: send JSON in a text frame, not a binary one")
        self.socket.send(encode(jsonrpc.failure(error)))

    def on_connection_lost(self, *, clean: bool) -> None:
        self._is_over = True
        self._pending.clear()
        if self._opening is not None:
            self._opening.cancel()
        session, self._session = self._session, None
        if session is not None:
            session.detach(self, dropped=not clean)
            session.close("its client left")

    # -- what the session calls -------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
        self.socket.send(frame)

    def on_session_closed(self, error: PaddockError) -> None:
        self._session = None
        self.socket.send(encode(jsonrpc.failure(error)))
        self.socket.close(RESTART if self.service.manager.is_draining() else GOING_AWAY, error.message)

    def on_replaced(self) -> None:
        """Never: a session of this socket has no token to return with."""

    async def _open(self) -> None:
        try:
            session = await self.service.manager.open(Origin.SOCKET, wait=self._queue_timeout)
        except Exception as error:
            rejection = refusal(error)
            self._is_over = True
            self._pending.clear()
            self.socket.send(encode(jsonrpc.failure(rejection)))
            self.socket.close(CLOSE_CODES.get(rejection.code, NORMAL), rejection.code)
            return
        if self._is_over:
            session.close("its client left")
            return
        session.attach(self)
        self._session = session
        self._caller = SocketCaller(session)
        self._begin_pending()

    async def _answer(self, caller: SocketCaller, calls: list[RpcCall | RpcError] | RpcCall) -> None:
        if isinstance(calls, RpcCall):
            response: Any = await respond(self.service, caller, calls)
        else:
            response = await respond_to_batch(self.service, caller, calls)
        if response:
            self.socket.send(encode_response(response))
