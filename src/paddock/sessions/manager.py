"""All sessions of one server: opens them within capacity, finds them by token, closes them when idle, drains.

Knows nothing of transports, and nothing of what a request does.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.errors import CapacityReached, FactoryError, ServerDraining, SessionNotFound
from paddock.protocol.redact import describe_error
from paddock.sessions.capacity import LEASE, Leases, LocalSlotCount, SlotCount, Slots
from paddock.sessions.session import Origin, Session, SessionInfo
from paddock.sessions.spec import Affinity, EnvironmentSpec
from paddock.sessions.threads import Runner, Threads, call_or_await
from paddock.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from paddock.config import Limits
    from paddock.sessions.work import Work

logger = logging.getLogger("paddock.sessions")
REAP_SECONDS = 1.0
"""How often idle sessions are looked for."""
CLOSING_SECONDS = 5.0
"""How long a new session waits for an environment that is being closed, if instances may not overlap."""
EVICTION_SECONDS = 1.0
"""How long a new session waits at least for another process to evict one."""
BORROW_WAIT_SECONDS = 5.0
"""How long a call without a session waits for the slot, if instances may not overlap."""
DRAIN_POLL_SECONDS = 0.02
MIN_CLOSE_SECONDS = 0.5
"""How long environments may take to close when the grace of a drain is over."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot that `/health`, `/metrics`, the page and the command line all read."""

    sessions: int
    capacity: int
    waiting: int
    running: int
    hung: int
    threads: int
    draining: bool
    builds_ok: bool | None
    """Whether the last environment could be built; None before the first."""


class SessionManager:
    """Opens, finds and closes the sessions of one environment class."""

    def __init__(
        self,
        spec: EnvironmentSpec,
        limits: Limits,
        *,
        count: SlotCount | None = None,
        clock: Callable[[], float] = time.monotonic,
        secrets: tuple[str, ...] = (),
        worker: int = 0,
        host: str | None = None,
        make_threads: Callable[[int], Threads] = Threads,
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.clock = clock
        self.secrets = secrets
        self.worker = worker
        self.host = host
        """The prefix of this server's session tokens, where several machines share the sessions."""
        self.leases = Leases()
        self.loop = asyncio.get_running_loop()
        self._threads = make_threads(limits.threads)
        self.completions = self._threads.completions
        self.threads = self._threads.pool
        self.metrics = Metrics()
        self.slots = Slots(
            count or LocalSlotCount(limits.max_sessions), clock, limits.max_waiting, limits.max_waiting_per_connection
        )
        self.running: set[Work] = set()
        self.queued: set[Work] = set()
        """Requests that wait for their turn in a session."""
        self._draining = False
        self._drain_until = 0.0
        self.request_eviction: Callable[[], Awaitable[bool]] | None = None
        """Set if other processes share the capacity: asks one of them to evict a session. False if none can."""
        self.builds_ok: bool | None = None
        self._sessions: dict[str, Session] = {}
        self._ending: set[Session] = set()
        self._borrowed: set[Session] = set()
        self._builds: set[asyncio.Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shared_thread = (
            self._threads.make_pool(1, "paddock-shared") if spec.affinity is Affinity.SHARED else None
        )
        self._last_reap = clock()

    # -- opening and finding ----------------------------------------------------------------------

    async def open(
        self,
        origin: Origin,
        *,
        token: str | None = None,
        wait: float | None = None,
        on_place: Callable[[int], None] | None = None,
        lease: str | None = None,
        owner: object = None,
    ) -> Session:
        """A new session, as soon as there is a slot for it.

        Waits up to `wait` seconds for one (None: the server's default). `on_place` is called with the place in the
        queue. A `lease` is a slot that `reserve` took for this session. `owner` is the connection, if it opens
        several sessions. Raises CapacityReached, QueueTimeout, ServerDraining or FactoryError.
        """
        if self.is_draining():
            raise ServerDraining("the server is shutting down", hint="connect to another one, or again later")
        if not self.leases.redeem(lease or LEASE.get()):
            await self._take_slot(self.limits.queue_timeout if wait is None else wait, on_place, owner)
        threads = self.threads_for_session()
        environment = await self.build(threads, holds_slot=True)
        session = Session(self, environment, origin, threads, token)
        self._sessions[session.token] = session
        self.metrics.sessions_opened += 1
        logger.info("session %s opened (%s)", session.id, origin.value)
        if self.is_draining():
            session.close("the server is shutting down")
            raise ServerDraining("the server is shutting down")
        return session

    def reserve(self) -> str | None:
        """Take a slot for a session that will be opened soon. None if all are taken and none can be evicted."""
        if self.is_draining() or not (self.slots.take() or (self.evict_one() and self.slots.take())):
            return None
        return self.leases.grant(self.host or "", self.clock())

    def release(self, lease: str) -> None:
        """Give the slot of a lease back, unless a session used it."""
        if self.leases.redeem(lease):
            self.slots.give_back()

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Session]:
        """A session for one call: built, used once, closed.

        It takes no slot, unless instances may not overlap: then it waits for the only one.
        """
        if self.is_draining():
            raise ServerDraining("the server is shutting down", hint="connect to another one, or again later")
        alone = not self.spec.concurrent
        if alone:
            await self._take_slot(BORROW_WAIT_SECONDS)
        threads = self.threads_for_session()
        environment = await self.build(threads, holds_slot=alone)
        session = Session(self, environment, Origin.HTTP, threads, holds_slot=alone)
        self._borrowed.add(session)
        try:
            yield session
        finally:
            self._borrowed.discard(session)
            session.close("it was for one call")

    def is_draining(self) -> bool:
        """Whether the server stops, and opens no session any more."""
        return self._draining

    def knows(self, token: str) -> bool:
        """Whether there is an open session with this token."""
        return token in self._sessions

    def find(self, token: str) -> Session:
        """The open session with this token. Raises SessionNotFound."""
        session = self._sessions.get(token)
        if session is None:
            raise SessionNotFound(
                f"Unknown session_id: {token}",
                hint="it was closed, or was left unused too long; open a new one",
            )
        return session

    def new_token(self) -> str:
        """An unguessable token. It begins with the host or the worker number that keeps the session."""
        if self.host is not None:
            return f"{self.host}-{uuid.uuid4()}"
        return f"{self.worker:02x}{str(uuid.uuid4())[2:]}"

    async def build(self, threads: Runner, *, holds_slot: bool = False) -> Any:
        """A new environment, built on a thread. Raises FactoryError after giving the caller's slot back.

        If the caller is cancelled, the environment is closed when it is built, and only then is its slot free.
        """
        building = asyncio.ensure_future(threads.call(self.spec.build))
        self._builds.add(building)
        building.add_done_callback(self._builds.discard)
        try:
            # Not wait_for: it may swallow a cancellation, and the session would have no owner.
            async with asyncio.timeout(self.limits.step_timeout):
                environment = await asyncio.shield(building)
        except BaseException as error:
            self._keep_task(self.loop.create_task(self._discard_build(building, threads, holds_slot)))
            if not isinstance(error, Exception):
                raise
            self.builds_ok = False
            raise self._factory_error(error) from error
        self.builds_ok = True
        return environment

    async def _discard_build(self, building: asyncio.Future[Any], threads: Runner, holds_slot: bool) -> None:
        try:
            await self.dispose(await building, threads)
        except Exception:
            logger.debug("an abandoned build failed", exc_info=True)
        finally:
            self.release_threads(threads)
            if holds_slot:
                self.slots.give_back()

    async def invoke(self, threads: Runner, environment: Any, name: str, *arguments: Any) -> Any:
        """Call a method that may be sync (then on a thread) or async."""
        method = getattr(environment, name)
        if inspect.iscoroutinefunction(method):
            return await call_or_await(method, *arguments)
        return await threads.call(lambda: method(*arguments))

    async def dispose(self, environment: Any, threads: Runner) -> None:
        """Close an environment that belongs to no session."""
        if hasattr(environment, "close"):
            try:
                await self.invoke(threads, environment, "close")
            except Exception:
                logger.exception("close failed")

    async def _take_slot(
        self, wait: float, on_place: Callable[[int], None] | None = None, owner: object = None
    ) -> None:
        if self.slots.take():
            return
        if self.slots.waiting and wait > 0:
            # `tick` evicts for the first waiter. A new one must not cost more because others wait.
            await self._wait_for_slot(wait, on_place, owner)
            return
        evicted = self.evict_one()
        ending = [session.ended for session in self._ending if not session.is_running]
        if ending and not self.spec.concurrent:
            # Instances may not overlap, so a slot is free only once its environment is closed.
            await asyncio.wait(ending, timeout=CLOSING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if self.slots.take():
            return
        if evicted is None and self.request_eviction is not None and await self.request_eviction():
            wait = max(wait, EVICTION_SECONDS)
        in_use, capacity = self.slots.in_use(), self.slots.capacity
        if wait <= 0:
            self.metrics.sessions_refused += 1
            raise CapacityReached(
                f"Server at capacity: {in_use}/{capacity} sessions active. Cannot accept new connections.",
                hint="try again later, wait in the queue (queue_timeout), or raise --max-sessions",
                active_sessions=in_use,
                max_sessions=capacity,
            )
        await self._wait_for_slot(wait, on_place, owner)

    async def _wait_for_slot(self, wait: float, on_place: Callable[[int], None] | None, owner: object) -> None:
        try:
            await self.slots.wait(wait, on_place, owner=owner)
        except CapacityReached:
            self.metrics.sessions_refused += 1
            raise

    def count_evictable(self, now: float) -> int:
        """How many sessions can be evicted."""
        return sum(1 for session in self._sessions.values() if session.is_evictable(now))

    def evict_one(self) -> Session | None:
        """Close the evictable session that was idle for longest. None if there is none."""
        now = self.clock()
        evictable = (session for session in self._sessions.values() if session.is_evictable(now))
        evicted = min(evictable, key=lambda session: session.last_active, default=None)
        if evicted is not None:
            evicted.close("it made room for another")
        return evicted

    def _factory_error(self, error: Exception) -> FactoryError:
        name = getattr(self.spec.make, "__name__", self.spec.cls.__name__)
        logger.error("the environment factory %r failed", name, exc_info=error)
        message = f"Environment factory '{name}' failed to create instance. {describe_error(error, self.secrets)}"
        return FactoryError(message, factory_name=name)

    def _keep_task(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- called by sessions -----------------------------------------------------------------------

    def threads_for_session(self) -> Runner:
        """Where the calls of a new session run: the pool, the one shared thread, or a thread of its own."""
        if self._shared_thread is not None:
            return self._shared_thread
        if self.spec.affinity is Affinity.OWN:
            return self._threads.make_own_thread()
        return self.threads

    def release_threads(self, threads: Runner) -> None:
        """End the thread of a session, if it has one of its own."""
        if threads is not self.threads and threads is not self._shared_thread:
            threads.close()

    def forget(self, session: Session, reason: str) -> None:
        """The session takes no more requests. Its slot is free unless instances may not overlap."""
        self._ending.add(session)
        if self._sessions.pop(session.token, None) is None:
            return
        self.metrics.count_closed(reason)
        logger.info("session %s closed after %d steps: %s", session.id, session.episode.steps, reason)
        if self.spec.concurrent:
            self.slots.give_back()

    def record_end(self, session: Session) -> None:
        """The session's environment is closed."""
        self._ending.discard(session)
        if session.holds_slot and not self.spec.concurrent:
            self.slots.give_back()

    # -- deadlines and the end -----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Check everything that has a deadline. Called about ten times a second."""
        self.completions.deliver()
        now = self.clock()
        for work in [*self.running, *self.queued]:
            if work.deadline is not None and now >= work.deadline and not work.expired:
                work.session.expire(work)
        self.threads.compensate()
        self.slots.expire(now)
        for lease in self.leases.expired(now):
            self.release(lease)
        if self.slots.waiting:
            evicted = self.evict_one()
            self.slots.admit()
            if evicted is None and self.slots.waiting and self.request_eviction is not None:
                # A session of another process may have become evictable in the meantime.
                self._keep_task(asyncio.ensure_future(self.request_eviction()))
        if now - self._last_reap >= REAP_SECONDS:
            self._last_reap = now
            for session in list(self._sessions.values()):
                if session.is_expired(now):
                    session.close("it was idle for too long")

    def abandon(self) -> None:
        """The loop has ended without a drain: close all environments on a thread."""
        sessions = (*self._sessions.values(), *self._ending, *self._borrowed)
        environments = [session.environment for session in sessions if not session.is_closing_environment]
        threading.Thread(target=_close_all, args=(environments,), name="paddock-abandoned", daemon=True).start()
        self.threads.close()
        if self._shared_thread is not None:
            self._shared_thread.close()

    def end_grace(self) -> None:
        """End the grace of a drain now."""
        self._drain_until = self.clock()

    async def drain(self, grace: float) -> None:
        """Refuse new sessions, let running requests finish within `grace` seconds, then close every session."""
        self._draining = True
        self.slots.reject_all(ServerDraining("the server is shutting down"))
        self._drain_until = self.clock() + grace
        while (self.running or self._builds or self._tasks) and self.clock() < self._drain_until:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
            self.completions.deliver()
        for session in [*self._sessions.values(), *self._borrowed]:
            session.close("the server is shutting down")
        if self._ending:
            timeout = max(MIN_CLOSE_SECONDS, self._drain_until - self.clock())
            await asyncio.wait([session.ended for session in self._ending], timeout=timeout)
        hanging = list(self._ending)
        for session in hanging:
            session.force_close()
        if hanging:
            self.threads.compensate()
            await asyncio.wait([session.ended for session in hanging], timeout=1.0)
        self.threads.close()
        if self._shared_thread is not None:
            self._shared_thread.close()

    # -- statistics --------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """A snapshot for `/health` and `/metrics`."""
        return Statistics(
            sessions=len(self._sessions),
            capacity=self.slots.capacity,
            waiting=self.slots.waiting,
            running=sum(1 for work in [*self.running] if not work.is_answered),
            hung=self.metrics.hung_calls,
            threads=self.threads.count,
            draining=self._draining,
            builds_ok=self.builds_ok,
        )

    def sessions(self) -> list[SessionInfo]:
        """All open sessions as of now."""
        return [session.info() for session in self._sessions.values()]


def _close_all(environments: list[Any]) -> None:
    for environment in environments:
        try:
            asyncio.run(call_or_await(getattr(environment, "close", lambda: None)))
        except Exception:
            logger.exception("close failed")
