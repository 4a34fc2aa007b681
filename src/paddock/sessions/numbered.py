"""Numbered HTTP requests of one session, each executed at most once.

A client over HTTP has one request in flight, and numbers its requests upwards (`Request-Number`). So only the newest
number matters, and three rules cover every repeat, delay and duplicate:

- The newest number again gets the same answer, and waits for it if the request still runs.
- A newer number means that nobody waits for the older one any more: what still runs of it is cancelled.
- An older number is refused and never executed. It may arrive late, also after the reset that followed it.

A request goes on when its connection drops, because its client is about to repeat it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paddock.errors import InvalidMessage, ReplyExpired, StepCancelled

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER = "request-number"
MOST_DIGITS = 15


class NewestRequest:
    """The newest numbered request of a session, and its answer once there is one."""

    __slots__ = ("_number", "_task")

    def __init__(self) -> None:
        self._number = -1
        self._task: asyncio.Task[Any] | None = None

    async def answer(self, number: int, start: Callable[[], asyncio.Task[Any]]) -> Any:
        """What the task of this number returns. `start` is called only if the number is new.

        Raises ReplyExpired for an older number, StepCancelled if a newer one comes before the answer.
        """
        if number < self._number:
            raise ReplyExpired(
                f"request {number} comes after request {self._number} and is not executed",
                hint="number requests upwards, and repeat only the newest",
            )
        if number > self._number or self._task is None:
            before, self._number = self._task, number
            if before is not None:
                before.cancel()
            self._task = start()
        task = self._task
        await asyncio.wait([task])
        if task.cancelled():
            raise StepCancelled("cancelled: its client went on to a later request")
        return task.result()


def request_number(header: Callable[[str], str | None]) -> int | None:
    """The number of a request; None if it has none. Raises InvalidMessage for what is no number."""
    text = header(HEADER)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
        reason = "a whole number is needed"
        raise InvalidMessage("Invalid message", errors=[{"type": "int", "loc": ["header", HEADER], "msg": reason}])
    return int(text)
