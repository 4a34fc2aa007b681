"""One live environment of one client, and the queue of its requests.

    dispatch ─ submit ─┬─────────────┬─ _begin ─┬─ _run_inline ────────────────────────┬─ _answer ─ work.reply
                       └─ (waiting) ─┘          └─ _start ─ task or thread ─ conclude ─┘

Requests are executed one at a time in the order they came; only methods that are `OVERLAPPING` run beside others. A
request ends early if its client gives it up (`give_up`) or its deadline passes (`expire`). The environment's `close`
runs exactly once, after the last request has ended.

Knows neither what a request does (`dispatch.py`) nor which transport brought it (`Attachment`).
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
from paddock.protocol.redact import describe_error, redact
from paddock.protocol.resume import ReplyCache
from paddock.sessions.isolation.remote import RemoteEnvironment
from paddock.sessions.spec import SLOW_CALL_SECONDS, Where
from paddock.sessions.threads import FunctionJob, call_or_await
from paddock.sessions.work import Attachment, NewestRequest, Work

if TYPE_CHECKING:
    from paddock.sessions.manager import SessionManager
    from paddock.sessions.threads import Runner

logger = logging.getLogger("paddock.sessions")
MAX_WAITING_STEPS = 256
"""How many requests may wait in one session."""
NO_RESET_HINT = "reset was not called in this session, and it may set what is missing"


class Origin(Enum):
    """How a session was opened. It decides who can return to the session and how long it is kept."""

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
    origin: str
    """The value of its `Origin`; the name is the wire's."""
    phase: str
    episode_id: str
    steps: int
    age_s: float
    idle_s: float
    attached: bool
    running: bool


class Session:
    """Requests come in through `submit`; each ends with one call of its `reply`. Used on the event loop only."""

    __slots__ = (
        "_overlapping", "attachment", "clock", "close_when_detached", "closed", "current", "dropped_at", "ended",
        "environment", "episode", "holds_slot", "http_requests", "id", "is_closing_environment", "last_active",
        "manager", "opened_at", "origin", "reply_cache", "resumable", "threads", "token", "waiting", "was_continued",
    )  # fmt: skip

    def __init__(
        self,
        manager: SessionManager,
        environment: Any,
        origin: Origin,
        threads: Runner,
        token: str | None = None,
        *,
        holds_slot: bool = True,
    ) -> None:
        self.id = str(uuid.uuid4())
        self.token = token or manager.new_token()
        self.environment = environment
        self.origin = origin
        self.holds_slot = holds_slot
        self.resumable = False
        self.episode = Episode()
        self.reply_cache = ReplyCache()
        self.http_requests = NewestRequest()
        """Executes numbered HTTP requests at most once."""
        self.attachment: Attachment | None = None
        self.dropped_at: float | None = None
        self.close_when_detached = False
        self.was_continued = False
        """Whether a request has used a session that `/reset` over HTTP opened."""
        self.opened_at = self.last_active = manager.clock()
        self.closed = False
        self.ended: asyncio.Future[None] = manager.loop.create_future()
        self.manager = manager
        self.clock = manager.clock
        self.threads = threads
        self.current: Work | None = None
        """The request that uses the environment now."""
        self.waiting: deque[Work] = deque()
        """Requests that wait for `current` to end, in their order."""
        self._overlapping: set[Work] = set()
        """Running requests of methods that overlap with all others."""
        self.is_closing_environment = False

    def __repr__(self) -> str:
        return f"<Session {self.id} {self.origin.value} {self.episode.phase.name.lower()} steps={self.episode.steps}>"

    @property
    def is_running(self) -> bool:
        """Whether a request is executed."""
        return self.current is not None or bool(self._overlapping)

    @property
    def is_awaited(self) -> bool:
        """Whether a client waits for an answer. A request that was given up may still run, but is not awaited."""
        return any(work is not None and not work.settled for work in (self.current, *self._overlapping))

    def info(self) -> SessionInfo:
        """The session as of now, for the page and `/sessions`."""
        now = self.manager.clock()
        return SessionInfo(
            id=self.id, origin=self.origin.value, phase=self.episode.phase.name.lower(), episode_id=self.episode.id,
            steps=self.episode.steps, age_s=round(now - self.opened_at, 3), idle_s=round(now - self.last_active, 3),
            attached=self.attachment is not None, running=self.is_running,
        )  # fmt: skip

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Execute `work` now, or after the requests before it. It is refused while an earlier one hangs."""
        if self.closed:
            work.settle(SessionClosed("the session is closed"))
        elif work.method.where is Where.OVERLAPPING:
            self._overlapping.add(work)
            self._start(work)
        elif self.current is None and not self.waiting:
            self._begin(work)
        elif self.current is not None and self.current.overdue:
            work.settle(self._busy())
        elif len(self.waiting) >= MAX_WAITING_STEPS:
            work.settle(SessionBusy(f"{MAX_WAITING_STEPS} requests are waiting already", hint="await the answers"))
        else:
            if work.timeout is not None:
                work.deadline = self.clock() + work.timeout
            self.waiting.append(work)
            self.manager.queued.add(work)
            # The request before it may have ended on a thread that did not wake the loop.
            self.catch_up()

    def _begin(self, work: Work) -> None:
        """The environment is free: execute `work`, then what waits, until a request needs a task or a thread."""
        following: Work | None = work
        while following is not None:
            if following.method.where is not Where.INLINE:
                self._start(following)
                return
            self._run_inline(following)
            following = None if self.closed else self._next()

    def _run_inline(self, work: Work) -> None:
        """Execute it here, on the event loop."""
        self.current = work
        work.started = self.clock()
        try:
            value = work.method.invoke(self.environment, work.argument)
        except BaseException as error:
            # An environment may raise SystemExit or CancelledError. Neither must end the loop.
            value = self._failure(work, error)
        self._answer(work, value)

    def _start(self, work: Work) -> None:
        """Execute it in a task or on a thread, which calls `conclude` at its end."""
        if work not in self._overlapping:
            self.current = work
        work.started = self.clock()
        if work.timeout is not None and work.deadline is None:
            work.deadline = work.started + work.timeout
        self.manager.running.add(work)
        method = work.method
        if method.where is not Where.THREAD:
            work.task = self.manager.loop.create_task(call_or_await(method.invoke, self.environment, work.argument))
            work.task.add_done_callback(lambda task: self._task_ended(work, task))
        else:
            self.threads.submit(work)

    def _task_ended(self, work: Work, task: asyncio.Task[Any]) -> None:
        work.value, work.error = _outcome(task)
        self.conclude(work)

    def conclude(self, work: Work) -> None:
        """The task or thread of a request has ended: answer it, and begin the next."""
        self.manager.running.discard(work)
        if work.overdue:
            self.manager.metrics.hung_calls -= 1
        self._answer(work, work.value if work.error is None else self._failure(work, work.error))
        self.begin_next()

    def _answer(self, work: Work, value: Any) -> None:
        """The method of `work` has returned `value`, or failed with it: record it, and reply."""
        method = work.method
        self.last_active = now = self.clock()
        self._overlapping.discard(work)
        if self.current is work:
            self.current = None
        seconds = now - work.started
        timings = self.manager.metrics.calls[method.name]
        timings.observe(seconds)
        if seconds > SLOW_CALL_SECONDS and method.where is Where.INLINE:
            method.record_slow_call(seconds, timings.count, now)
        if not isinstance(value, PaddockError):
            try:
                value = work.after(self, work, value)
            except Exception as error:
                value = self._failure(work, error)
        if isinstance(value, PaddockError):
            self.manager.metrics.errors[value.code] += 1
        if work.claim():
            work.reply(work, value)

    def _failure(self, work: Work, error: BaseException) -> PaddockError:
        """The error that the caller gets for an exception of the environment."""
        if work.settled and isinstance(error, asyncio.CancelledError):
            return StepCancelled("cancelled")
        return self.explain(work.method.name, error)

    def explain(self, method: str, error: BaseException) -> PaddockError:
        """The same without a request. Secrets are masked; the log gets the traceback."""
        if isinstance(error, (EnvironmentFailure, InvalidMessage)):
            error.message = redact(error.message, self.manager.secrets)
            return error
        # Also a PaddockError of another kind: it may be about another session that the environment uses.
        logger.error("%s failed in session %s", method, self.id, exc_info=error)
        # What `reset` sets is missing.
        is_early = isinstance(error, AttributeError) and not self.episode.was_reset and method.startswith("step")
        return EnvironmentFailure(
            describe_error(error, self.manager.secrets),
            hint=NO_RESET_HINT if is_early else None,
            error_type=type(error).__name__,
        )

    def begin_next(self) -> None:
        """Begin the next waiting request if the environment is free. In a closed session, close the environment."""
        if self.closed:
            if not self.is_running:
                self._close_environment()
        elif self.current is None and (following := self._next()) is not None:
            self._begin(following)

    def _next(self) -> Work | None:
        """The next request that may begin. None if there is none, or its client does not read its answers."""
        while self.waiting and not (self.attachment is not None and self.attachment.is_blocked(self.waiting[0])):
            work = self.waiting.popleft()
            self.manager.queued.discard(work)
            try:
                if type(work.number) is int:
                    self.reply_cache.check_room()
            except SessionBusy as error:
                work.settle(error)
            else:
                return work
        return None

    def proceed(self) -> None:
        """The connection is writable again, or another one is attached: begin what waits."""
        if not self.closed:
            self.begin_next()

    def catch_up(self) -> None:
        """Conclude the requests that have ended on threads, without waiting for the loop's wake-up."""
        self.manager.completions.deliver()

    async def invoke(self, name: str, *arguments: Any) -> Any:
        """Call another method of the environment, beside the queue. Raises StepTimeout, or what the method raises."""
        limit = self.manager.limits.step_timeout
        try:
            async with asyncio.timeout(limit) as deadline:
                return await self.manager.invoke(self.threads, self.environment, name, *arguments)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise StepTimeout(f"{name} did not answer within {limit} s", hint="raise --step-timeout") from None

    # -- requests that end early --------------------------------------------------------------------

    def cancel(self, number: Any) -> None:
        """Give up the request with this number."""
        for work in (self.current, *self._overlapping, *self.waiting):
            if work is not None and work.number == number:
                self.give_up(work)
                return

    def give_up(self, work: Work) -> None:
        """Nobody waits for its answer any more: remove it if it waits, abandon it if it runs."""
        if work is self.current or work in self._overlapping:
            self._abandon(work, StepCancelled("cancelled: its caller gave it up"))
        elif work in self.waiting:
            self.waiting.remove(work)
            work.settle(StepCancelled("cancelled before it began"))

    def give_up_all(self, owner: object) -> None:
        """Give up every request whose answer `owner`, a connection that was lost, would get."""
        for work in (self.current, *self._overlapping, *self.waiting):
            if work is not None and getattr(work.reply, "__self__", None) is owner:
                self.give_up(work)

    def expire(self, work: Work) -> None:
        """The deadline of a request has passed, while it ran or while it waited."""
        work.expired = True
        if work in self.waiting:
            self.waiting.remove(work)
            work.settle(StepTimeout(f"{work.method.name} had to wait longer than its deadline for its turn"))
            return
        if work not in self.manager.running:
            return
        self.last_active = now = self.clock()
        seconds = now - work.started
        if work.task is None:
            work.overdue = True
            self.manager.metrics.hung_calls += 1
            logger.warning("%s of session %s hangs: no answer for %.1f s", work.method.name, self.id, seconds)
        self._abandon(
            work,
            StepTimeout(
                f"{work.method.name} did not answer within {seconds:.1f} s",
                hint="raise --step-timeout, or send timeout_s with the request",
            ),
        )
        while work.overdue and self.waiting:
            self.waiting.popleft().settle(self._busy())

    def _abandon(self, work: Work, error: PaddockError) -> None:
        """Answer it with `error` now. A task is cancelled; a thread cannot be, and runs on."""
        work.settle(error)
        if work.task is not None:
            work.task.cancel()
            if isinstance(self.environment, RemoteEnvironment) and work.deadline is not None:
                self.environment.enforce_deadline(max(work.deadline - self.clock(), 0.0))

    def _busy(self) -> SessionBusy:
        return SessionBusy("an earlier request was given up, but still holds the environment")

    # -- the connection -----------------------------------------------------------------------------

    def attach(self, attachment: Attachment) -> None:
        """Send answers to this connection from now on, in place of the previous one."""
        before, self.attachment = self.attachment, attachment
        if before is not None and before is not attachment:
            before.on_replaced()
        self.dropped_at = None
        self.last_active = self.manager.clock()
        self.proceed()

    def detach(self, attachment: Attachment, *, dropped: bool) -> None:
        """The connection has ended; `dropped` if the client did not close it properly."""
        if self.attachment is attachment:
            self.attachment = None
            self.last_active = self.manager.clock()
            self.dropped_at = self.last_active if dropped else None
            if dropped:
                self._retract(attachment)
            if self.close_when_detached:
                self.close("it was closed over MCP")
            self.proceed()

    def _retract(self, attachment: Attachment) -> None:
        """Remove the numbered requests of a lost connection that have not begun: its client sends them again.

        To execute them would keep answers in memory for a client that may never return.
        """
        for work in reversed(self.waiting.copy()):
            if type(work.number) is not int or getattr(work.reply, "__self__", None) is not attachment:
                return
            self.waiting.pop()
            self.manager.queued.discard(work)
            self.reply_cache.retract(work.number)

    def record_activity(self) -> None:
        """A request without a connection named this session, so its client is alive."""
        self.dropped_at = None
        self.last_active = self.clock()

    def send(self, frame: bytes) -> None:
        """Send to the attached connection. Without one, only the cache keeps answers of numbered requests."""
        if self.attachment is not None:
            self.attachment.send(frame)

    # -- the end ------------------------------------------------------------------------------------

    def is_expired(self, now: float) -> bool:
        """Whether it was idle for too long. Never during a request, never with a connection attached."""
        if self.attachment is not None or self.is_awaited:
            return False
        limits = self.manager.limits
        idle = now - self.last_active
        if self.dropped_at is not None or (self.origin is Origin.HTTP and not self.was_continued):
            return idle > limits.resume_window
        return limits.session_timeout is not None and idle > limits.session_timeout

    def is_evictable(self, now: float) -> bool:
        """Whether a full server may close this session for a new one."""
        if isinstance(self.environment, RemoteEnvironment) and self.environment.is_lost:
            # Its process has ended. A reset would start another, but new sessions go first.
            return not self.is_running
        if self.attachment is not None or self.is_awaited:
            return False
        is_new = self.episode.phase is Phase.NEW
        if self.origin is Origin.HTTP and not is_new and (not self.was_continued or self.episode.phase is Phase.DONE):
            return True
        limits, idle = self.manager.limits, now - self.last_active
        if self.dropped_at is not None:
            return idle > limits.give_way_after
        # A crashed client looks like an agent that thinks, unless it has never acted.
        return (self.origin is Origin.HTTP or is_new) and idle > limits.resume_window

    def close(self, reason: str) -> None:
        """End the session: running requests are abandoned, waiting ones refused, then the environment is closed."""
        self.catch_up()
        if self.closed:
            return
        self.closed = True
        self.episode.close()
        error = SessionClosed(f"the session was closed: {reason}")
        while self.waiting:
            self.waiting.popleft().settle(error)
        for work in (self.current, *self._overlapping):
            if work is not None:
                self._abandon(work, error)
        attachment, self.attachment = self.attachment, None
        self.manager.forget(self, reason)
        if attachment is not None:
            attachment.on_session_closed(error)
        if not self.is_running:
            self._close_environment()

    def force_close(self) -> None:
        """Close the environment although a call still hangs in it. Only for a server that stops."""
        self.manager.release_threads(self.threads)
        self.threads = self.manager.threads
        self._close_environment()

    def _close_environment(self) -> None:
        if self.is_closing_environment:
            return
        self.is_closing_environment = True
        close = getattr(self.environment, "close", None)
        if close is None:
            self._environment_closed(None, None)
        elif inspect.iscoroutinefunction(close):
            task = self.manager.loop.create_task(call_or_await(close))
            task.add_done_callback(lambda done: self._environment_closed(*_outcome(done)))
        else:
            self.threads.submit(FunctionJob(close, self._environment_closed))

    def _environment_closed(self, _: Any, error: BaseException | None) -> None:
        if error is not None:
            logger.error("close failed in session %s", self.id, exc_info=error)
        self.manager.release_threads(self.threads)
        self.manager.record_end(self)
        if not self.ended.done():
            self.ended.set_result(None)


def _outcome(task: asyncio.Task[Any]) -> tuple[Any, BaseException | None]:
    if task.cancelled():
        return None, asyncio.CancelledError()
    error = task.exception()
    return (None, error) if error is not None else (task.result(), None)
