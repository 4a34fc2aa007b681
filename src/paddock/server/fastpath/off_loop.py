"""Steps on threads whose answers are written by the thread, past the event loop.

A thread that has run a step writes the frame into the socket itself, as long as the loop has nothing left to write
there. So the loop does not have to be woken for every answer: it records the step when the next request comes, or
at its next tick. The writes of the loop and of threads exclude each other by a lock, so frames never mix.

Measured gain for steps on threads: a sixth with one session, an eighth with 16, a tenth with 128 and 512.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Protocol

from paddock.protocol.episode import Step
from paddock.server.fastpath.batch_writer import MAX_MEDIUM_FRAME_BYTES, frame_with
from paddock.server.fastpath.threads import LATE_SECONDS, SelfAnsweringJob
from paddock.sessions.work import Attachment, Work, is_done

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.session import Session
    from paddock.sessions.spec import Method

_STEP = Step(None)
"""The request of all such steps: the action does not pass through dispatch."""


class OffLoopPeer(Attachment, Protocol):
    """A connection that lets a thread answer past the loop."""

    def write_off_loop(self, step: OffLoopStep) -> bytes:
        """On the thread: the frame that answers a step that has just run."""

    def send_off_loop(self, frame: bytes) -> bool:
        """On any thread. False if only the loop can send this frame."""

    def is_waiting_off_loop(self) -> bool:
        """On the thread: whether the client has sent more, so that the loop must be woken at once."""

    def record_off_loop(self, step: OffLoopStep) -> None:
        """On the loop, some time after a thread has answered."""

    def send_answer(self, work: Work, answer: Any) -> None:
        """On the loop: answer a step that no thread has answered."""


class OffLoopStep(Work, SelfAnsweringJob):
    """A step on a thread that answers it. Whoever claims it first answers: the thread, or the loop at a deadline."""

    __slots__ = (
        "action", "deadline", "done", "ended", "error", "expired", "frame", "is_answered", "is_sent", "method",
        "number", "overdue", "peer", "reply", "session", "settled", "started", "value",
    )  # fmt: skip

    request = _STEP
    _claiming = threading.Lock()

    def __init__(
        self,
        session: Session,
        action: Any,
        peer: OffLoopPeer,
        method: Method,
        number: int | None,
        timeout: float | None,
    ) -> None:
        self.session = session
        self.action = action
        self.peer = peer
        self.reply = peer.send_answer
        self.method = method
        self.number = number
        self.started = started = session.clock()
        self.deadline = None if timeout is None else started + timeout
        self.settled = self.expired = self.overdue = self.is_answered = self.is_sent = self.done = False
        self.value = self.error = None
        self.frame: bytes | None = None
        self.ended = 0.0

    def run(self) -> None:
        session = self.session
        began = session.clock()
        try:
            self.value = value = session.environment.step(self.action)
            self.ended = session.clock()
            # The loop is woken for a slow step anyway, and answers several of them together.
            if self.ended - began < LATE_SECONDS and session.attachment is self.peer:
                self.done = is_done(value)
                self.frame = self.peer.write_off_loop(self)
        except BaseException as error:
            # The loop explains it. SystemExit must not end the thread.
            self.error = error

    def send(self) -> None:
        if self.frame is not None and self.claim():
            self.is_answered = True
            self.is_sent = self.peer.send_off_loop(self.frame)

    def claim(self) -> bool:
        with self._claiming:
            first, self.settled = not self.settled, True
        return first

    def is_awaited(self) -> bool:
        if not self.is_sent:
            return True
        session = self.session
        return session.closed or bool(session.waiting) or self.peer.is_waiting_off_loop()

    def after(self, session: Session, _: Work, observation: Any) -> Any:
        session.episode.record_step(is_done(observation))
        return observation

    def finish(self) -> None:
        """On the loop: record what the thread has answered, or answer."""
        session = self.session
        if not self.is_answered:
            session.conclude(self)
            return
        session.manager.running.discard(self)
        if self.overdue:
            session.manager.metrics.hung_calls -= 1
        session.current = None
        session.last_active = self.ended
        session.manager.metrics.calls["step"].observe(self.ended - self.started)
        session.episode.record_step(self.done)
        self.peer.record_off_loop(self)
        if session.waiting or session.closed:
            session.begin_next()


def start(session: Session, step: OffLoopStep) -> None:
    """Give the step to a thread. The session must be idle."""
    session.current = step
    session.manager.running.add(step)
    session.threads.submit(step)


class OffLoopWriter:
    """One connection's socket, for any thread to write to."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.lock = threading.Lock()
        """Held by whoever writes to the connection."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._descriptor: int | None = transport.get_extra_info("socket").fileno()
        self._unsent = b""

    def send(self, message: bytes) -> bool:
        """Write a text frame now; False if the loop has to, which can wait for room."""
        if len(message) > MAX_MEDIUM_FRAME_BYTES:
            return False
        data = frame_with(message)
        with self.lock:
            if self._descriptor is None or self._unsent or self._transport.get_write_buffer_size():
                return False
            size = send_nowait(self._descriptor, data)
            if size <= 0:
                return False
            if size < len(data):
                # The kernel's buffer is full. The loop writes the rest before anything else.
                self._unsent = data[size:]
                self._loop.call_soon_threadsafe(self.write)
        return True

    def write(self, write: Callable[..., object] | None = None, *arguments: Any) -> None:
        """On the loop: `write(*arguments)`, after the rest of what a thread has written in part."""
        with self.lock:
            if self._unsent and self._descriptor is not None:
                self._transport.write(self._unsent)
            self._unsent = b""
            if write is not None:
                write(*arguments)

    def close(self) -> None:
        """On the loop, before the socket is closed: its descriptor may soon be another connection's."""
        with self.lock:
            self._descriptor = None


def can_write_past(transport: asyncio.Transport) -> bool:
    """Whether the bytes written to this transport are those on its socket: not with TLS."""
    return sys.platform == "linux" and transport.get_extra_info("sslcontext") is None


def send_nowait(descriptor: int, data: bytes) -> int:
    """How many bytes the socket took; not more than 0 if none.

    The methods of `socket` release the GIL around the call. With other threads running, taking it back costs more
    than the call itself. `PyDLL` keeps it.
    """
    return _send(descriptor, data, len(data), _SEND_FLAGS)  # type: ignore[no-any-return]


if sys.platform == "linux":
    # Without declared argument types: ctypes converts bytes and small integers twice as fast then.
    _send = ctypes.PyDLL(None).send
    _SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
