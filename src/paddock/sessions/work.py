"""One request on its way through a session (`Work`), and the connection that its answer goes to (`Attachment`)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from paddock.errors import ReplyExpired, StepCancelled
from paddock.protocol.codec import model_fields
from paddock.sessions.threads import ThreadJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.errors import PaddockError
    from paddock.protocol.episode import Request
    from paddock.sessions.session import Session
    from paddock.sessions.spec import Method


class Attachment(Protocol):
    """The connection that a session's answers go to."""

    def is_blocked(self, work: Work) -> bool:
        """Whether `work` must wait for `Session.proceed`, because its client does not read its answers."""

    def send(self, frame: bytes) -> None: ...
    def on_session_closed(self, error: PaddockError) -> None:
        """The session ended before the connection did."""

    def on_replaced(self) -> None:
        """The client resumed the session on another connection, so this one is dead."""


class Work(ThreadJob):
    """One request on its way through a session. `reply(work, answer)` is called exactly once."""

    method: Method
    argument: Any
    after: Callable[[Session, Work, Any], Any]
    """Turns what the method returned into the answer, and records it in the episode."""
    timeout: float | None = None
    deadline: float | None = None
    started = 0.0
    settled = False
    """Whether it is answered. It may still run: a thread cannot be cancelled."""
    expired = False
    """Whether its deadline has passed."""
    overdue = False
    """Whether it counts as hung: on a thread, and past its deadline."""
    task: asyncio.Task[Any] | None = None
    """Set if it runs on the loop and not on a thread."""
    is_answered = False
    """Whether a thread has sent the answer, so that the loop only has to record it (`server/fastpath`)."""

    def __init__(self, session: Session, request: Request, reply: Callable[[Work, Any], None], number: Any) -> None:
        self.session = session
        self.request = request
        self.reply = reply
        self.number = number

    def call(self) -> Any:
        return self.method.invoke(self.session.environment, self.argument)

    def finish(self) -> None:
        self.session.conclude(self)

    def claim(self) -> bool:
        """Whether the caller may answer it: only the first one that claims it may."""
        first, self.settled = not self.settled, True
        return first

    def settle(self, answer: Any) -> None:
        """Answer it, unless it is answered. An error is an answer too."""
        if self.claim():
            self.session.manager.queued.discard(self)
            self.reply(self, answer)


class NewestRequest:
    """The newest numbered HTTP request of a session, and its answer once there is one.

    A client over HTTP has one request in flight, and numbers its requests upwards (`Request-Number`). So only the
    newest number matters, and three rules cover every repeat, delay and duplicate:

    - The newest number again gets the same answer, and waits for it if the request still runs.
    - With a newer number, the client does not wait for the older one any more: what runs of it is cancelled.
    - An older number is refused and never executed. It may arrive late, also after the reset that followed it.

    A request goes on when its connection drops, because its client is about to repeat it.
    """

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
            self._number = number
            if self._task is not None:
                self._task.cancel()
            self._task = start()
        task = self._task
        await asyncio.wait([task])
        if task.cancelled():
            raise StepCancelled("cancelled: its client went on to a later request")
        return task.result()


def is_done(observation: Any) -> bool:
    """Whether an observation, a model or a dict, ends its episode. Raises EnvironmentFailure if it is neither."""
    try:
        return bool(observation.done)
    except AttributeError:
        return bool(model_fields(observation).get("done"))
