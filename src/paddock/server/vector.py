"""Many sessions over one socket (`/ws?vector`): each frame is a JSON array of messages.

Every message names its session. Answers that are ready together leave in one frame; a slow, failing
or refused session delays no other answer.

A client may choose the token of a session that it opens. It begins with the one of the handshake, and so leads back
to this process; a repeated `open` then finds what the first has made, although its answer was lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from paddock.errors import (
    InvalidJSON,
    InvalidMessage,
    PaddockError,
    SessionBusy,
    SessionNotFound,
    SessionTaken,
)
from paddock.protocol import messages
from paddock.protocol.codec import encode
from paddock.protocol.finite import check_finite
from paddock.protocol.messages import CancelMessage, CloseMessage, Message, OpenMessage
from paddock.server.answers import (
    INVALID_TEXT,
    RESTART,
    admit,
    is_utf8,
    refusal,
    request_in,
    write_answer,
)
from paddock.server.rate_limited_log import slow_peer_log
from paddock.sessions.session import Origin, Session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.server.service import Service
    from paddock.server.ws import Socket
    from paddock.sessions.manager import SessionManager
    from paddock.sessions.work import Work


FULL_FRAME, FULL_BYTES = 100, 65536
"""A frame is sent when it has this many answers or this many bytes."""
MAX_EARLY_MESSAGES = 64
MAX_MESSAGES_PER_ITERATION = 256
"""How many messages begin in one iteration of the loop, so that a large batch does not hold up other connections."""


class SubSession:
    """One session's share of a vector connection."""

    __slots__ = ("__weakref__", "conversation", "early", "key", "opening", "request", "session")

    def __init__(self, conversation: VectorConversation, request: OpenMessage, key: str) -> None:
        self.conversation = conversation
        self.request = request
        self.key = key
        self.session: Session | None = None
        self.opening: asyncio.Task[None] | None = None
        self.early: list[Message] = []
        """What came before the session was open."""

    def is_blocked(self, work: Work) -> bool:
        return not self.conversation.socket.can_write and getattr(work.reply, "__self__", None) is self

    def send(self, frame: bytes) -> None:
        self.conversation.queue(frame)

    def on_session_closed(self, error: PaddockError) -> None:
        self.session = None
        self.conversation.sub_sessions.pop(self.key, None)
        self.send(messages.write_error(error, None, self.key))

    def on_replaced(self) -> None:
        self.session = None
        self.conversation.sub_sessions.pop(self.key, None)

    def answer(self, work: Work, answer: Any) -> None:
        """Write and keep an answer; it leaves through whatever connection carries the session now."""
        session, number = work.session, work.number
        frame = write_answer(work, answer, self.key)
        if number is not None:
            session.reply_cache.record(number, frame)
        session.send(frame)


class VectorConversation:
    """One socket and its sub_sessions."""

    def __init__(self, service: Service, socket: Socket) -> None:
        self.service = service
        self.socket = socket
        self.token = service.manager.new_token()
        """No session's, but leads to this process, as do those that begin with it."""
        self.sub_sessions: dict[str, SubSession] = {}
        self.has_opened = False
        """Whether anything was ever asked for."""
        self._checked_first = 0.0
        self._early_messages = 0
        self._early_bytes = 0
        """The size of the frames that brought them."""
        self._frame_bytes = 0
        """The size of the present frame, until it counts among those."""
        self._pending: deque[Message] = deque()
        """What came and is not begun. While there is any, no further frame is read."""
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._is_scheduled = False
        self._flushing = False
        self._is_over = False

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        """There is nothing to begin: every session is asked for by itself."""

    def receive(self, raw: bytes) -> None:
        self._frame_bytes = len(raw)
        try:
            batch = self.service.spec.wire.parse_batch(raw)
        except InvalidJSON as error:
            self._refuse_frame(raw, error)
            return
        except PaddockError:
            self._receive_one_by_one(raw)
            return
        self._take(batch)

    def receive_binary(self) -> None:
        error = InvalidMessage("Invalid message", hint="send a JSON array in a text frame", errors=[])
        self.queue(messages.write_error(error))

    def resume(self) -> None:
        """The client reads its answers again: go on with what waits."""
        self._work_off()
        for sub_session in list(self.sub_sessions.values()):
            if sub_session.session is not None and self.socket.can_write:
                sub_session.session.proceed()

    def is_idle_too_long(self, now: float) -> bool:
        """Whether no session was ever opened for as long as a request may take to arrive."""
        if self.has_opened:
            return False
        self._checked_first = self._checked_first or now
        seconds = now - self._checked_first
        if seconds <= self.service.config.limits.body_timeout:
            return False
        slow_peer_log.warning("a vector opened no session for %.0f s: disconnected", seconds)
        return True

    def on_connection_lost(self, *, clean: bool) -> None:
        self._is_over = True
        self._pending.clear()
        sub_sessions, self.sub_sessions = self.sub_sessions, {}
        for sub_session in sub_sessions.values():
            if sub_session.opening is not None:
                sub_session.opening.cancel()
                sub_session.opening = None
            if sub_session.session is not None and clean:
                sub_session.session.close("its client left")
            elif sub_session.session is not None:
                sub_session.session.detach(sub_session, dropped=True)

    # -- messages ---------------------------------------------------------------------------------

    def _take(self, batch: Iterable[Message]) -> None:
        """Carry out a batch for as long as the client reads its answers; the rest waits until it does."""
        self._pending.extend(batch)
        self._work_off()

    def _work_off(self) -> None:
        """Begin what waits, as much as one iteration of the loop may take."""
        had = bool(self._pending)
        for _ in range(min(len(self._pending), MAX_MESSAGES_PER_ITERATION)):
            if not self._pending or not self.socket.can_write:
                break
            self._receive_message(self._pending.popleft())
        if self._pending:
            self.socket.pause_requests()
            if self.socket.can_write and not self._is_scheduled:
                self._is_scheduled = True
                asyncio.get_running_loop().call_soon(self._work_on)
        elif had:
            self.socket.resume_requests()

    def _work_on(self) -> None:
        self._is_scheduled = False
        self._work_off()

    def _receive_message(self, message: Message) -> None:
        key = message.session
        if key is None:
            error = InvalidMessage("Invalid message", hint="every message of a vector names its session", errors=[])
            self.queue(messages.write_error(error, message.id))
            return
        if isinstance(message, OpenMessage):
            self._open(key, message)
            return
        sub_session = self.sub_sessions.get(key)
        if sub_session is not None and sub_session.opening is not None:
            self._receive_early(sub_session, message)
            return
        session = sub_session.session if sub_session is not None else None
        if sub_session is None or session is None:
            missing = SessionNotFound(f"no session {key!r} is open on this connection", hint="send open first")
            self.queue(messages.write_error(missing, message.id, key))
            return
        number = message.id
        if number is not None and not admit(session, number, message.ack, self.queue, key):
            return
        self.carry_out(sub_session, session, message)

    def carry_out(self, sub_session: SubSession, session: Session, message: Message) -> None:
        """Carry out a message that the reply cache has admitted."""
        request = request_in(message)
        if request is None:
            self._receive_other(sub_session, session, message)
        else:
            self.service.dispatch.submit(
                session, request, sub_session.answer, number=message.id, timeout=message.timeout_s
            )

    def _receive_early(self, sub_session: SubSession, message: Message) -> None:
        """Messages that arrive before their session is there wait for it."""
        size = self._early_bytes + self._frame_bytes
        if len(sub_session.early) >= MAX_EARLY_MESSAGES or size > self.service.config.limits.message_bytes:
            busy = SessionBusy("too much waits for this session to open already", hint="await the answer to open")
            self.queue(messages.write_error(busy, message.id, sub_session.key))
            return
        sub_session.early.append(message)
        self._early_messages += 1
        self._early_bytes, self._frame_bytes = size, 0

    def _early_of(self, sub_session: SubSession) -> list[Message]:
        """What waited for the session, which does so no more."""
        early, sub_session.early = sub_session.early, []
        self._early_messages -= len(early)
        if not self._early_messages:
            self._early_bytes = 0
        return early

    def _receive_other(self, sub_session: SubSession, session: Session, message: Message) -> None:
        if isinstance(message, CloseMessage):
            self.sub_sessions.pop(sub_session.key, None)
            session.attachment = None
            session.close("its client left")
        elif isinstance(message, CancelMessage):
            session.cancel(message.data)
        else:
            error = InvalidMessage("Invalid message", hint="mcp needs a connection of its own", errors=[])
            self.queue(messages.write_error(error, message.id, sub_session.key))

    def _receive_one_by_one(self, raw: bytes) -> None:
        """Something in the batch is wrong: refuse that, carry out the rest."""
        try:
            document = from_json(raw)
        except ValueError as error:
            self.queue(messages.write_error(InvalidJSON(f"Invalid JSON: {error}")))
            return
        for member in document if isinstance(document, list) else [document]:
            try:
                # JSON cannot express it, so writing the member again would hide it.
                check_finite(member.get("data") if isinstance(member, dict) else None)
                (message,) = self.service.spec.wire.parse_batch(encode([member]))
            except PaddockError as error:
                fields = member if isinstance(member, dict) else {}
                number, key = fields.get("id"), fields.get("session")
                self.queue(
                    messages.write_error(
                        error,
                        number if isinstance(number, int) else None,
                        key if isinstance(key, str) else None,
                    )
                )
            else:
                self._take([message])

    def _refuse_frame(self, raw: bytes, error: PaddockError) -> None:
        if is_utf8(raw):
            self.queue(messages.write_error(error))
        else:
            self.socket.close(INVALID_TEXT, "invalid UTF-8")

    # -- opening ----------------------------------------------------------------------------------

    def _open(self, key: str, message: OpenMessage) -> None:
        if key in self.sub_sessions:
            error = InvalidMessage("Invalid message", hint=f"session {key!r} is open already", errors=[])
            self.queue(messages.write_error(error, message.id, key))
            return
        self.has_opened = True
        sub_session = self.sub_sessions[key] = SubSession(self, message, key)
        sub_session.opening = self.service.spawn(self._open_sub_session(sub_session))

    async def _open_sub_session(self, sub_session: SubSession) -> None:
        try:
            session = await self._find_or_open(sub_session)
        except Exception as error:
            self._refuse(sub_session, refusal(error))
            return
        sub_session.opening = None
        if self._is_over:
            session.close("its client left")
            return
        sub_session.session = session
        session.attach(sub_session)
        self.queue(messages.write_opened({"token": session.token, "session_id": session.id}, sub_session.key))
        self._pending.extendleft(reversed(self._early_of(sub_session)))
        self._work_off()

    async def _find_or_open(self, sub_session: SubSession) -> Session:
        manager, request = self.service.manager, sub_session.request
        chosen = request.token if request.token and _leads_here(manager, request.token) else None
        existing = request.resume or (chosen if chosen and manager.knows(chosen) else None)
        if existing is not None:
            session = manager.find(existing)
            manager.metrics.sessions_resumed += 1
            return session
        if chosen is not None:
            opening = self.service.opening
            before = opening.get(chosen)
            if before is not None and before.opening is not None:
                before.conversation.give_up(before)
            opening[chosen] = sub_session
        session = await manager.open(
            Origin.SOCKET, token=chosen, wait=request.queue_timeout, lease=request.lease, owner=self
        )
        session.resumable = True
        return session

    def give_up(self, sub_session: SubSession) -> None:
        """Its client asks for the same session again: who asked first is probably gone."""
        if sub_session.opening is not None:
            sub_session.opening.cancel()
        self._refuse(sub_session, SessionTaken("the session was asked for again elsewhere"))

    def _refuse(self, sub_session: SubSession, error: PaddockError) -> None:
        """There will be no session: tell who asked for it, and who already asked something of it."""
        self.sub_sessions.pop(sub_session.key, None)
        for message in (sub_session.request, *self._early_of(sub_session)):
            if not isinstance(message, CloseMessage | CancelMessage):
                self.queue(messages.write_error(error, message.id, sub_session.key))

    # -- answers ----------------------------------------------------------------------------------

    def queue(self, frame: bytes) -> None:
        """Send with whatever else becomes ready in this iteration of the loop."""
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)
        if len(self._outgoing) >= FULL_FRAME or self._outgoing_bytes >= FULL_BYTES:
            # The client can read these while we go on with the rest.
            self._send_outgoing()
        elif not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _send_outgoing(self) -> None:
        frames, self._outgoing, self._outgoing_bytes = self._outgoing, [], 0
        if frames:
            self.socket.send(b"[" + b",".join(frames) + b"]")

    def _flush(self) -> None:
        self._flushing = False
        self._send_outgoing()
        if self.service.manager.is_draining() and not self.sub_sessions:
            self.socket.close(RESTART, "the server is shutting down")


def _leads_here(manager: SessionManager, token: str) -> bool:
    """Whether who asks for the session of this token is led here."""
    return token.startswith(f"{manager.worker:02x}" if manager.host is None else f"{manager.host}-")
