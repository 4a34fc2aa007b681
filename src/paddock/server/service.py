"""One environment being served: the parts that every transport shares, and their lifetime."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from paddock.errors import PaddockError
from paddock.server.outbox import Outbox
from paddock.sessions.dispatch import Dispatch
from paddock.sessions.isolation.isolate import isolate
from paddock.sessions.manager import SessionManager

if TYPE_CHECKING:
    from paddock.config import ServerConfig
    from paddock.server.vector import Lane
    from paddock.server.workers import Colleagues
    from paddock.sessions.blueprint import Blueprint
    from paddock.types import EnvironmentMetadata

logger = logging.getLogger("paddock.server")
TICK = 0.1
PROBE_WAIT = 0.25
PROBE_AGAIN = 5.0
LOOK_AT_SOCKETS_EVERY = 10


class Watched(Protocol):
    """A socket that wants to be looked after: pinged when silent, dropped when dead."""

    def look_after(self, now: float) -> None: ...


class Peers(Protocol):
    """Servers on other machines that are shown together with this one."""

    waiting: int
    """Newcomers that wait in front of all of them."""

    async def gather(self, path: str, headers: dict[str, str]) -> list[bytes]:
        """The answers of all others to the same GET."""
        ...


class Service:
    """Made before the loop runs, started inside it. `manager` exists between start and stop."""

    def __init__(self, blueprint: Blueprint, config: ServerConfig) -> None:
        blueprint.require_concurrency(config.limits.max_sessions)
        if (config.isolation or getattr(blueprint.cls, "isolation", "thread")) == "process":
            shared: int = getattr(blueprint.cls, "sessions_per_process", 1)
            isolate(
                blueprint,
                sessions_per_process=shared if config.sessions_per_process is None else config.sessions_per_process,
                find=config.find_environment,
                seconds=config.limits.step_timeout,
            )
        self.blueprint = blueprint
        self.config = config
        self.dispatch = Dispatch(blueprint, config.limits.step_timeout)
        self.colleagues: Colleagues | None = None
        self.host: str | None = None
        """Set before the start where this server is one of several machines: what its session tokens begin with."""
        self.peers: Peers | None = None
        self.has_page = False
        self.opening: WeakValueDictionary[str, Lane] = WeakValueDictionary()
        """By the token that its client chose: the lane of a vector that asked for it last."""
        self.outlives_its_loops = False
        """Whether loops come and go under it. Then no session lasts from one HTTP request to the next."""
        self.sockets: set[Watched] = set()
        self.outbox: Outbox
        self.stopping = False
        self.left_running = False
        """Whether something of an environment went on when the server had stopped, and could not be ended."""
        self._manager: SessionManager | None = None
        self._metadata: EnvironmentMetadata | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._probe: asyncio.Task[Any] | None = None
        self._probed_at = 0.0
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def manager(self) -> SessionManager:
        if self._manager is None or self._manager.loop.is_closed():
            self.start()
        assert self._manager is not None
        return self._manager

    def start(self) -> None:
        """Begin to serve on the running loop. Does nothing if that has happened."""
        if self._manager is not None and not self._manager.loop.is_closed():
            return
        if self._manager is not None:
            self._leave_behind(self._manager)
        colleagues, access = self.colleagues, self.config.access
        self._manager = SessionManager(
            self.blueprint,
            self.config.limits,
            count=colleagues.count if colleagues else None,
            secrets=(access.token,) if access.token else (),
            worker=colleagues.number if colleagues else 0,
            host=self.host,
        )
        if colleagues is not None:
            self._manager.ask_others_for_room = colleagues.ask_for_room
        self.outbox = Outbox(self.sockets)
        if self.blueprint.isolation is not None:
            self.blueprint.isolation.start()
        self._tick()

    def _leave_behind(self, manager: SessionManager) -> None:
        """Its loop ended without a drain: each call of a test client has a loop of its own."""
        manager.abandon()
        self.outlives_its_loops = True
        self._probe = None
        self.sockets.clear()
        self._tasks.clear()

    def hurry(self) -> None:
        """Stop sooner. Does nothing if it is not stopping."""
        if self._manager is not None:
            self._manager.hurry()

    async def stop(self, grace: float | None = None) -> None:
        """Drain: running requests end within `grace`, then every environment is closed."""
        self.stopping = True
        if self._manager is None:
            return
        await self._manager.drain(self.config.limits.drain_grace if grace is None else grace)
        if self._timer is not None:
            self._timer.cancel()
        if self.blueprint.isolation is not None:
            await asyncio.to_thread(self.blueprint.isolation.stop)
        self._manager = None

    async def metadata(self) -> EnvironmentMetadata:
        """What the environment says of itself. An instance is asked once."""
        if self._metadata is None:
            manager = self.manager
            async with manager.borrow() as session:
                described = await session.invoke("get_metadata") if self.blueprint.has_metadata else None
                self._metadata = self.blueprint.metadata_from(described)
        return self._metadata

    async def can_build(self) -> bool | None:
        """Whether environments can be built; None while that is being found out.

        Sessions show it. Where none has, or the last build failed, one is tried beside the caller.
        """
        manager = self.manager
        if not manager.builds_ok:
            if self._probe is None or (self._probe.done() and manager.clock() - self._probed_at > PROBE_AGAIN):
                self._probed_at = manager.clock()
                self._probe = self.spawn(self._try_to_build())
            await asyncio.wait([self._probe], timeout=PROBE_WAIT)
        return manager.builds_ok

    async def _try_to_build(self) -> None:
        try:
            async with self.manager.borrow():
                pass
        except PaddockError:
            logger.debug("the probe could not build an environment", exc_info=True)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine beside the caller; it is kept from being collected half-way."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a conversation failed", exc_info=error)

    def _tick(self) -> None:
        manager = self._manager
        if manager is None:
            return
        self._timer = manager.loop.call_later(TICK, self._tick)
        self._ticks += 1
        try:
            manager.tick()
            if self.colleagues is not None:
                self.colleagues.tick(self)
            if self._ticks % LOOK_AT_SOCKETS_EVERY == 0:
                now = manager.clock()
                for socket in list(self.sockets):
                    socket.look_after(now)
        except Exception:
            logger.exception("housekeeping failed; it goes on")
