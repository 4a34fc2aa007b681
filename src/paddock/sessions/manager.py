"""All sessions of one server: opening within capacity, finding by token, reaping, draining."""

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
from paddock.protocol.redact import told
from paddock.sessions.blueprint import Affinity, Blueprint
from paddock.sessions.jobs import Returns, Runner, awaited
from paddock.sessions.relay import OwnThread, Relay
from paddock.sessions.runner import Threads
from paddock.sessions.session import Door, Session, SessionInfo
from paddock.sessions.slots import LEASE, Count, Leases, LocalCount, Slots
from paddock.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from paddock.config import Limits
    from paddock.sessions.work import Work

logger = logging.getLogger("paddock.sessions")
REAP_EVERY = 1.0
ROOM_TIMEOUT = 5.0
ROOM_ELSEWHERE = 1.0
BORROWER_WAITS = 5.0
DRAIN_LOOKS_EVERY = 0.02
LAST_GRACE = 0.5


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
    def __init__(
        self,
        blueprint: Blueprint,
        limits: Limits,
        *,
        count: Count | None = None,
        clock: Callable[[], float] = time.monotonic,
        secrets: tuple[str, ...] = (),
        worker: int = 0,
        host: str | None = None,
    ) -> None:
        self.blueprint = blueprint
        self.limits = limits
        self.clock = clock
        self.secrets = secrets
        self.worker = worker
        self.host = host
        """Names this server and its present life where several machines share the sessions."""
        self.leases = Leases()
        self.loop = asyncio.get_running_loop()
        self.returns = Returns()
        self.threads = Threads(limits.threads, returns=self.returns)
        self._relay = Relay(self.returns)
        self.metrics = Metrics()
        self.slots = Slots(
            count or LocalCount(limits.max_sessions), clock, limits.max_waiting, limits.max_waiting_per_connection
        )
        self.running: set[Work] = set()
        self.queued: set[Work] = set()
        """Requests that wait for their turn in a session."""
        self._draining = False
        self._drain_until = 0.0
        self.ask_others_for_room: Callable[[], Awaitable[bool]] | None = None
        """Set where other processes share the capacity and may have a session that gives way."""
        self.builds_ok: bool | None = None
        self._sessions: dict[str, Session] = {}
        self._ending: set[Session] = set()
        self._borrowed: set[Session] = set()
        self._builds: set[asyncio.Future[Any]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._shared_thread = (
            Threads(1, "paddock-shared", self.returns) if blueprint.affinity is Affinity.SHARED else None
        )
        self._last_reap = clock()

    # -- opening and finding ----------------------------------------------------------------------

    async def open(
        self,
        door: Door,
        *,
        token: str | None = None,
        wait: float | None = None,
        moved: Callable[[int], None] | None = None,
        lease: str | None = None,
        owner: object = None,
    ) -> Session:
        """A new session, as soon as there is a slot for it.

        Waits up to `wait` seconds for one (None: as the server is set up); `moved` hears the place in
        the queue. A `lease` is a slot that `reserve` took for this session. `owner` is the connection, where it
        opens several.
        Raises CapacityReached, QueueTimeout, ServerDraining or FactoryError.
        """
        if self.is_draining():
            raise ServerDraining("the server is shutting down", hint="connect to another one, or again later")
        if not self.leases.redeem(lease or LEASE.get()):
            await self._take_slot(self.limits.queue_timeout if wait is None else wait, moved, owner)
        threads = self.threads_for_session()
        environment = await self.build(threads, holds_slot=True)
        session = Session(self, environment, door, threads, token)
        self._sessions[session.token] = session
        self.metrics.sessions_opened += 1
        logger.info("session %s opened (%s)", session.id, door.value)
        if self.is_draining():
            session.close("the server is shutting down")
            raise ServerDraining("the server is shutting down")
        return session

    def reserve(self) -> str | None:
        """Take a slot for a session that will be opened soon. None if there is no free one, even by making room."""
        if self.is_draining() or not (self.slots.take() or (self.make_room() and self.slots.take())):
            return None
        return self.leases.grant(self.host or "", self.clock())

    def release(self, lease: str) -> None:
        """Give the slot of a lease back, if no session came of it."""
        if self.leases.redeem(lease):
            self.slots.give_back()

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[Session]:
        """A session for one call: built, used once, closed.

        It stands outside of all counting, unless instances may not overlap: then it waits for the slot.
        """
        if self.is_draining():
            raise ServerDraining("the server is shutting down", hint="connect to another one, or again later")
        alone = not self.blueprint.concurrent
        if alone:
            await self._take_slot(BORROWER_WAITS)
        threads = self.threads_for_session()
        environment = await self.build(threads, holds_slot=alone)
        session = Session(self, environment, Door.HTTP, threads, holds_slot=alone)
        self._borrowed.add(session)
        try:
            yield session
        finally:
            self._borrowed.discard(session)
            session.close("it was for one call")

    def is_draining(self) -> bool:
        return self._draining

    def knows(self, token: str) -> bool:
        return token in self._sessions

    def find(self, token: str) -> Session:
        session = self._sessions.get(token)
        if session is None:
            raise SessionNotFound(
                f"Unknown session_id: {token}",
                hint="it was closed, or was left unused too long; open a new one",
            )
        return session

    def new_token(self) -> str:
        """An unguessable token. It begins with what keeps the session: a host, or a worker process's number."""
        if self.host is not None:
            return f"{self.host}-{uuid.uuid4()}"
        return f"{self.worker:02x}{str(uuid.uuid4())[2:]}"

    async def build(self, threads: Runner, *, holds_slot: bool = False) -> Any:
        """A fresh environment, built on a thread. Raises FactoryError, and gives the caller's slot back then.

        A build that nobody waits for any more is closed when it is done, and only then is its slot free.
        """
        building = asyncio.ensure_future(threads.call(self.blueprint.build))
        self._builds.add(building)
        building.add_done_callback(self._builds.discard)
        try:
            # Not wait_for: it may swallow a cancellation, and the session would belong to nobody.
            async with asyncio.timeout(self.limits.step_timeout):
                environment = await asyncio.shield(building)
        except BaseException as error:
            self._keep(self.loop.create_task(self._clear_away(building, threads, holds_slot)))
            if not isinstance(error, Exception):
                raise
            self.builds_ok = False
            raise self._factory_error(error) from error
        self.builds_ok = True
        return environment

    async def _clear_away(self, building: asyncio.Future[Any], threads: Runner, holds_slot: bool) -> None:
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
            return await awaited(method, *arguments)
        return await threads.call(lambda: method(*arguments))

    async def dispose(self, environment: Any, threads: Runner) -> None:
        """Close an environment that belongs to no session."""
        if hasattr(environment, "close"):
            try:
                await self.invoke(threads, environment, "close")
            except Exception:
                logger.exception("close failed")

    async def _take_slot(self, wait: float, moved: Callable[[int], None] | None = None, owner: object = None) -> None:
        if self.slots.take():
            return
        if self.slots.waiting and wait > 0:
            # Room is made for the first of them in every tick. What a newcomer costs must not depend on the others.
            await self._wait_for_slot(wait, moved, owner)
            return
        gone = self.make_room()
        ending = [session.ended for session in self._ending if not session.is_running]
        if ending and not self.blueprint.concurrent:
            # Instances may not overlap, so a slot is free only once its environment is closed.
            await asyncio.wait(ending, timeout=ROOM_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if self.slots.take():
            return
        if gone is None and self.ask_others_for_room is not None and await self.ask_others_for_room():
            wait = max(wait, ROOM_ELSEWHERE)
        taken, most = self.slots.taken(), self.slots.capacity
        if wait <= 0:
            self.metrics.sessions_refused += 1
            raise CapacityReached(
                f"Server at capacity: {taken}/{most} sessions active. Cannot accept new connections.",
                hint="try again later, wait in the queue (queue_timeout), or raise --max-sessions",
                active_sessions=taken,
                max_sessions=most,
            )
        await self._wait_for_slot(wait, moved, owner)

    async def _wait_for_slot(self, wait: float, moved: Callable[[int], None] | None, owner: object) -> None:
        try:
            await self.slots.wait(wait, moved, owner=owner)
        except CapacityReached:
            self.metrics.sessions_refused += 1
            raise

    async def _ask_others(self, ask: Callable[[], Awaitable[bool]]) -> None:
        await ask()

    def giving_way(self, now: float) -> int:
        """How many sessions would make room."""
        return sum(1 for session in self._sessions.values() if session.gives_way(now))

    def make_room(self) -> Session | None:
        """Close the session that gives way and was unused for longest, if there is one."""
        now = self.clock()
        ready = [session for session in self._sessions.values() if session.gives_way(now)]
        if not ready:
            return None
        gone = min(ready, key=lambda session: session.last_active)
        gone.close("it made room for another")
        return gone

    def _factory_error(self, error: Exception) -> FactoryError:
        name = getattr(self.blueprint.make, "__name__", self.blueprint.cls.__name__)
        logger.error("the environment factory %r failed", name, exc_info=error)
        message = f"Environment factory '{name}' failed to create instance. {told(error, self.secrets)}"
        return FactoryError(message, factory_name=name)

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- called by sessions -----------------------------------------------------------------------

    def threads_for_session(self) -> Runner:
        if self._shared_thread is not None:
            return self._shared_thread
        if self.blueprint.affinity is Affinity.OWN:
            return OwnThread(self._relay)
        return self.threads

    def release_threads(self, threads: Runner) -> None:
        if threads is not self.threads and threads is not self._shared_thread:
            threads.close()

    def forget(self, session: Session, reason: str) -> None:
        """The session takes no more requests. Its slot is free unless instances may not overlap."""
        self._ending.add(session)
        if self._sessions.pop(session.token, None) is None:
            return
        self.metrics.count_closed(reason)
        logger.info("session %s closed after %d steps: %s", session.id, session.episode.steps, reason)
        if self.blueprint.concurrent:
            self.slots.give_back()

    def ended(self, session: Session) -> None:
        """The session's environment is closed."""
        self._ending.discard(session)
        if session.holds_slot and not self.blueprint.concurrent:
            self.slots.give_back()

    # -- time -------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look after everything that has a deadline. Called about ten times a second."""
        self.returns.deliver()
        now = self.clock()
        for work in [*self.running, *self.queued]:
            if work.deadline is not None and now >= work.deadline and not work.expired:
                work.session.expire(work)
        self.threads.compensate()
        self.slots.expire(now)
        for lease in self.leases.expired(now):
            self.release(lease)
        if self.slots.waiting:
            gone = self.make_room()
            self.slots.admit()
            if gone is None and self.slots.waiting and self.ask_others_for_room is not None:
                # A session of another process may have begun to give way since the newcomer came.
                self._keep(self.loop.create_task(self._ask_others(self.ask_others_for_room)))
        if now - self._last_reap >= REAP_EVERY:
            self._last_reap = now
            for session in list(self._sessions.values()):
                if session.is_expired(now):
                    session.close("nobody used it for too long")

    def abandon(self) -> None:
        """The loop has ended without a drain: close what is left of it on a thread, and come back no more."""
        left = [s for s in (*self._sessions.values(), *self._ending, *self._borrowed) if not s.is_closing_environment]
        environments = [session.environment for session in left]
        threading.Thread(target=_close_all, args=(environments,), name="paddock-abandoned", daemon=True).start()
        self.threads.close()
        if self._shared_thread is not None:
            self._shared_thread.close()

    def hurry(self) -> None:
        """Drain without any more grace."""
        self._drain_until = self.clock()

    async def drain(self, grace: float) -> None:
        """Refuse newcomers, let running requests finish within `grace`, then close every session."""
        self._draining = True
        self.slots.turn_away(ServerDraining("the server is shutting down"))
        self._drain_until = self.clock() + grace
        while (self.running or self._builds or self._tasks) and self.clock() < self._drain_until:
            await asyncio.sleep(DRAIN_LOOKS_EVERY)
            self.returns.deliver()
        for session in [*self._sessions.values(), *self._borrowed]:
            session.close("the server is shutting down")
        if self._ending:
            left = max(LAST_GRACE, self._drain_until - self.clock())
            await asyncio.wait([session.ended for session in self._ending], timeout=left)
        hanging = list(self._ending)
        for session in hanging:
            session.force_close()
        if hanging:
            self.threads.compensate()
            await asyncio.wait([session.ended for session in hanging], timeout=1.0)
        self.threads.close()
        if self._shared_thread is not None:
            self._shared_thread.close()

    # -- looking ----------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
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
        return [session.info() for session in self._sessions.values()]


def _close_all(environments: list[Any]) -> None:
    for environment in environments:
        try:
            asyncio.run(awaited(getattr(environment, "close", lambda: None)))
        except Exception:
            logger.exception("close failed")
