"""The talk over one `/mcp` socket: JSON-RPC frames, all in the session of that socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.protocol import jsonrpc
from paddock.protocol.codec import encode
from paddock.protocol.jsonrpc import Call, RpcError
from paddock.server.mcp import written
from paddock.server.rpc import SocketCaller, respond
from paddock.server.ws import (
    CLOSE_CODES,
    GOING_AWAY,
    INVALID_TEXT,
    MOST_EARLY_FRAMES,
    NORMAL,
    POLICY,
    RESTART,
    Socket,
    is_utf8,
    refusal,
)
from paddock.sessions.session import Door, Session

if TYPE_CHECKING:
    import asyncio

    from paddock.errors import PaddockError
    from paddock.server.service import Service


class McpConversation:
    token = None

    def __init__(self, service: Service, socket: Socket, queue_timeout: float | None = None) -> None:
        """`queue_timeout` is how long the client waits for a slot; None waits as the server is set up."""
        self.service = service
        self.socket = socket
        self._queue_timeout = queue_timeout
        self._caller: SocketCaller | None = None
        self._session: Session | None = None
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._opening: asyncio.Task[None] | None = None
        self._over = False

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        self._opening = self.service.spawn(self._open())

    def receive(self, raw: bytes) -> None:
        if self._caller is None:
            self._receive_early(raw)
            return
        try:
            calls = jsonrpc.parse(raw)
        except RpcError as error:
            if not is_utf8(raw):
                self.socket.close(INVALID_TEXT, "invalid UTF-8")
            else:
                self.socket.send(encode(jsonrpc.failure(error)))
            return
        self.service.spawn(self._answer(self._caller, calls))

    def receive_binary(self) -> None:
        error = RpcError(jsonrpc.INVALID_REQUEST, "Invalid request: send JSON in a text frame, not a binary one")
        self.socket.send(encode(jsonrpc.failure(error)))

    def lost(self, *, clean: bool) -> None:
        self._over = True
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
            self._early.clear()
            self.socket.send(encode(jsonrpc.failure(refused)))
            self.socket.close(CLOSE_CODES.get(refused.code, NORMAL), refused.code)
            return
        if self._over:
            session.close("its client left")
            return
        session.attach(self)
        self._session = session
        self._caller = SocketCaller(session)
        early, self._early = self._early, []
        for raw in early:
            self.receive(raw)

    def _receive_early(self, raw: bytes) -> None:
        """Frames that arrive before the session is there wait for it."""
        if self._over:
            return
        self._early_bytes += len(raw)
        too_much = self._early_bytes > self.service.config.limits.message_bytes
        if too_much or len(self._early) >= MOST_EARLY_FRAMES:
            self.socket.close(POLICY, "too many frames before the session was open")
            return
        self._early.append(raw)

    async def _answer(self, caller: SocketCaller, calls: list[Call | RpcError] | Call) -> None:
        if isinstance(calls, Call):
            response: Any = await respond(self.service, caller, calls)
        else:
            response = [answer for call in calls if (answer := await self._answer_one(caller, call)) is not None]
        if response:
            self.socket.send(written(response))

    async def _answer_one(self, caller: SocketCaller, call: Call | RpcError) -> dict[str, Any] | None:
        return jsonrpc.failure(call) if isinstance(call, RpcError) else await respond(self.service, caller, call)
