"""Who reads a connection: its transport, the inbox, a thread, or nobody for now. One at a time."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paddock.server.inbox import Inbox, Listener


class By(Enum):
    TRANSPORT = auto()
    """And so its protocol, which can read anything. Where a connection begins, and where it ends."""
    INBOX = auto()
    THREAD = auto()
    NOBODY = auto()
    """Its client does not read the answers, or it is gone."""


class Reading:
    def __init__(self, transport: Any, inbox: Inbox | None, listener: Listener) -> None:
        self.by = By.TRANSPORT
        self._transport = transport
        self._inbox = inbox
        self._listener = listener
        self._descriptor: int = transport.get_extra_info("socket").fileno()
        self._is_full = False

    def enter_inbox(self) -> None:
        """The protocol has read all that came."""
        if self._inbox is not None and self._inbox.is_open and self.by is By.TRANSPORT:
            self._pass_to(By.INBOX)

    def lend(self) -> None:
        """To a thread, until `take_back`."""
        self._pass_to(By.THREAD)

    def take_back(self, unread: bytes) -> None:
        """The protocol goes on with `unread`, and what follows."""
        if self._transport.is_closing():
            self.end()
            return
        # The transport begins with the next turn of the loop, so what is unread comes first.
        self._pass_to(By.NOBODY if self._is_full else By.TRANSPORT)
        if unread:
            self._transport.get_protocol().data_received(unread)

    def pause(self) -> None:
        """Take no more requests: the client leaves its answers unread."""
        self._is_full = True
        if self.by is not By.THREAD:
            self._pass_to(By.NOBODY)

    def resume(self) -> None:
        self._is_full = False
        if self.by is By.NOBODY:
            self._pass_to(By.TRANSPORT)

    def end(self) -> None:
        """The connection is gone, or only has to write what is left."""
        if self.by is By.INBOX and self._inbox is not None:
            self._inbox.leave(self._descriptor)
        self.by = By.NOBODY

    def _pass_to(self, by: By) -> None:
        if self.by is By.INBOX and self._inbox is not None:
            self._inbox.leave(self._descriptor)
        elif self.by is By.TRANSPORT:
            self._transport.pause_reading()
        self.by = by
        if by is By.INBOX and self._inbox is not None:
            self._inbox.enter(self._descriptor, self._listener)
        elif by is By.TRANSPORT:
            self._transport.resume_reading()
