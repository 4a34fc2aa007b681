"""Numbered requests, executed at most once.

A client that lost its socket sends every unanswered request again under the same number. The ledger
tells what to do with it: carry it out, wait for the one already running, or repeat the kept answer.
"""

from __future__ import annotations

from enum import Enum

from paddock.errors import ReplyExpired

KEPT_REPLIES = 64
KEPT_BYTES = 4 * 1024 * 1024


class Verdict(Enum):
    EXECUTE = "execute"
    UNDER_WAY = "under way"


class ReplyLedger:
    """The last answers of one session, bounded in count and bytes. The newest is always kept."""

    __slots__ = ("_bytes", "_highest", "_replies", "_under_way")

    def __init__(self) -> None:
        self._replies: dict[int, bytes] = {}
        self._under_way: set[int] = set()
        self._bytes = 0
        self._highest = -1

    def admit(self, number: int) -> Verdict | bytes:
        """What to do with request `number`; bytes are the answer it already got.

        Raises ReplyExpired when it was answered so long ago that the answer is gone.
        """
        kept = self._replies.get(number)
        if kept is not None:
            return kept
        if number in self._under_way:
            return Verdict.UNDER_WAY
        if number <= self._highest:
            raise ReplyExpired(
                f"request {number} was already carried out and its answer is no longer kept",
                hint="number requests upwards, and repeat one only while it is unanswered",
            )
        self._highest = number
        self._under_way.add(number)
        return Verdict.EXECUTE

    def forget(self, number: int) -> None:
        """`number` needs no answer."""
        self._under_way.discard(number)

    def record(self, number: int, reply: bytes) -> None:
        """Keep the answer to `number`, and let go of the oldest ones over the bounds."""
        self._under_way.discard(number)
        self._replies[number] = reply
        self._bytes += len(reply)
        while len(self._replies) > KEPT_REPLIES or (self._bytes > KEPT_BYTES and len(self._replies) > 1):
            self._bytes -= len(self._replies.pop(next(iter(self._replies))))
