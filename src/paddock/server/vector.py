"""Many sessions over one socket (`/ws?vector`): each frame is a JSON array of messages.

Every message names its session. Answers that are ready together leave in one frame; a slow, failing
or refused session delays nobody else's answer.

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
    write_step,
)
from paddock.sessions.session import LATER, Door, Session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.server.service import Service
    from paddock.server.ws import Socket
    from paddock.sessions.manager import SessionManager
    from paddock.sessions.work import Work


FULL_FRAME, FULL_BYTES = 100, 65536
"""A frame of answers leaves with so many, or so large."""
MOST_EARLY = 64
MOST_IN_A_TURN = 256
"""How many messages are begun in one turn of the loop, so that a large batch keeps nobody else waiting for long."""


class Lane:
    """One session's share of a vector connection."""

    __slots__ = ("__weakref__", "asked", "conversation", "early", "key", "opening", "session")

    def __init__(self, conversation: VectorConversation, asked: OpenMessage, key: str) -> None:
        self.conversation = conversation
        self.asked = asked
        self.key = key
        self.session: Session | None = None
        self.opening: asyncio.Task[None] | None = None
        self.early: list[Message] = []
        """What came before the session was open."""

    def holds_back(self, work: Work) -> bool:
        return not self.conversation.socket.can_write and getattr(work.reply, "__self__", None) is self

    def send(self, frame: bytes) -> None:
        self.conversation.queue(frame)

    def session_closed(self, error: PaddockError) -> None:
        self.session = None
        self.conversation.lanes.pop(self.key, None)
        self.send(messages.write_error(error, None, self.key))

    def replaced(self) -> None:
        self.session = None
        self.conversation.lanes.pop(self.key, None)

    def answer(self, work: Work, answer: Any) -> None:
        """Write and keep an answer; it leaves through whatever connection carries the session now."""
        session, number = work.session, work.number
        frame = write_answer(work, answer, self.key)
        if number is not None:
            session.ledger.record(number, frame)
        session.send(frame)


class VectorConversation:
    """One socket and its lanes."""

    def __init__(self, service: Service, socket: Socket) -> None:
        self.service = service
        self.socket = socket
        self.token = service.manager.new_token()
        """No session's, but leads to this process, as do those that begin with it."""
        self.lanes: dict[str, Lane] = {}
        self.has_opened = False
        """Whether anything was ever asked for."""
        self._early_messages = 0
        self._early_bytes = 0
        """The size of the frames that brought them."""
        self._frame_bytes = 0
        """The size of the present frame, until it counts among those."""
        self._pending: deque[Message] = deque()
        """What came and is not begun. While there is any, no further frame is read."""
        self._outbox: list[bytes] = []
        self._outbox_bytes = 0
        self._is_scheduled = False
        self._flushing = False
        self._over = False

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        """There is nothing to begin: every session is asked for by itself."""

    def receive(self, raw: bytes) -> None:
        self._frame_bytes = len(raw)
        try:
            batch = self.service.blueprint.wire.parse_batch(raw)
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
        for lane in list(self.lanes.values()):
            if lane.session is not None and self.socket.can_write:
                lane.session.proceed()

    def lost(self, *, clean: bool) -> None:
        self._over = True
        self._pending.clear()
        lanes, self.lanes = self.lanes, {}
        for lane in lanes.values():
            if lane.opening is not None:
                lane.opening.cancel()
                lane.opening = None
            if lane.session is not None and clean:
                lane.session.close("its client left")
            elif lane.session is not None:
                lane.session.detach(lane, dropped=True)

    # -- messages ---------------------------------------------------------------------------------

    def _take(self, batch: Iterable[Message]) -> None:
        """Carry out a batch for as long as the client reads its answers; the rest waits until it does."""
        self._pending.extend(batch)
        self._work_off()

    def _work_off(self) -> None:
        """Begin what waits, as much as one turn of the loop may take."""
        had = bool(self._pending)
        for _ in range(min(len(self._pending), MOST_IN_A_TURN)):
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
        lane = self.lanes.get(key)
        if lane is not None and lane.opening is not None:
            self._receive_early(lane, message)
            return
        session = lane.session if lane is not None else None
        if lane is None or session is None:
            missing = SessionNotFound(f"no session {key!r} is open on this connection", hint="send open first")
            self.queue(messages.write_error(missing, message.id, key))
            return
        number = message.id
        if number is not None and not admit(session, message, number, self.queue, key):
            return
        if message.type == "step" and (answer := session.step_now(message.data)) is not LATER:
            frame = write_step(answer, number, key)
            if number is not None:
                session.ledger.record(number, frame)
            self.queue(frame)
            return
        request = request_in(message)
        if request is None:
            self._receive_other(lane, session, message)
        else:
            self.service.dispatch.submit(session, request, lane.answer, number=number, timeout=message.timeout_s)

    def _receive_early(self, lane: Lane, message: Message) -> None:
        """Messages that arrive before their session is there wait for it."""
        size = self._early_bytes + self._frame_bytes
        if len(lane.early) >= MOST_EARLY or size > self.service.config.limits.message_bytes:
            busy = SessionBusy("too much waits for this session to open already", hint="await the answer to open")
            self.queue(messages.write_error(busy, message.id, lane.key))
            return
        lane.early.append(message)
        self._early_messages += 1
        self._early_bytes, self._frame_bytes = size, 0

    def _early_of(self, lane: Lane) -> list[Message]:
        """What waited for the session, which does so no more."""
        early, lane.early = lane.early, []
        self._early_messages -= len(early)
        if not self._early_messages:
            self._early_bytes = 0
        return early

    def _receive_other(self, lane: Lane, session: Session, message: Message) -> None:
        if isinstance(message, CloseMessage):
            self.lanes.pop(lane.key, None)
            session.attachment = None
            session.close("its client left")
        elif isinstance(message, CancelMessage):
            session.cancel(message.data)
        else:
            error = InvalidMessage("Invalid message", hint="mcp needs a connection of its own", errors=[])
            self.queue(messages.write_error(error, message.id, lane.key))

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
                (message,) = self.service.blueprint.wire.parse_batch(encode([member]))
            except PaddockError as error:
                known = member if isinstance(member, dict) else {}
                number, key = known.get("id"), known.get("session")
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
        if key in self.lanes:
            error = InvalidMessage("Invalid message", hint=f"session {key!r} is open already", errors=[])
            self.queue(messages.write_error(error, message.id, key))
            return
        self.has_opened = True
        lane = self.lanes[key] = Lane(self, message, key)
        lane.opening = self.service.spawn(self._begin_lane(lane))

    async def _begin_lane(self, lane: Lane) -> None:
        try:
            session = await self._find_or_make(lane)
        except Exception as error:
            self._refuse(lane, refusal(error))
            return
        lane.opening = None
        if self._over:
            session.close("its client left")
            return
        lane.session = session
        session.attach(lane)
        self.queue(messages.write_opened({"token": session.token, "session_id": session.id}, lane.key))
        self._pending.extendleft(reversed(self._early_of(lane)))
        self._work_off()

    async def _find_or_make(self, lane: Lane) -> Session:
        manager, asked = self.service.manager, lane.asked
        chosen = asked.token if asked.token and _keeps(manager, asked.token) else None
        known = asked.resume or (chosen if chosen and manager.knows(chosen) else None)
        if known is not None:
            session = manager.find(known)
            manager.metrics.sessions_resumed += 1
            return session
        if chosen is not None:
            opening = self.service.opening
            before = opening.get(chosen)
            if before is not None and before.opening is not None:
                before.conversation.give_up(before)
            opening[chosen] = lane
        session = await manager.open(
            Door.SOCKET, token=chosen, wait=asked.queue_timeout, lease=asked.lease, owner=self
        )
        session.resumable = True
        return session

    def give_up(self, lane: Lane) -> None:
        """Its client asks for the same session again: who asked first is probably gone."""
        if lane.opening is not None:
            lane.opening.cancel()
        self._refuse(lane, SessionTaken("the session was asked for again elsewhere"))

    def _refuse(self, lane: Lane, error: PaddockError) -> None:
        """There will be no session: tell who asked for it, and who already asked something of it."""
        self.lanes.pop(lane.key, None)
        for message in (lane.asked, *self._early_of(lane)):
            if not isinstance(message, CloseMessage | CancelMessage):
                self.queue(messages.write_error(error, message.id, lane.key))

    # -- answers ----------------------------------------------------------------------------------

    def queue(self, frame: bytes) -> None:
        """Send with whatever else becomes ready in this turn of the loop."""
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        if len(self._outbox) >= FULL_FRAME or self._outbox_bytes >= FULL_BYTES:
            # The client can read these while we go on with the rest.
            self._send_outbox()
        elif not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _send_outbox(self) -> None:
        frames, self._outbox, self._outbox_bytes = self._outbox, [], 0
        if frames:
            self.socket.send(b"[" + b",".join(frames) + b"]")

    def _flush(self) -> None:
        self._flushing = False
        self._send_outbox()
        if self.service.manager.is_draining() and not self.lanes:
            self.socket.close(RESTART, "the server is shutting down")


def _keeps(manager: SessionManager, token: str) -> bool:
    """Whether who asks for the session of this token is led here."""
    return token.startswith(f"{manager.worker:02x}" if manager.host is None else f"{manager.host}-")
