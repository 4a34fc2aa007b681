"""Which fault is due, counted per conversation, and how a socket is closed on purpose."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from paddock.testing.replay.answer import Answer
    from paddock.testing.replay.format import Fault


class ScriptedHangUp(ConnectionResetError):
    """We closed the socket, not the client."""


class Faults:
    """The faults of a script, and how often each was played in each conversation."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._played: Counter[tuple[str, str, int]] = Counter()

    def next(self, answer: Answer, session: str) -> Fault | None:
        """The first fault that is due for this answer, which counts as played. Side calls have none."""
        if answer.turn is None:
            return None
        for number, fault in enumerate(self._faults):
            if fault.when not in answer.task or fault.turn not in (None, answer.turn):
                continue
            place = (answer.task, session, number)
            if fault.most is None or self._played[place] < fault.most:
                self._played[place] += 1
                return fault
        return None


def tokens_before_the_end(fault: Fault | None) -> int | None:
    """After how many tokens a stream breaks off; None if it does not."""
    if fault is None:
        return None
    if fault.stall_after is not None:
        return fault.stall_after
    if fault.cut_after is None and fault.malformed:
        return 0
    return 1 if fault.cut_after is None and fault.error_chunk is not None else fault.cut_after


async def never_answer() -> NoReturn:
    """Until the client hangs up, which cancels the handler, or the server is closed."""
    while True:
        await asyncio.sleep(3600)


def hang_up(request: web.Request) -> NoReturn:
    """Close the socket without the rest of an answer."""
    if request.transport is not None:
        request.transport.abort()
    raise ScriptedHangUp("scripted fault")
