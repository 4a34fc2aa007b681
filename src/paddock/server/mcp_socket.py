"""The talk over one `/mcp` socket: JSON-RPC frames, all in the session of that socket."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from paddock.protocol import jsonrpc
from paddock.protocol.codec import encode
from paddock.protocol.jsonrpc import Call, RpcError
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
from paddock.server.rpc import SocketCaller, respond, respond_to_batch, written
from paddock.server.ws import MOST_EARLY_FRAMES, Socket
from paddock.sessions.session import Door, Session

if TYPE_CHECKING:
    import asyncio

    from paddock.errors import PaddockError
    from paddock.server.service import Service
    from paddock.sessions.work import Work


MOST_CALLS = 16
"""How many calls of one connection may be under way: so many answers can become ready for one who does not read."""


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
        """What came and is not begun: before the session is open, while enough is under way, or nothing is read."""
        self._pending_bytes = 0
        self._under_way = 0
        self._opening: asyncio.Task[None] | None = None
        self._over = False

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        self._opening = self.service.spawn(self._open())

    def receive(self, raw: bytes) -> None:
        if self._over:
            return
        self._pending.append(raw)
        self._pending_bytes += len(raw)
        if self._caller is not None:
            self._work_off()
        elif self._pending_bytes > self.service.config.limits.message_bytes or len(self._pending) > MOST_EARLY_FRAMES:
            self.socket.close(POLICY, "too many frames before the session was open")

    def resume(self) -> None:
        """The client reads its answers again: go on with what waits."""
        if self._session is not None:
            self._session.proceed()
        self._work_off()

    def holds_back(self, work: Work) -> bool:
        # Nobody else can name this session, so every answer of it goes here.
        return not self.socket.can_write

    def _work_off(self) -> None:
        """Begin what waits, for as long as the client reads its answers and not too much is under way."""
        while self._pending and self._caller and self._under_way < MOST_CALLS and self.socket.can_write:
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
        self._under_way += 1
        self.service.spawn(self._answer(caller, calls)).add_done_callback(self._answered)

    def _answered(self, _: asyncio.Task[None]) -> None:
        self._under_way -= 1
        if self._pending and not self._over:
            self._work_off()

    def receive_binary(self) -> None:
        error = RpcError(jsonrpc.INVALID_REQUEST, "Invalid request: send JSON in a text frame, not a binary one")
        self.socket.send(encode(jsonrpc.failure(error)))

    def lost(self, *, clean: bool) -> None:
        self._over = True
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

    def session_closed(self, error: PaddockError) -> None:
        self._session = None
        self.socket.send(encode(jsonrpc.failure(error)))
        self.socket.close(RESTART if self.service.manager.is_draining() else GOING_AWAY, error.message)

    def replaced(self) -> None:
        """Never: a session of this socket has no token to return with."""

    async def _open(self) -> None:
        try:
            session = await self.service.manager.open(Door.SOCKET, wait=self._queue_timeout)
        except Exception as error:
            refused = refusal(error)
            self._over = True
            self._pending.clear()
            self.socket.send(encode(jsonrpc.failure(refused)))
            self.socket.close(CLOSE_CODES.get(refused.code, NORMAL), refused.code)
            return
        if self._over:
            session.close("its client left")
            return
        session.attach(self)
        self._session = session
        self._caller = SocketCaller(session)
        self._work_off()

    async def _answer(self, caller: SocketCaller, calls: list[Call | RpcError] | Call) -> None:
        if isinstance(calls, Call):
            response: Any = await respond(self.service, caller, calls)
        else:
            response = await respond_to_batch(self.service, caller, calls)
        if response:
            self.socket.send(written(response))
