"""One request on its way through a session, and the connection that its answer goes to."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from paddock.protocol.codec import model_fields
from paddock.protocol.episode import Step
from paddock.sessions.jobs import PATIENCE, Job

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from paddock.errors import PaddockError
    from paddock.protocol.episode import Request
    from paddock.sessions.blueprint import Method
    from paddock.sessions.session import Session


class Attachment(Protocol):
    """The connection that a session's answers go to."""

    def holds_back(self, work: Work) -> bool:
        """Whether `work` may not begin until `Session.proceed`: its answer is for a client that does not read."""

    def send(self, frame: bytes) -> None: ...
    def session_closed(self, error: PaddockError) -> None: ...
    def replaced(self) -> None:
        """The client returned to the session elsewhere: this connection was dead and did not know it."""


class SideDoor(Attachment, Protocol):
    """A connection that lets a thread answer past the loop."""

    timeout: float | None
    """How long a step may take."""

    def write_aside(self, work: StepAside) -> bytes:
        """On the thread: the answer to what it has just carried out."""

    def send_aside(self, frame: bytes) -> bool:
        """On any thread. False if only the loop can."""

    def answered_aside(self, work: StepAside) -> None:
        """On the loop, some time after a thread has answered."""

    def answered(self, work: Work, answer: Any) -> None:
        """On the loop: answer what no thread has."""

    def is_pressing(self) -> bool:
        """On the thread: whether the client has sent more, so that the loop should hear of the answer at once."""


class Work(Job):
    """One request on its way through a session. `reply(work, answer)` is called exactly once."""

    method: Method
    argument: Any
    after: Callable[[Session, Work, Any], Any]
    timeout: float | None = None
    deadline: float | None = None
    started = 0.0
    settled = False
    expired = False
    overdue = False
    """Whether it counts as hung: on a thread, and past its deadline."""
    task: asyncio.Task[Any] | None = None
    is_answered = False
    """Whether a thread has answered it, so that the loop only has to hear of it."""

    def __init__(self, session: Session, request: Request, reply: Callable[[Work, Any], None], number: Any) -> None:
        self.session = session
        self.request = request
        self.reply = reply
        self.number = number

    def call(self) -> Any:
        return self.method.invoke(self.session.environment, self.argument)

    def finish(self) -> None:
        self.session.returned(self)

    def claim(self) -> bool:
        """Whoever claims it first answers it; nobody else does."""
        first, self.settled = not self.settled, True
        return first

    def settle(self, answer: Any) -> None:
        """Answer, unless that has happened. An error is an answer too."""
        if self.claim():
            self.session.forget_queued(self)
            self.reply(self, answer)


class StepAside(Work):
    """A step on a thread that the thread itself answers. The loop hears of it when it has time, or somebody asks."""

    __slots__ = (
        "action", "deadline", "done", "door", "ended", "error", "expired", "is_answered", "method", "overdue",
        "reply", "session", "settled", "started", "unsent", "value",
    )  # fmt: skip
    """Two threads look at it, and what is small moves quickly between them."""

    number = None
    _claiming = threading.Lock()

    request = Step(None)
    """Stands for all of them: the action comes past dispatch."""

    def __init__(self, session: Session, action: Any, door: SideDoor, method: Method, started: float) -> None:
        self.session = session
        self.action = action
        self.door = door
        self.reply = door.answered
        self.method = method
        self.started = started
        self.deadline = None if door.timeout is None else started + door.timeout
        self.settled = self.expired = self.overdue = self.is_answered = False
        self.value = self.error = None
        self.unsent: bytes | None = None
        """The answer, until it is sent."""
        self.ended = 0.0
        self.done = False

    def run(self) -> None:
        session = self.session
        began = session.clock()
        try:
            self.value = value = session.environment.step(self.action)
            self.ended = session.clock()
            # The loop hears of a long one at once, and then is quicker to answer it with others of its kind.
            if self.ended - began < PATIENCE and session.attachment is self.door:
                self.done = is_done(value)
                self.unsent = self.door.write_aside(self)
        except BaseException as error:
            # It is explained on the loop. Neither SystemExit nor GeneratorExit is ours to obey.
            self.error = error

    def send(self) -> None:
        if self.unsent is not None and self.claim():
            self.is_answered = True
            if self.door.send_aside(self.unsent):
                self.unsent = None

    def claim(self) -> bool:
        with self._claiming:
            first, self.settled = not self.settled, True
        return first

    def after(self, session: Session, _: Work, observation: Any) -> Any:
        return count_step(session, self, observation)

    def is_awaited(self) -> bool:
        if not self.is_answered or self.unsent is not None:
            return True
        return self.session.is_pressing() or self.door.is_pressing()

    def finish(self) -> None:
        self.session.stepped_aside(self)


def count_step(session: Session, _: Work, observation: Any) -> Any:
    """What follows every step that succeeded."""
    session.episode.stepped(is_done(observation))
    return observation


def is_done(observation: Any) -> bool:
    """Whether an observation, a model or a dict, ends its episode. Raises EnvironmentFailure if it is neither."""
    try:
        return bool(observation.done)
    except AttributeError:
        return bool(model_fields(observation).get("done"))
