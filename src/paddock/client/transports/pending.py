"""The requests of one session that have no reply yet: their numbers, their deadlines, and who waits for them.

Paddock's requests are numbered, and at most the window of `protocol/resume.py` is in flight. A foreign server knows
no numbers: it replies in the order of the requests. Knows nothing about connections: `send` writes a frame if there
is one, and `resend` repeats what is in flight on the next one.
"""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING, Any

from paddock.errors import MessageTooBig, PaddockError
from paddock.protocol.codec import encode
from paddock.protocol.resume import WINDOW

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

Reply = dict[str, Any] | PaddockError | None
"""What the server sent, or why there is no reply. None if the deadline passed first."""


class PendingRequest:
    """A request without its reply yet."""

    __slots__ = ("deadline", "frame", "is_reset", "number", "reply")

    def __init__(self, frame: bytes, reply: asyncio.Future[Reply], deadline: float, is_reset: bool) -> None:
        self.frame = frame
        """JSON. Until it gets its number it ends before that, without the closing brace."""
        self.reply = reply
        self.deadline = deadline
        self.is_reset = is_reset
        self.number: int | None = None


class PendingRequests:
    """All requests of one session without a reply, in the order in which they were made."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.is_foreign = False
        """Whether the server is not Paddock's: then requests have no numbers."""
        self._send = send
        self._last_number = 0
        self._numbered: dict[int, PendingRequest] = {}
        """In flight, by number, in rising order."""
        self._unsent: deque[PendingRequest] = deque()
        """Waiting for the window. They get their numbers when they are sent."""
        self._unnumbered: deque[PendingRequest] = deque()
        """In flight to a foreign server."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        """When the timer for deadlines runs: one for all requests, because most of them are answered before."""

    def add(
        self, frame: bytes, timeout: float | None, loop: asyncio.AbstractEventLoop, *, is_reset: bool
    ) -> PendingRequest:
        """Send a request, now or when the window allows."""
        deadline = inf
        if timeout is not None and timeout < inf:
            deadline = loop.time() + timeout
            if deadline < self._timer_at:
                self._set_timer(loop, deadline)
        if self.is_foreign:
            pending = PendingRequest(frame, loop.create_future(), deadline, is_reset)
            self._unnumbered.append(pending)
            self._send(frame)
        else:
            unnumbered_frame = frame[:-1] + _timeout_member(timeout)
            pending = PendingRequest(unnumbered_frame, loop.create_future(), deadline, is_reset)
            self._unsent.append(pending)
            self._fill_window()
        return pending

    def accept_reply(self, reply: dict[str, Any]) -> bool:
        """Give a reply to its request. False if it replies to no request: then it is about the session."""
        number = reply.get("id")
        if number is not None:
            pending = self._numbered.pop(number, None)
            if self._unsent:
                self._fill_window()
        elif self.is_foreign and self._unnumbered:
            pending = self._unnumbered.popleft()
        else:
            return False
        if pending is not None and not pending.reply.done():
            pending.reply.set_result(reply)
        return True

    def cancel(self, pending: PendingRequest) -> None:
        """Nobody waits for it any more. Paddock cancels it; a foreign server's reply is dropped when it comes."""
        pending.reply.cancel()
        if pending in self._unsent:
            self._unsent.remove(pending)
        number = pending.number
        if number is None or self._numbered.pop(number, None) is None:
            return
        self._send(encode({"type": "cancel", "data": number}))
        self._fill_window()

    def resend(self) -> None:
        """Repeat the numbered requests in flight, on a new connection."""
        for pending in self._numbered.values():
            self._send(pending.frame)

    def fail_all(self, error: PaddockError) -> None:
        pending_requests = self._all()
        self._numbered.clear()
        self._unsent.clear()
        self._unnumbered.clear()
        for pending in pending_requests:
            if not pending.reply.done():
                pending.reply.set_result(error)

    def fail_largest(self) -> None:
        """The server hung up because of the size of a request: repeating it would have the same end."""
        if not self._numbered:
            return
        number = max(self._numbered, key=lambda number: len(self._numbered[number].frame))
        pending = self._numbered.pop(number)
        if not pending.reply.done():
            size = len(pending.frame)
            pending.reply.set_result(
                MessageTooBig(f"the server refuses a message of {size} bytes", hint="see its --max-message-mb")
            )

    @property
    def has_unnumbered(self) -> bool:
        """Whether a foreign server may have executed a request whose reply is missing."""
        return bool(self._unnumbered)

    def only_reset_is_waiting(self) -> bool:
        """Whether nothing is lost with the session: the only request without a reply begins a new episode anyway."""
        waiting = [pending for pending in (*self._numbered.values(), *self._unsent) if not pending.reply.done()]
        return len(waiting) == 1 and waiting[0].is_reset

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._timer_at = None, inf

    # -- helpers ----------------------------------------------------------------------------------

    def _all(self) -> list[PendingRequest]:
        return [*self._numbered.values(), *self._unsent, *self._unnumbered]

    def _fill_window(self) -> None:
        """Number and send the unsent requests, as far as the window allows."""
        while self._unsent:
            number = self._last_number + 1
            lowest = next(iter(self._numbered), number)
            if number - lowest >= WINDOW:
                return
            self._last_number = number
            pending = self._numbered[number] = self._unsent.popleft()
            pending.number = number
            pending.frame = frame = b'%b,"id":%d,"ack":%d}' % (pending.frame, number, lowest - 1)
            self._send(frame)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        self.stop_timer()
        if at < inf:
            self._timer, self._timer_at = loop.call_at(at, self._check_deadlines, loop), at

    def _check_deadlines(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up the requests whose deadline has passed, and wait for the next one."""
        now = loop.time()
        for pending in self._all():
            if pending.deadline <= now and not pending.reply.done():
                pending.reply.set_result(None)
                self.cancel(pending)
        deadlines = (pending.deadline for pending in self._all() if not pending.reply.done())
        self._set_timer(loop, min(deadlines, default=inf))


def _timeout_member(timeout: float | None) -> bytes:
    """The member of a request that tells Paddock the deadline; empty without one."""
    return b"" if timeout is None or timeout == inf else b',"timeout_s":%b' % repr(float(timeout)).encode()
