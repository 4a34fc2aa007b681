"""One live environment, kept for one client: one object, one queue, one owner.

Requests are carried out one at a time in the order they came. A session does not know what a request
means (dispatch does) or which transport brought it; it knows whether the environment is free, when
a request is overdue, and that the environment's `close` runs exactly once.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import uuid
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from paddock.errors import (
    EnvironmentFailure,
    InvalidMessage,
    PaddockError,
    SessionBusy,
    SessionClosed,
    StepCancelled,
    StepTimeout,
)
from paddock.protocol.episode import Episode, Phase
from paddock.protocol.redact import redact, told
from paddock.protocol.resume import ReplyLedger
from paddock.sessions.blueprint import SLOW_CALL, Where
from paddock.sessions.isolation.remote import RemoteEnvironment
from paddock.sessions.jobs import Call, awaited
from paddock.sessions.numbered import NewestRequest
from paddock.sessions.work import Attachment, SideDoor, StepAside, Work, is_done

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sessions.jobs import Runner
    from paddock.sessions.manager import SessionManager

logger = logging.getLogger("paddock.sessions")
MOST_WAITING = 256
LATER = object()


class Door(Enum):
    """How a session came to be, which decides who can return to it and how long it is kept."""

    SOCKET = "socket"
    """Belongs to one `/ws` or `/mcp` socket."""
    CREATED = "created"
    """Made by `openenv/session/create`: its id is its token."""
    MCP = "mcp"
    """Made by an MCP client's `initialize`."""
    HTTP = "http"
    """Handed out by `/reset` over HTTP."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A snapshot of one session, for `/health`, the page and the command line."""

    id: str
    door: str
    phase: str
    episode_id: str
    steps: int
    age_s: float
    idle_s: float
    attached: bool
    running: bool


class Session:
    __slots__ = (
        "_beside", "_current", "_manager", "_step", "_step_timings", "_timings", "_waiting", "attachment", "clock",
        "close_when_detached", "closed", "door", "dropped_at", "ended", "environment", "episode", "holds_slot",
        "http_requests", "id",
        "is_closing_environment", "last_active", "ledger", "opened_at", "resumable", "threads", "token",
        "went_on",
    )  # fmt: skip
    """What is small stays in the cache."""

    def __init__(
        self,
        manager: SessionManager,
        environment: Any,
        door: Door,
        threads: Runner,
        token: str | None = None,
        *,
        holds_slot: bool = True,
    ) -> None:
        self.id = str(uuid.uuid4())
        self.token = token or manager.new_token()
        self.environment = environment
        self.door = door
        self.holds_slot = holds_slot
        self.resumable = False
        self.episode = Episode()
        self.ledger = ReplyLedger()
        self.http_requests: NewestRequest | None = None
        """Set once a numbered HTTP request came."""
        self.attachment: Attachment | None = None
        self.dropped_at: float | None = None
        self.close_when_detached = False
        self.went_on = False
        """Whether anybody came back to a session that HTTP handed out."""
        self.opened_at = self.last_active = manager.clock()
        self.closed = False
        self.ended: asyncio.Future[None] = manager.loop.create_future()
        self._manager = manager
        self.clock = manager.clock
        self._timings = manager.metrics.calls
        self._step = manager.blueprint.step
        self._step_timings = manager.metrics.calls["step"]
        self.threads = threads
        self._current: Work | None = None
        self._waiting: deque[Work] = deque()
        self._beside: set[Work] = set()
        """Calls that overlap with all others."""
        self.is_closing_environment = False

    def __repr__(self) -> str:
        return f"<Session {self.id} {self.door.value} {self.episode.phase.name.lower()} steps={self.episode.steps}>"

    @property
    def is_running(self) -> bool:
        return self._current is not None or bool(self._beside)

    @property
    def is_awaited(self) -> bool:
        """Whether an answer is still owed. What was given up may hang for ever."""
        return any(work is not None and not work.settled for work in (self._current, *self._beside))

    def info(self) -> SessionInfo:
        now = self._manager.clock()
        return SessionInfo(
            id=self.id, door=self.door.value, phase=self.episode.phase.name.lower(), episode_id=self.episode.id,
            steps=self.episode.steps, age_s=round(now - self.opened_at, 3), idle_s=round(now - self.last_active, 3),
            attached=self.attachment is not None, running=self.is_running,
        )  # fmt: skip

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Carry out `work` now, or after what is already under way."""
        if work.method.where is Where.BESIDE and not self.closed:
            self._beside.add(work)
            self._start(work)
        elif self.closed:
            work.settle(SessionClosed("the session is closed"))
        elif self._current is None and not self._waiting:
            if work.method.where is Where.INLINE:
                self._run_inline(work)
            else:
                self._carry_out(work)
        elif self._current is not None and self._current.overdue:
            work.settle(self._busy())
        elif len(self._waiting) >= MOST_WAITING:
            work.settle(SessionBusy(f"{MOST_WAITING} requests are waiting already", hint="await the answers"))
        else:
            if work.timeout is not None:
                work.deadline = self.clock() + work.timeout
            self._waiting.append(work)
            self._manager.queued.add(work)
            # What it waits for may have ended without a word.
            self.catch_up()

    def step_now(self, action: Any) -> Any:
        """The answer to a cheap step, at once; LATER if the step has to go the common way through `submit`.

        What `submit` does in a dozen calls stands here in one: on a busy server most of the time goes here.
        """
        method = self._step
        if method.where is not Where.INLINE or self._current is not None or self._waiting or self.closed:
            return LATER
        started = self.clock()
        answer: Any
        try:
            answer = self.environment.step(action)
            self.episode.stepped(is_done(answer))
        except BaseException as error:
            # An environment may raise SystemExit or CancelledError; neither is ours to obey.
            answer = self._explain("step", error)
            self._manager.metrics.errors[answer.code] += 1
        self.last_active = now = self.clock()
        seconds = now - started
        self._step_timings.observe(seconds)
        if seconds > SLOW_CALL:
            method.was_slow(seconds, self._step_timings.count, now)
        return answer

    def step_aside(self, action: Any, door: SideDoor) -> bool:
        """Carry out a step on a thread that answers through `door`; False if it has to go the common way."""
        if self._step.where is not Where.THREAD or self._current is not None or self._waiting or self.closed:
            return False
        self._current = work = StepAside(self, action, door, self._step, self.clock())
        self._manager.running.add(work)
        self.threads.submit(work)
        return True

    def stepped_aside(self, work: StepAside) -> None:
        """The loop hears of it."""
        if not work.is_answered:
            self.returned(work)
            return
        self._manager.running.discard(work)
        if work.overdue:
            self._manager.metrics.hung_calls -= 1
        self._current = None
        self.last_active = work.ended
        self._step_timings.observe(work.ended - work.started)
        self.episode.stepped(work.done)
        work.door.answered_aside(work)
        if self._waiting or self.closed:
            self._go_on()

    def catch_up(self) -> None:
        """Hear of what threads have ended meanwhile."""
        self._manager.returns.deliver()

    def is_pressing(self) -> bool:
        """Whether the end of what runs is waited for here."""
        return self.closed or bool(self._waiting)

    def cancel(self, number: Any) -> None:
        """Give up the request with this number."""
        for work in (self._current, *self._beside, *self._waiting):
            if work is not None and work.number == number:
                self.give_up(work)
                return

    def give_up(self, work: Work) -> None:
        """Nobody waits for it any more: drop it if it waits, cancel it if it runs."""
        if work is self._current or work in self._beside:
            self._abandon(work, StepCancelled("cancelled: its caller gave it up"))
        elif work in self._waiting:
            self._waiting.remove(work)
            work.settle(StepCancelled("cancelled before it began"))

    def give_up_all(self, owner: object) -> None:
        """`owner` is gone: give up every request whose answer it was to get."""
        for work in (self._current, *self._beside, *self._waiting):
            if work is not None and getattr(work.reply, "__self__", None) is owner:
                self.give_up(work)

    def expire(self, work: Work) -> None:
        """The deadline of a request has passed: of one that runs, or that waits for its turn."""
        work.expired = True
        if work in self._waiting:
            self._waiting.remove(work)
            work.settle(StepTimeout(f"{work.method.name} had to wait longer than its deadline for its turn"))
            return
        if work not in self._manager.running:
            return
        self.last_active = now = self.clock()
        seconds = now - work.started
        if work.task is None:
            work.overdue = True
            self._manager.metrics.hung_calls += 1
            logger.warning("%s of session %s hangs: no answer for %.1f s", work.method.name, self.id, seconds)
        self._abandon(
            work,
            StepTimeout(
                f"{work.method.name} did not answer within {seconds:.1f} s",
                hint="raise --step-timeout, or send timeout_s with the request",
            ),
        )
        while work.overdue and self._waiting:
            self._waiting.popleft().settle(self._busy())

    def _abandon(self, work: Work, error: PaddockError) -> None:
        """Answer now. A task is cancelled; a thread goes on by itself."""
        work.settle(error)
        if work.task is not None:
            work.task.cancel()
            if isinstance(self.environment, RemoteEnvironment) and work.deadline is not None:
                self.environment.end_given_up(max(work.deadline - self.clock(), 0.0))

    def _busy(self) -> SessionBusy:
        return SessionBusy("an earlier request was given up, but still holds the environment")

    def _carry_out(self, work: Work) -> None:
        following: Work | None = work
        while following is not None:
            if following.method.where is Where.INLINE:
                self._run_inline(following)
            else:
                self._start(following)
                return
            following = self._next() if not self.closed else None

    def _run_inline(self, work: Work) -> None:
        """Carry it out here and now. This is the path of every cheap step: nothing in it waits."""
        self._current = work
        work.started = self.clock()
        try:
            value = work.method.invoke(self.environment, work.argument)
        except BaseException as error:
            # An environment may raise SystemExit or CancelledError; neither is ours to obey.
            value = self._failure(work, error)
        self._conclude(work, value)

    def _start(self, work: Work) -> None:
        """Hand it to the loop or a thread; `returned` goes on."""
        if work not in self._beside:
            self._current = work
        work.started = self.clock()
        if work.timeout is not None and work.deadline is None:
            work.deadline = work.started + work.timeout
        self._manager.running.add(work)
        method = work.method
        if method.where is not Where.THREAD:
            work.task = self._manager.loop.create_task(awaited(method.invoke, self.environment, work.argument))
            work.task.add_done_callback(lambda task: self._task_ended(work, task))
        else:
            self.threads.submit(work)

    def _task_ended(self, work: Work, task: asyncio.Task[Any]) -> None:
        work.value, work.error = _outcome(task)
        self.returned(work)

    def returned(self, work: Work) -> None:
        """A thread or task has ended: conclude its work and take up the next."""
        self._manager.running.discard(work)
        if work.overdue:
            self._manager.metrics.hung_calls -= 1
        self._conclude(work, work.value if work.error is None else self._failure(work, work.error))
        self._go_on()

    def _go_on(self) -> None:
        if self.closed:
            if not self.is_running:
                self._close_environment()
        elif self._current is None and (following := self._next()) is not None:
            self._carry_out(following)

    def proceed(self) -> None:
        """Begin what waits, if it does so only because its connection was blocked."""
        if not self.closed:
            self._go_on()

    def _next(self) -> Work | None:
        while self._waiting and not (self.attachment is not None and self.attachment.holds_back(self._waiting[0])):
            work = self._waiting.popleft()
            self._manager.queued.discard(work)
            try:
                if type(work.number) is int:
                    self.ledger.check_room()
            except SessionBusy as error:
                work.settle(error)
            else:
                return work
        return None

    def _retract(self, attachment: Attachment) -> None:
        """Forget the numbered requests of a lost connection that have not begun: its client sends them again.

        To execute them now would fill the memory with answers for a client that is gone.
        """
        for work in reversed(self._waiting.copy()):
            if type(work.number) is not int or getattr(work.reply, "__self__", None) is not attachment:
                return
            self._waiting.pop()
            self._manager.queued.discard(work)
            self.ledger.retract(work.number)

    def _conclude(self, work: Work, value: Any) -> None:
        method = work.method
        self.last_active = now = self.clock()
        self._beside.discard(work)
        if self._current is work:
            self._current = None
        seconds = now - work.started
        timings = self._timings[method.name]
        timings.observe(seconds)
        if seconds > SLOW_CALL and method.where is Where.INLINE:
            method.was_slow(seconds, timings.count, now)
        if not isinstance(value, PaddockError):
            try:
                value = work.after(self, work, value)
            except Exception as error:
                value = self._failure(work, error)
        if isinstance(value, PaddockError):
            self._manager.metrics.errors[value.code] += 1
        if work.claim():
            work.reply(work, value)

    def _failure(self, work: Work, error: BaseException) -> PaddockError:
        """What the caller is told of an exception; the log gets all of it."""
        if work.settled and isinstance(error, asyncio.CancelledError):
            return StepCancelled("cancelled")
        return self._explain(work.method.name, error)

    def _explain(self, method: str, error: BaseException) -> PaddockError:
        if isinstance(error, (EnvironmentFailure, InvalidMessage)):
            error.message = redact(error.message, self._manager.secrets)
            return error
        # Also an error of another session that the environment has somewhere: it says nothing about this one.
        logger.error("%s failed in session %s", method, self.id, exc_info=error)
        return EnvironmentFailure(told(error, self._manager.secrets), error_type=type(error).__name__)

    async def answer_once(self, number: int, start: Callable[[], asyncio.Task[Any]]) -> Any:
        """The answer to the HTTP request of this number, which is started unless that has happened."""
        if self.http_requests is None:
            self.http_requests = NewestRequest()
        return await self.http_requests.answer(number, start)

    def forget_queued(self, work: Work) -> None:
        self._manager.queued.discard(work)

    async def invoke(self, name: str, *arguments: Any) -> Any:
        """Call another method of the environment, where its methods run. Raises StepTimeout, or what it raises."""
        limit = self._manager.limits.step_timeout
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self._manager.invoke(self.threads, self.environment, name, *arguments)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise StepTimeout(f"{name} did not answer within {limit} s", hint="raise --step-timeout") from None

    # -- the connection ---------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        before, self.attachment = self.attachment, attachment
        if before is not None and before is not attachment:
            before.replaced()
        self.dropped_at = None
        self.last_active = self._manager.clock()
        self.proceed()

    def detach(self, attachment: Attachment, *, dropped: bool) -> None:
        """The connection is gone; `dropped` if it did not say goodbye."""
        if self.attachment is attachment:
            self.attachment = None
            self.last_active = self._manager.clock()
            self.dropped_at = self.last_active if dropped else None
            if dropped:
                self._retract(attachment)
            if self.close_when_detached:
                self.close("it was closed over MCP")
            self.proceed()

    def heard_of(self) -> None:
        """Its client named it in a request without a connection of its own, and so is there."""
        self.dropped_at = None
        self.last_active = self.clock()

    def send(self, frame: bytes) -> None:
        """To whoever is attached now. Without an attachment the ledger keeps what matters."""
        if self.attachment is not None:
            self.attachment.send(frame)

    # -- the end ----------------------------------------------------------------------------------

    def is_expired(self, now: float) -> bool:
        """Whether nobody is coming back. Never during a request, never with a connection attached."""
        if self.attachment is not None or self.is_awaited:
            return False
        limits = self._manager.limits
        idle = now - self.last_active
        if self.dropped_at is not None or (self.door is Door.HTTP and not self.went_on):
            return idle > limits.resume_window
        return limits.session_timeout is not None and idle > limits.session_timeout

    def gives_way(self, now: float) -> bool:
        """Whether this session makes room when the server is full."""
        if isinstance(self.environment, RemoteEnvironment) and self.environment.is_lost:
            # Its process has ended. Its client may begin anew with a reset, but not at the cost of others.
            return not self.is_running
        if self.attachment is not None or self.is_awaited:
            return False
        is_new = self.episode.phase is Phase.NEW
        if self.door is Door.HTTP and not is_new and (not self.went_on or self.episode.phase is Phase.DONE):
            return True
        limits, idle = self._manager.limits, now - self.last_active
        if self.dropped_at is not None:
            return idle > limits.give_way_after
        # Nothing tells a client that crashed from an agent that thinks. Who never acted is not thinking.
        return (self.door is Door.HTTP or is_new) and idle > limits.resume_window

    def close(self, reason: str) -> None:
        """End the session. Running work is cancelled, waiting work refused, the environment closed."""
        self.catch_up()
        if self.closed:
            return
        self.closed = True
        self.episode.close()
        error = SessionClosed(f"the session was closed: {reason}")
        while self._waiting:
            self._waiting.popleft().settle(error)
        for work in (self._current, *self._beside):
            if work is not None:
                self._abandon(work, error)
        attachment, self.attachment = self.attachment, None
        self._manager.forget(self, reason)
        if attachment is not None:
            attachment.session_closed(error)
        if not self.is_running:
            self._close_environment()

    def force_close(self) -> None:
        """Close the environment although a call still hangs in it. Only when the server must end."""
        self._manager.release_threads(self.threads)
        self.threads = self._manager.threads
        self._close_environment()

    def _close_environment(self) -> None:
        if self.is_closing_environment:
            return
        self.is_closing_environment = True
        close = getattr(self.environment, "close", None)
        if close is None:
            self._environment_closed(None, None)
        elif inspect.iscoroutinefunction(close):
            task = self._manager.loop.create_task(awaited(close))
            task.add_done_callback(lambda done: self._environment_closed(*_outcome(done)))
        else:
            self.threads.submit(Call(close, self._environment_closed))

    def _environment_closed(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            logger.error("close failed in session %s", self.id, exc_info=error)
        self._manager.release_threads(self.threads)
        self._manager.ended(self)
        if not self.ended.done():
            self.ended.set_result(None)


def _outcome(task: asyncio.Task[Any]) -> tuple[Any, BaseException | None]:
    if task.cancelled():
        return None, asyncio.CancelledError()
    error = task.exception()
    return (None, error) if error is not None else (task.result(), None)
