"""Many sessions over one socket (`/ws?vector`): each frame is a JSON array of messages.

Every message names its session. Answers that are ready together leave in one frame; a slow, failing
or refused session delays nobody else's answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from paddock.errors import InvalidJSON, InvalidMessage, PaddockError, SessionNotFound
from paddock.protocol import messages
from paddock.protocol.codec import encode
from paddock.protocol.messages import CancelMessage, CloseMessage, Message, OpenMessage
from paddock.server.ws import (
    INVALID_TEXT,
    RESTART,
    Socket,
    is_new,
    is_utf8,
    refusal,
    request_in,
    write_answer,
    write_step,
)
from paddock.sessions.session import LATER, Door, Session

if TYPE_CHECKING:
    from paddock.server.service import Service
    from paddock.sessions.work import Work


FULL_FRAME = 100
MOST_EARLY = 64


class Lane:
    """One session's share of a vector connection."""

    __slots__ = ("conversation", "early", "key", "opening", "session")

    def __init__(self, conversation: VectorConversation, key: str) -> None:
        self.conversation = conversation
        self.key = key
        self.session: Session | None = None
        self.opening: asyncio.Task[None] | None = None
        self.early: list[Message] = []

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

    token = None

    def __init__(self, service: Service, socket: Socket) -> None:
        self.service = service
        self.socket = socket
        self.lanes: dict[str, Lane] = {}
        self._outbox: list[bytes] = []
        self._flushing = False
        self._over = False

    # -- what the transport calls -----------------------------------------------------------------

    def begin(self) -> None:
        self.service.manager  # noqa: B018 - starts the service where ASGI runs no lifespan

    def receive(self, raw: bytes) -> None:
        try:
            batch = self.service.blueprint.wire.parse_batch(raw)
        except InvalidJSON as error:
            self._refuse_frame(raw, error)
            return
        except PaddockError:
            self._receive_one_by_one(raw)
            return
        for message in batch:
            self._receive_message(message)

    def receive_binary(self) -> None:
        error = InvalidMessage("Invalid message", hint="send a JSON array in a text frame", errors=[])
        self.queue(messages.write_error(error))

    def lost(self, *, clean: bool) -> None:
        self._over = True
        lanes, self.lanes = self.lanes, {}
        for lane in lanes.values():
            if lane.opening is not None:
                lane.opening.cancel()
            if lane.session is not None and clean:
                lane.session.close("its client left")
            elif lane.session is not None:
                lane.session.detach(lane, dropped=True)

    # -- messages ---------------------------------------------------------------------------------

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
        if lane is not None and lane.opening is not None and len(lane.early) < MOST_EARLY:
            lane.early.append(message)
            return
        session = lane.session if lane is not None else None
        if lane is None or session is None:
            missing = SessionNotFound(f"no session {key!r} is open on this connection", hint="send open first")
            self.queue(messages.write_error(missing, message.id, key))
            return
        number = message.id
        if number is not None and not is_new(session, number, self.queue, key):
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
                self._receive_message(message)

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
        lane = self.lanes[key] = Lane(self, key)
        lane.opening = self.service.spawn(self._find_or_make(lane, message))

    async def _find_or_make(self, lane: Lane, message: OpenMessage) -> None:
        manager = self.service.manager
        try:
            if message.resume is not None:
                session = manager.find(message.resume)
                manager.metrics.sessions_resumed += 1
            else:
                session = await manager.open(Door.SOCKET, wait=message.queue_timeout, lease=message.lease)
                session.resumable = True
        except Exception as error:
            self.lanes.pop(lane.key, None)
            self.queue(messages.write_error(refusal(error), message.id, lane.key))
            return
        lane.opening = None
        if self._over:
            session.close("its client left")
            return
        lane.session = session
        session.attach(lane)
        self.queue(messages.write_opened({"token": session.token, "session_id": session.id}, lane.key))
        early, lane.early = lane.early, []
        for waiting in early:
            self._receive_message(waiting)

    # -- answers ----------------------------------------------------------------------------------

    def queue(self, frame: bytes) -> None:
        """Send with whatever else becomes ready in this turn of the loop."""
        self._outbox.append(frame)
        if len(self._outbox) >= FULL_FRAME:
            # The client can read these while we go on with the rest.
            self._send_outbox()
        elif not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _send_outbox(self) -> None:
        frames, self._outbox = self._outbox, []
        if frames:
            self.socket.send(b"[" + b",".join(frames) + b"]")

    def _flush(self) -> None:
        self._flushing = False
        self._send_outbox()
        if self.service.manager.is_draining() and not self.lanes:
            self.socket.close(RESTART, "the server is shutting down")
