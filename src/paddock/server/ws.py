"""One `/ws` connection: frames in, requests to dispatch, answers out.

    frame ─ receive ─ parse ─ _handle_in_turn ─┬────────────┬─ _handle ─ dispatch.submit ─ session ─ environment
                                               └─ _backlog ─┘                                 │
    frame ─ socket.send ─ session.send ─ _reply ─ write_answer ─ send_answer ─────────────────┘

Answers leave in the order of the requests: while one is executed, the next ones wait in the backlog. `cancel` and
`close` do not wait. A session that this connection opened ends with it, unless its client can resume; a session that
it only attached to stays.

Knows neither ASGI nor picows: either brings a `Socket` that can send a frame and close.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from paddock.errors import (
    InvalidJSON,
    InvalidMessage,
    PaddockError,
    SessionTaken,
    StepCancelled,
    StepTimeout,
)
from paddock.protocol import messages
from paddock.protocol.messages import CancelMessage, CloseMessage, McpMessage, Single
from paddock.server.answers import (
    CLOSE_CODES,
    GOING_AWAY,
    INVALID_TEXT,
    NORMAL,
    POLICY,
    RESTART,
    admit,
    is_utf8,
    number_in,
    refusal,
    request_in,
    write_answer,
    write_mcp,
)
from paddock.server.rpc import SocketCaller, answer
from paddock.sessions.session import Origin, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.server.handshake import ClientHandshake
    from paddock.server.service import Service
    from paddock.sessions.work import Work

logger = logging.getLogger("paddock.server")
MAX_EARLY_FRAMES = 1024
"""How many frames may come before the session is open."""
MAX_BACKLOG_MESSAGES = 1024
"""How many messages may wait for their turn. At this number the socket is no longer read."""


class Socket(Protocol):
    """The transport of a conversation: it sends frames, and can stop reading them."""

    def send(self, frame: bytes) -> None:
        """Send a text frame. It is buffered while the client does not read."""

    def close(self, code: int, reason: str = "") -> None:
        """Send a close frame, then close the connection."""

    @property
    def can_write(self) -> bool:
        """False while the client does not read its answers. Then no request begins, until `resume` is called."""

    @property
    def pause_requests(self) -> Callable[[], None]:
        """Stop reading the socket: the backlog is full."""

    @property
    def resume_requests(self) -> Callable[[], None]:
        """Read the socket again: the backlog has room."""


@dataclass(frozen=True, slots=True)
class InvalidFrame:
    """A frame that is no valid message. Its error is sent in its turn, like any answer."""

    error: PaddockError
    number: int | None = None


class QueuedMessage(NamedTuple):
    """A message that waits for its turn."""

    message: Single | InvalidFrame
    since: float
    size: int


class Conversation:
    """One socket and its session."""

    __slots__ = (
        "_backlog", "_call", "_call_number", "_early_frames", "_is_answering", "_is_full", "_is_over", "_opening",
        "_parse", "_submit", "_waiting_bytes", "handshake", "send", "service", "session", "socket", "token",
    )  # fmt: skip

    def __init__(self, service: Service, socket: Socket, handshake: ClientHandshake) -> None:
        self.service = service
        self.socket = socket
        self.handshake = handshake
        self.session: Session | None = None
        self.token = self._token_to_hand_out()
        self.send = socket.send
        self._parse = service.spec.wire.parse
        self._submit = service.dispatch.submit
        self._early_frames: deque[bytes | InvalidFrame] = deque()
        self._is_answering = False
        self._backlog: deque[QueuedMessage] = deque()
        self._is_full = False
        self._waiting_bytes = 0
        """The size of the frames that wait for the session, or for their turn."""
        self._opening: asyncio.Task[None] | None = None
        self._call: asyncio.Task[None] | None = None
        self._call_number: int | None = None
        self._is_over = False

    def _token_to_hand_out(self) -> str | None:
        """The token for the handshake's response: only for a client that asks to resume."""
        manager, token = self.service.manager, self.handshake.resume
        if token == "new":
            return manager.new_token()
        return token if token is not None and manager.knows(token) else None

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        """The socket is open: open or find the session."""
        self._opening = self.service.spawn(self._open())

    def receive(self, raw: bytes) -> None:
        """A text frame arrived."""
        session = self.session
        if session is None:
            self._queue_early_frame(raw)
            return
        if self._is_answering:
            # A thread may have answered without waking the loop.
            session.catch_up()
        message: Single | InvalidFrame
        try:
            message = self._parse(raw)
        except PaddockError as error:
            if isinstance(error, InvalidJSON) and not is_utf8(raw):
                self.socket.close(INVALID_TEXT, "invalid UTF-8")
                return
            message = InvalidFrame(error, number_in(raw))
        self._handle_in_turn(message, len(raw))

    def receive_binary(self) -> None:
        """A binary frame arrived: it gets an error, and the connection stays open."""
        error = InvalidMessage("Invalid message", hint="send JSON in a text frame, not a binary one", errors=[])
        if self.session is None:
            self._queue_early_frame(InvalidFrame(error))
        else:
            self._handle_in_turn(InvalidFrame(error))

    def is_idle_too_long(self, now: float) -> bool:
        """Never: a session is opened with the connection."""
        return False

    def is_blocked(self, work: Work) -> bool:
        """Whether the answer of `work` cannot be sent now, because the client does not read."""
        return not self.socket.can_write and getattr(work.reply, "__self__", None) is self

    def resume(self) -> None:
        """The client reads its answers again: continue with what waits."""
        if self.session is not None:
            self._receive_early_frames()
            self._handle_backlog()

    def on_connection_lost(self, *, clean: bool) -> None:
        """The socket has ended; `clean` if the client closed it properly."""
        self._is_over = True
        self._early_frames.clear()
        self._backlog.clear()
        if self._opening is not None:
            self._opening.cancel()
        session, self.session = self.session, None
        if session is None:
            return
        session.detach(self, dropped=not clean)
        owner = session.origin is Origin.SOCKET
        if owner and (clean or not session.resumable):
            session.close("its client left")
            return
        if not session.resumable:
            session.give_up_all(self)
            if self._call is not None:
                self._call.cancel()

    # -- what the session calls -------------------------------------------------------------------

    def on_session_closed(self, error: PaddockError) -> None:
        """The session ended before the socket did: send the error, and close."""
        self.session = None
        draining = self.service.manager.is_draining()
        self.socket.send(messages.write_error(error))
        self.socket.close(RESTART if draining else GOING_AWAY, error.message)

    def on_replaced(self) -> None:
        """The client resumed the session on another connection."""
        self.session = None
        self.socket.close(POLICY, "the session was resumed elsewhere")

    def end_turn(self) -> None:
        """A request is answered: the next may have its turn."""
        self._is_answering = False
        if self._backlog:
            asyncio.get_running_loop().call_soon(self._handle_backlog)

    # -- opening ----------------------------------------------------------------------------------

    async def _open(self) -> None:
        try:
            session = await self._find_or_open()
        except Exception as error:
            self._refuse(refusal(error))
            return
        if self._is_over:
            return
        session.attach(self)
        self.session = session
        self._waiting_bytes = 0
        self._receive_early_frames()

    def _receive_early_frames(self) -> None:
        while self._early_frames and self.socket.can_write:
            frame = self._early_frames.popleft()
            if isinstance(frame, InvalidFrame):
                self._handle_in_turn(frame)
            else:
                self.receive(frame)

    async def _find_or_open(self) -> Session:
        manager, handshake = self.service.manager, self.handshake
        if handshake.session_id is not None:
            session = manager.find(handshake.session_id)
            if session.attachment is not None:
                raise SessionTaken(f"Session {handshake.session_id} already has an attached WebSocket")
            return session
        if handshake.resume is not None and handshake.resume != "new":
            session = manager.find(handshake.resume)
            manager.metrics.sessions_resumed += 1
            return session
        session = await manager.open(
            Origin.SOCKET,
            token=self.token,
            wait=handshake.queue_timeout,
            on_place=self._report_place if handshake.resume else None,
            lease=handshake.lease,
        )
        session.resumable = handshake.resume is not None
        if self._is_over:
            session.close("its client left")
        return session

    def _report_place(self, place: int) -> None:
        if self.socket.can_write:
            self.socket.send(messages.write_queued(place))

    def _refuse(self, error: PaddockError) -> None:
        self._early_frames.clear()
        self._is_over = True
        self.socket.send(messages.write_error(error))
        self.socket.close(CLOSE_CODES.get(error.code, NORMAL), error.code)

    # -- turns ------------------------------------------------------------------------------------

    def _queue_early_frame(self, frame: bytes | InvalidFrame) -> None:
        """Queue a frame that arrived before the session was open."""
        if self._is_over:
            return
        size = len(frame) if isinstance(frame, bytes) else 0
        if len(self._early_frames) >= MAX_EARLY_FRAMES or self._is_too_much(size):
            self.socket.close(POLICY, "too many frames before the session was open")
            return
        self._waiting_bytes += size
        self._early_frames.append(frame)

    def _is_too_much(self, size: int) -> bool:
        """Whether `size` more bytes would exceed the limit for waiting frames: that of one message."""
        return self._waiting_bytes + size > self.service.config.limits.message_bytes

    def _handle_in_turn(self, message: Single | InvalidFrame, size: int = 0) -> None:
        """Handle a message now, or queue it while an earlier request is executed."""
        if self._is_answering or self._backlog:
            self._queue(message, size)
        else:
            self._handle(message)

    def _handle(self, message: Single | InvalidFrame, waited_seconds: float = 0.0) -> None:
        """Execute one message. The time that it waited counts against its timeout."""
        session = self.session
        if session is None:
            return
        if isinstance(message, InvalidFrame):
            self.socket.send(messages.write_error(message.error, message.number))
            return
        number = message.id
        if number is not None and not admit(session, number, message.ack, self.socket.send):
            return
        request = request_in(message)
        timeout = None if message.timeout_s is None else message.timeout_s - waited_seconds
        if timeout is not None and timeout <= 0:
            error = StepTimeout(f"{message.type} had to wait longer than its deadline for its turn")
            self._reply(session, number, messages.write_error(error, number))
        elif request is not None:
            self._is_answering = True
            self._submit(session, request, self.send_answer, number=number, timeout=timeout)
        elif isinstance(message, McpMessage):
            self._is_answering = True
            self._call = self.service.spawn(answer(self.service, SocketCaller(session), message.data, timeout))
            self._call.add_done_callback(partial(self._reply_to_mcp, session, number))
            self._call_number = number
        elif isinstance(message, CancelMessage):
            if number is not None:
                session.reply_cache.forget(number)
            session.cancel(message.data)
        else:
            self._close()

    def send_answer(self, work: Work, answer: Any) -> None:
        """The `reply` of a request: send its answer to the connection that is attached now, and end the turn."""
        self._reply(work.session, work.number, write_answer(work, answer))
        self.end_turn()

    def _reply(self, session: Session, number: int | None, frame: bytes) -> None:
        """Send a frame. The reply cache keeps it if the request was numbered, for a client that resumes."""
        if number is not None:
            session.reply_cache.record(number, frame)
        session.send(frame)

    def _queue(self, message: Single | InvalidFrame, size: int) -> None:
        """Add a message to the backlog. `cancel` and `close` act at once."""
        session = self.session
        if session is None:
            return
        if isinstance(message, CloseMessage):
            self._close()
        elif isinstance(message, CancelMessage):
            self._cancel(session, message.data)
        else:
            if len(self._backlog) >= MAX_BACKLOG_MESSAGES or self._is_too_much(size):
                self._is_full = True
                self.socket.pause_requests()
            self._waiting_bytes += size
            self._backlog.append(QueuedMessage(message, session.clock(), size))
            # A thread may have answered meanwhile, before it could see that a message waits.
            session.catch_up()

    def _handle_backlog(self) -> None:
        """Handle what waits for its turn, as long as the client reads its answers."""
        while self._backlog and not self._is_answering and self.session is not None and self.socket.can_write:
            waiting = self._backlog.popleft()
            self._waiting_bytes -= waiting.size
            self._handle(waiting.message, self.session.clock() - waiting.since)
        if self._is_full and len(self._backlog) < MAX_BACKLOG_MESSAGES and not self._is_too_much(0):
            self._is_full = False
            self.socket.resume_requests()

    def _cancel(self, session: Session, number: int) -> None:
        waiting = next((each for each in self._backlog if getattr(each.message, "id", None) == number), None)
        if waiting is None and self._call is not None and self._call_number == number:
            self._call.cancel()
        if waiting is None:
            session.cancel(number)
            return
        self._backlog.remove(waiting)
        self._waiting_bytes -= waiting.size
        self.socket.send(messages.write_error(StepCancelled("cancelled before it began"), number))

    def _close(self) -> None:
        """The client sent `close`. A session that this connection opened ends; one that it attached to stays."""
        self.on_connection_lost(clean=True)
        self.socket.close(NORMAL)

    def _reply_to_mcp(self, session: Session, number: int | None, call: asyncio.Task[dict[str, Any] | None]) -> None:
        """An `mcp` call has ended: send its response, if it has one, and end the turn."""
        self._call = None
        if call.cancelled():
            cancelled = StepCancelled("cancelled: its caller gave it up")
            self._reply(session, number, messages.write_error(cancelled, number))
        elif (response := call.result()) is not None:
            self._reply(session, number, write_mcp(response, number))
        elif number is not None:
            session.reply_cache.forget(number)
        self.end_turn()
