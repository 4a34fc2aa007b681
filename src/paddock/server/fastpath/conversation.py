"""Conversations that carry out ordinary steps without a `Work` object and without dispatch.

The rules are the same as in `dispatch.submit` and `Session.submit`: a request is executed at most once, one at a
time, in its order, within its deadline. A step that is not ordinary, or whose session is busy, takes the plain
path.

Measured gain of steps carried out here: a fifth with 16 and 128 sessions that step inline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.protocol.episode import Step
from paddock.server.answers import admit, write_step
from paddock.server.fastpath.off_loop import OffLoopStep, start
from paddock.server.mcp_ws import McpConversation
from paddock.server.vector import SubSession, VectorConversation
from paddock.server.ws import Conversation, Socket
from paddock.sessions.spec import SLOW_CALL_SECONDS, Where
from paddock.sessions.work import is_done

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.protocol.messages import Message
    from paddock.server.fastpath import FastPath
    from paddock.server.fastpath.quick_step import QuickStep
    from paddock.server.handshake import ClientHandshake
    from paddock.sessions.session import Session

BUSY = object()


def make_fast_conversation(
    fastpath: FastPath, socket: Socket, handshake: ClientHandshake
) -> FastConversation | McpConversation | FastVectorConversation:
    """The kind of conversation that belongs to a path."""
    if handshake.path.endswith("/mcp"):
        return McpConversation(fastpath.service, socket, handshake.queue_timeout)
    if handshake.vector:
        return FastVectorConversation(fastpath.service, socket)
    return FastConversation(fastpath, socket, handshake)


class FastConversation(Conversation):
    """A `/ws` connection. It is also the `OffLoopPeer` of the steps that threads answer."""

    __slots__ = ("_limit_timeout", "_method", "_read_step", "send_past_loop")

    def __init__(self, fastpath: FastPath, socket: Socket, handshake: ClientHandshake) -> None:
        service = fastpath.service
        super().__init__(service, socket, handshake)
        self._method = service.spec.step
        self._limit_timeout = service.dispatch.limit_timeout
        self._read_step = fastpath.step_reader.read
        self.send_past_loop: Callable[[bytes], bool] | None = None
        """Set where threads may write to the socket."""

    def receive(self, raw: bytes) -> None:
        session = self.session
        if session is not None:
            if self._is_answering:
                session.catch_up()
            if not self._is_answering and not self._backlog and (step := self._read_step(raw)) is not None:
                self._step(session, step)
                return
        super().receive(raw)

    def _step(self, session: Session, step: QuickStep) -> None:
        action, number, ack, timeout = step
        if number is not None and not admit(session, number, ack, self.send):
            return
        answer = step_inline(session, action)
        if answer is not BUSY:
            frame = write_step(answer, number)
            if number is not None:
                session.reply_cache.record(number, frame)
            self.send(frame)
            return
        self._is_answering = True
        is_idle = session.current is None and not session.waiting and not session.closed
        if is_idle and self.send_past_loop is not None and self._method.where is Where.THREAD:
            start(session, OffLoopStep(session, action, self, self._method, number, self._limit_timeout(timeout)))
        else:
            self._submit(session, Step(action), self.send_answer, number=number, timeout=timeout)

    # -- OffLoopPeer ------------------------------------------------------------------------------

    def write_off_loop(self, step: OffLoopStep) -> bytes:
        return write_step(step.value, step.number)

    def send_off_loop(self, frame: bytes) -> bool:
        return self.send_past_loop is not None and self.send_past_loop(frame)

    def is_waiting_off_loop(self) -> bool:
        return bool(self._backlog)

    def record_off_loop(self, step: OffLoopStep) -> None:
        session, frame, number = step.session, step.frame, step.number
        assert frame is not None
        if number is not None:
            session.reply_cache.record(number, frame)
        # A client that returned meanwhile waits for the answer on its new connection.
        if not step.is_sent or (number is not None and session.attachment is not self):
            session.send(frame)
        self.end_turn()


class FastVectorConversation(VectorConversation):
    """A `/ws?vector` connection."""

    def carry_out(self, sub_session: SubSession, session: Session, message: Message) -> None:
        if message.type != "step" or (answer := step_inline(session, message.data)) is BUSY:
            super().carry_out(sub_session, session, message)
            return
        frame = write_step(answer, message.id, sub_session.key)
        if message.id is not None:
            session.reply_cache.record(message.id, frame)
        self.queue(frame)


def step_inline(session: Session, action: Any) -> Any:
    """The answer to a step that runs inline, or BUSY if it has to take the plain path.

    Does in one function what the plain path does in a dozen: at many sessions most of the time goes here.
    """
    manager = session.manager
    method = manager.spec.step
    if method.where is not Where.INLINE or session.current is not None or session.waiting or session.closed:
        return BUSY
    started = session.clock()
    answer: Any
    try:
        answer = session.environment.step(action)
        session.episode.record_step(is_done(answer))
    except BaseException as error:
        # An environment may raise SystemExit or CancelledError. Neither must end the loop.
        answer = session.explain("step", error)
        manager.metrics.errors[answer.code] += 1
    session.last_active = now = session.clock()
    seconds = now - started
    timings = manager.metrics.calls["step"]
    timings.observe(seconds)
    if seconds > SLOW_CALL_SECONDS:
        method.record_slow_call(seconds, timings.count, now)
    return answer
