"""The talk over one `/ws` socket: frames in, requests to dispatch, answers out.

Knows neither ASGI nor picows: either brings a `Socket` that can send a frame and close. A session
that this socket opened ends with it, unless its client can resume; a session it merely attached to
stays.
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
from paddock.protocol.episode import Step
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
    write_step,
)
from paddock.server.rpc import SocketCaller, answer
from paddock.sessions.session import LATER, Door, Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.server.hello import Hello
    from paddock.server.service import Service
    from paddock.sessions.work import StepAside, Work

logger = logging.getLogger("paddock.server")
MOST_EARLY_FRAMES = 1024
"""How many frames may come before the session is open."""
MOST_BEHIND = 1024
"""How many may wait for the answer before theirs. The socket is not read while so many do."""


class Socket(Protocol):
    """What a transport lends to a conversation."""

    def send(self, frame: bytes) -> None: ...
    def close(self, code: int, reason: str = "") -> None: ...

    @property
    def can_write(self) -> bool:
        """False while the client leaves its answers unread: then nothing is executed for it, until `resume`."""

    @property
    def pause_requests(self) -> Callable[[], None]:
        """Have the socket not read, because enough waits to be executed."""

    @property
    def resume_requests(self) -> Callable[[], None]: ...

    send_aside: Callable[[bytes], bool] | None
    """Sends from any thread, past the loop; False if this frame must take the loop. None where no thread may send."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A frame that is no valid message: its error waits for its turn like any answer."""

    error: PaddockError
    number: int | None = None


class Waiting(NamedTuple):
    """A message that has to wait for its turn."""

    message: Single | Refused
    since: float
    size: int


class Conversation:
    """One socket and the session it talks to."""

    __slots__ = (
        "_answering", "_backlog", "_calling", "_calling_number", "_early", "_is_full", "_opening", "_over",
        "_parse", "_quick_step", "_send_aside", "_submit", "_waiting_bytes", "hello", "send", "service", "session",
        "socket", "timeout", "token",
    )  # fmt: skip
    """Every step of every session passes through one of these, and what is small stays in the cache."""

    def __init__(self, service: Service, socket: Socket, hello: Hello) -> None:
        self.service = service
        self.socket = socket
        self.hello = hello
        self.session: Session | None = None
        self.token = self._token_to_hand_out()
        self.send = socket.send
        self._send_aside: Callable[[bytes], bool] | None = None
        self._quick_step = service.blueprint.wire.quick_step
        self._parse = service.blueprint.wire.parse
        self._submit = service.dispatch.submit
        self.timeout = service.dispatch.step_timeout
        self._early: deque[bytes | Refused] = deque()
        self._answering = False
        self._backlog: deque[Waiting] = deque()
        self._is_full = False
        self._waiting_bytes = 0
        """The size of what waits for the session, or for its turn."""
        self._opening: asyncio.Task[None] | None = None
        self._calling: asyncio.Task[None] | None = None
        self._calling_number: int | None = None
        self._over = False

    def _token_to_hand_out(self) -> str | None:
        """Only a client that asked to resume is told its token."""
        manager, asked = self.service.manager, self.hello.resume
        if asked == "new":
            return manager.new_token()
        return asked if asked is not None and manager.knows(asked) else None

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        """The socket is open."""
        self._send_aside = self.socket.send_aside
        self._opening = self.service.spawn(self._open())

    def receive(self, raw: bytes) -> None:
        """A text frame arrived."""
        session = self.session
        if session is None:
            self._receive_early(raw)
            return
        if self._answering:
            session.catch_up()
        if not self._answering and not self._backlog and (action := self._quick_step(raw)) is not None:
            self._step(session, action)
            return
        message: Single | Refused
        try:
            message = self._parse(raw)
        except PaddockError as error:
            if isinstance(error, InvalidJSON) and not is_utf8(raw):
                self.socket.close(INVALID_TEXT, "invalid UTF-8")
                return
            message = Refused(error, number_in(raw))
        self._take(message, len(raw))

    def _step(self, session: Session, action: Any) -> None:
        """Carry out a plain step whose turn it is by the shortest way that its environment allows."""
        if self._send_aside is not None and session.step_aside(action, self):
            self._answering = True
            return
        answer = session.step_now(action)
        if answer is LATER:
            self._answering = True
            self._submit(session, Step(action), self.answered)
        else:
            self.send(write_step(answer))

    def receive_binary(self) -> None:
        error = InvalidMessage("Invalid message", hint="send JSON in a text frame, not a binary one", errors=[])
        if self.session is None:
            self._receive_early(Refused(error))
        else:
            self._take(Refused(error))

    def holds_back(self, work: Work) -> bool:
        return not self.socket.can_write and getattr(work.reply, "__self__", None) is self

    def resume(self) -> None:
        """The client reads its answers again: go on with what waits."""
        if self.session is not None:
            self._receive_all_early()
            self._go_on()

    def lost(self, *, clean: bool) -> None:
        """The socket is gone; `clean` if the client said goodbye."""
        self._over = True
        self._early.clear()
        self._backlog.clear()
        if self._opening is not None:
            self._opening.cancel()
        session, self.session = self.session, None
        if session is None:
            return
        session.detach(self, dropped=not clean)
        owner = session.door is Door.SOCKET
        if owner and (clean or not session.resumable):
            session.close("its client left")
            return
        if not session.resumable:
            session.give_up_all(self)
            if self._calling is not None:
                self._calling.cancel()

    # -- what the session calls -------------------------------------------------------------------

    def session_closed(self, error: PaddockError) -> None:
        """The session ended before the socket did: say so, and hang up."""
        self.session = None
        draining = self.service.manager.is_draining()
        self.socket.send(messages.write_error(error))
        self.socket.close(RESTART if draining else GOING_AWAY, error.message)

    def replaced(self) -> None:
        self.session = None
        self.socket.close(POLICY, "the session was resumed elsewhere")

    # -- steps on threads: what a thread calls, then what the loop calls -----------------------------

    def write_aside(self, work: StepAside) -> bytes:
        """On a thread: the frame that answers a step."""
        return write_step(work.value)

    def send_aside(self, frame: bytes) -> bool:
        """On a thread: send it now; False if the loop has to."""
        return self._send_aside is not None and self._send_aside(frame)

    def is_pressing(self) -> bool:
        """On a thread: whether the loop must hear of the answer at once, because others wait for their turn."""
        return bool(self._backlog)

    def answered_aside(self, work: StepAside) -> None:
        """On the loop: a thread has answered, or left the frame to be sent here."""
        if work.unsent is not None and (attachment := work.session.attachment) is not None:
            attachment.send(work.unsent)
        self.rest()

    def rest(self) -> None:
        """On the loop: nothing is being answered any more, so the next may have its turn."""
        self._answering = False
        if self._backlog:
            asyncio.get_running_loop().call_soon(self._go_on)

    # -- opening ----------------------------------------------------------------------------------

    async def _open(self) -> None:
        try:
            session = await self._find_or_make()
        except Exception as error:
            self._refuse(refusal(error))
            return
        if self._over:
            return
        session.attach(self)
        self.session = session
        self._waiting_bytes = 0
        self._receive_all_early()

    def _receive_all_early(self) -> None:
        while self._early and self.socket.can_write:
            early = self._early.popleft()
            if isinstance(early, Refused):
                self._take(early)
            else:
                self.receive(early)

    async def _find_or_make(self) -> Session:
        manager, hello = self.service.manager, self.hello
        if hello.session_id is not None:
            session = manager.find(hello.session_id)
            if session.attachment is not None:
                raise SessionTaken(f"Session {hello.session_id} already has an attached WebSocket")
            return session
        if hello.resume is not None and hello.resume != "new":
            session = manager.find(hello.resume)
            manager.metrics.sessions_resumed += 1
            return session
        session = await manager.open(
            Door.SOCKET,
            token=self.token,
            wait=hello.queue_timeout,
            moved=self._queued if hello.resume else None,
            lease=hello.lease,
        )
        session.resumable = hello.resume is not None
        if self._over:
            session.close("its client left")
        return session

    def _queued(self, place: int) -> None:
        if self.socket.can_write:
            self.socket.send(messages.write_queued(place))

    def _refuse(self, error: PaddockError) -> None:
        self._early.clear()
        self._over = True
        self.socket.send(messages.write_error(error))
        self.socket.close(CLOSE_CODES.get(error.code, NORMAL), error.code)

    # -- the less frequent frames -----------------------------------------------------------------

    def _receive_early(self, frame: bytes | Refused) -> None:
        """Frames that arrive before the session is there wait for it."""
        if self._over:
            return
        size = len(frame) if isinstance(frame, bytes) else 0
        if len(self._early) >= MOST_EARLY_FRAMES or self._is_too_much(size):
            self.socket.close(POLICY, "too many frames before the session was open")
            return
        self._waiting_bytes += size
        self._early.append(frame)

    def _is_too_much(self, size: int) -> bool:
        """Whether with `size` bytes more would wait than the largest message may have."""
        return self._waiting_bytes + size > self.service.config.limits.message_bytes

    def _take(self, message: Single | Refused, size: int = 0) -> None:
        """While a request is being answered, those behind it wait: answers leave in the order of the requests."""
        if self._answering or self._backlog:
            self._receive_behind(message, size)
        else:
            self._handle(message)

    def _handle(self, message: Single | Refused, waited: float = 0.0) -> None:
        """Carry out one message whose turn it is, after so many seconds."""
        session = self.session
        if session is None:
            return
        if isinstance(message, Refused):
            self.socket.send(messages.write_error(message.error, message.number))
            return
        number = message.id
        if number is not None and not admit(session, message, number, self.socket.send):
            return
        request = request_in(message)
        left = None if message.timeout_s is None else message.timeout_s - waited
        if left is not None and left <= 0:
            late = StepTimeout(f"{message.type} had to wait longer than its deadline for its turn")
            self._reply(session, number, messages.write_error(late, number))
        elif request is not None:
            self._answering = True
            self._submit(session, request, self.answered, number=number, timeout=left)
        elif isinstance(message, McpMessage):
            self._answering = True
            self._calling = self.service.spawn(answer(self.service, SocketCaller(session), message.data, left))
            self._calling.add_done_callback(partial(self._answered_mcp, session, number))
            self._calling_number = number
        elif isinstance(message, CancelMessage):
            if number is not None:
                session.ledger.forget(number)
            session.cancel(message.data)
        else:
            self._close()

    def answered(self, work: Work, answer: Any) -> None:
        """Keep the answer if the request was numbered, and send it to whoever is attached by now."""
        self._reply(work.session, work.number, write_answer(work, answer))
        self.rest()

    def _reply(self, session: Session, number: int | None, frame: bytes) -> None:
        if number is not None:
            session.ledger.record(number, frame)
        session.send(frame)

    def _receive_behind(self, message: Single | Refused, size: int) -> None:
        """Cancel and close act at once; everything else waits for its turn."""
        session = self.session
        if session is None:
            return
        if isinstance(message, CloseMessage):
            self._close()
        elif isinstance(message, CancelMessage):
            self._cancel(session, message.data)
        else:
            if len(self._backlog) >= MOST_BEHIND or self._is_too_much(size):
                self._is_full = True
                self.socket.pause_requests()
            self._waiting_bytes += size
            self._backlog.append(Waiting(message, session.clock(), size))
            # The thread may have answered without seeing this request: then nobody tells the loop but this look.
            session.catch_up()

    def _go_on(self) -> None:
        """Begin what waits for its turn, unless the client leaves its answers unread."""
        while self._backlog and not self._answering and self.session is not None and self.socket.can_write:
            waiting = self._backlog.popleft()
            self._waiting_bytes -= waiting.size
            self._handle(waiting.message, self.session.clock() - waiting.since)
        if self._is_full and len(self._backlog) < MOST_BEHIND and not self._is_too_much(0):
            self._is_full = False
            self.socket.resume_requests()

    def _cancel(self, session: Session, number: int) -> None:
        waiting = next((each for each in self._backlog if getattr(each.message, "id", None) == number), None)
        if waiting is None and self._calling is not None and self._calling_number == number:
            self._calling.cancel()
        if waiting is None:
            session.cancel(number)
            return
        self._backlog.remove(waiting)
        self._waiting_bytes -= waiting.size
        self.socket.send(messages.write_error(StepCancelled("cancelled before it began"), number))

    def _close(self) -> None:
        """The client said `close`: an own session ends at once, an attached one stays."""
        self.lost(clean=True)
        self.socket.close(NORMAL)

    def _answered_mcp(self, session: Session, number: int | None, call: asyncio.Task[dict[str, Any] | None]) -> None:
        """An `mcp` call has ended. One that was cancelled before it began has run nothing else of its own."""
        self._calling = None
        if call.cancelled():
            cancelled = StepCancelled("cancelled: its caller gave it up")
            self._reply(session, number, messages.write_error(cancelled, number))
        elif (response := call.result()) is not None:
            self._reply(session, number, write_mcp(response, number))
        elif number is not None:
            session.ledger.forget(number)
        self.rest()
