"""Numbered requests, executed at most once, and their answers kept until the client has them.

A client that lost its connection sends every unanswered request again under the same number. The reply cache says
what to do with it: execute it, wait for the one already running, or repeat the kept answer. A number below the
highest one seen was answered, given up or overtaken: it is refused, never executed, also after a later reset.

The rule that makes no answer get lost is a sliding window that both sides know:

- `ack` in a request says that the client needs no answer up to and including that number.
- A client has no number in flight that is more than `WINDOW` above its `ack`.
- The server keeps every answer above `ack`. It refuses a number unexecuted that is beyond the window, or for which
  there is no room: the answers above `ack` have `WINDOW_BYTES` already.

So the cache holds exactly those answers that a client may still ask for: at most `WINDOW` of them, and at most
`WINDOW_BYTES` beside the one that was last added. For a client that sends no `ack` it holds the last `WINDOW`
answers, as far as they fit into `KEPT_BYTES`.
"""

from __future__ import annotations

from enum import Enum

from paddock.errors import InvalidMessage, ReplyExpired, SessionBusy

WINDOW = 64
WINDOW_BYTES = 64 * 1024 * 1024
KEPT_BYTES = 4 * 1024 * 1024


class Verdict(Enum):
    """What to do with a numbered request."""

    EXECUTE = "execute"
    UNDER_WAY = "under way"


class ReplyCache:
    """The answers of one session that its client may not have received."""

    __slots__ = ("_acknowledged", "_bytes", "_highest", "_replies", "_under_way")

    def __init__(self) -> None:
        self._replies: dict[int, bytes] = {}
        self._under_way: set[int] = set()
        self._bytes = 0
        self._highest = -1
        self._acknowledged: int | None = None
        """The highest number whose answer the client has; None as long as it has never sent an `ack`."""

    def admit(self, number: int, ack: int | None = None) -> Verdict | bytes:
        """What to do with request `number`; bytes are the answer it already got.

        Raises ReplyExpired for a number that was overtaken by a later one and whose answer is not kept,
        InvalidMessage for one beyond the window, SessionBusy for one whose answer there is no room for.
        """
        if ack is not None:
            self._acknowledge(min(ack, number - 1))
        reply = self._replies.get(number)
        if reply is not None:
            return reply
        if number in self._under_way:
            return Verdict.UNDER_WAY
        if number <= self._highest:
            raise ReplyExpired(
                f"request {number} comes after request {self._highest} and is not executed: it is late, or its "
                "answer is no longer kept",
                hint="number requests upwards, and repeat one only while it is unanswered",
            )
        if self._acknowledged is not None and number > self._acknowledged + WINDOW:
            reason = f"it is more than {WINDOW} above `ack`, which is {self._acknowledged}"
            raise InvalidMessage(
                "Invalid message",
                errors=[{"type": "window", "loc": ["id"], "msg": reason}],
                hint=f"await answers: at most {WINDOW} numbered requests may be in flight",
            )
        self.check_room()
        self._highest = number
        self._under_way.add(number)
        return Verdict.EXECUTE

    def check_room(self) -> None:
        """Raises SessionBusy while too many bytes of answers are not acknowledged for another request to begin."""
        if self._acknowledged is not None and self._bytes >= WINDOW_BYTES:
            raise SessionBusy(
                f"not executed: {self._bytes} bytes of answers are not acknowledged",
                hint=f"send `ack`; at most {WINDOW_BYTES} bytes are kept",
            )

    def retract(self, number: int) -> None:
        """`number` was not begun, nor was any above it: its client sends all of them again."""
        self._under_way.discard(number)
        self._highest = min(self._highest, number - 1)

    def forget(self, number: int) -> None:
        """`number` needs no answer."""
        self._under_way.discard(number)

    def record(self, number: int, reply: bytes) -> None:
        """Keep the answer to `number`, unless it is acknowledged already."""
        self._under_way.discard(number)
        if self._acknowledged is not None and number <= self._acknowledged:
            return
        self._replies[number] = reply
        self._bytes += len(reply)
        if self._acknowledged is not None:
            return
        while len(self._replies) > WINDOW or (self._bytes > KEPT_BYTES and len(self._replies) > 1):
            self._drop(next(iter(self._replies)))

    def _acknowledge(self, ack: int) -> None:
        if self._acknowledged is None or ack > self._acknowledged:
            self._acknowledged = ack
            for number in [recorded for recorded in self._replies if recorded <= ack]:
                self._drop(number)

    def _drop(self, number: int) -> None:
        self._bytes -= len(self._replies.pop(number))
