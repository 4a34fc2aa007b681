"""One served environment: the parts that every transport shares, and their lifetime."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from paddock.config import PADDOCK_FASTPATH
from paddock.errors import PaddockError
from paddock.sessions.dispatch import Dispatch
from paddock.sessions.isolation.isolate import isolate
from paddock.sessions.manager import SessionManager
from paddock.sessions.threads import Threads

if TYPE_CHECKING:
    from paddock.config import ServerConfig
    from paddock.server.fastpath import FastPath
    from paddock.server.vector import SubSession
    from paddock.server.workers import SiblingWorkers
    from paddock.sessions.spec import EnvironmentSpec
    from paddock.types import EnvironmentMetadata

logger = logging.getLogger("paddock.server")
TICK_SECONDS = 0.1
PROBE_WAIT_SECONDS = 0.25
PROBE_INTERVAL_SECONDS = 5.0
TICKS_PER_SOCKET_CHECK = 10


class OpenSocket(Protocol):
    """A WebSocket that is checked once a second."""

    def check_alive(self, now: float) -> None:
        """Ping it when silent, drop it when dead. Called every second."""


class Peers(Protocol):
    """Servers on other machines that share the sessions with this one."""

    waiting: int
    """How many clients wait for a slot in any of them."""

    async def gather(self, path: str, headers: dict[str, str]) -> list[bytes]:
        """The answers of all others to the same GET."""
        ...


class Service:
    """Made before the loop runs, started inside it. `manager` exists between start and stop."""

    def __init__(self, spec: EnvironmentSpec, config: ServerConfig) -> None:
        spec.require_concurrency(config.limits.max_sessions)
        if (config.isolation or getattr(spec.cls, "isolation", "thread")) == "process":
            default: int = getattr(spec.cls, "sessions_per_process", 1)
            isolate(
                spec,
                sessions_per_process=default if config.sessions_per_process is None else config.sessions_per_process,
                find=config.find_environment,
                seconds=config.limits.step_timeout,
            )
        self.spec = spec
        self.config = config
        self.dispatch = Dispatch(spec, config.limits.step_timeout)
        self.siblings: SiblingWorkers | None = None
        self.host: str | None = None
        """Set before the start where this server is one of several machines: what its session tokens begin with."""
        self.peers: Peers | None = None
        self.has_page = False
        self.opening: WeakValueDictionary[str, SubSession] = WeakValueDictionary()
        """By the token that its client chose: the sub-session of a vector that asked for it last."""
        self.outlives_its_loops = False
        """Whether it was started on more than one loop. Then no session lasts from one HTTP request to the next."""
        self.sockets: set[OpenSocket] = set()
        self.fastpath = load_fastpath(self)
        """The optional shortcuts, if they are installed and enabled."""
        self.stopping = False
        self.left_running = False
        """Whether a task or thread of an environment still ran when the server had stopped."""
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
        """Start to serve on the running loop. Does nothing if it is started."""
        if self._manager is not None and not self._manager.loop.is_closed():
            return
        if self._manager is not None:
            self._abandon_manager(self._manager)
        siblings, access = self.siblings, self.config.access
        self._manager = SessionManager(
            self.spec,
            self.config.limits,
            count=siblings.count if siblings else None,
            secrets=(access.token,) if access.token else (),
            worker=siblings.number if siblings else 0,
            host=self.host,
            make_threads=Threads if self.fastpath is None else self.fastpath.make_threads,
        )
        if siblings is not None:
            self._manager.request_eviction = siblings.request_eviction
        if self.fastpath is not None:
            self.fastpath.start()
        if self.spec.isolation is not None:
            self.spec.isolation.start()
        self._tick()

    def _abandon_manager(self, manager: SessionManager) -> None:
        """Its loop ended without a drain: Starlette's test client runs each call on its own loop."""
        manager.abandon()
        self.outlives_its_loops = True
        self._probe = None
        self.sockets.clear()
        self._tasks.clear()

    def end_grace(self) -> None:
        """End the grace of a drain now. Does nothing if the service does not stop."""
        if self._manager is not None:
            self._manager.end_grace()

    async def stop(self, grace: float | None = None) -> None:
        """Drain: running requests end within `grace`, then every environment is closed."""
        self.stopping = True
        if self._manager is None:
            return
        await self._manager.drain(self.config.limits.drain_grace if grace is None else grace)
        if self._timer is not None:
            self._timer.cancel()
        if self.spec.isolation is not None:
            await asyncio.to_thread(self.spec.isolation.stop)
        self._manager = None

    async def metadata(self) -> EnvironmentMetadata:
        """The environment's metadata. An instance is built for it once."""
        if self._metadata is None:
            manager = self.manager
            async with manager.borrow() as session:
                metadata = await session.invoke("get_metadata") if self.spec.has_metadata else None
                self._metadata = self.spec.metadata_from(metadata)
        return self._metadata

    async def can_build(self) -> bool | None:
        """Whether environments can be built; None while that is not known yet.

        Opening a session shows it. If none was opened, or the last build failed, an environment is built as a probe.
        """
        manager = self.manager
        if not manager.builds_ok:
            if self._probe is None or (
                self._probe.done() and manager.clock() - self._probed_at > PROBE_INTERVAL_SECONDS
            ):
                self._probed_at = manager.clock()
                self._probe = self.spawn(self._try_to_build())
            await asyncio.wait([self._probe], timeout=PROBE_WAIT_SECONDS)
        return manager.builds_ok

    async def _try_to_build(self) -> None:
        try:
            async with self.manager.borrow():
                pass
        except PaddockError:
            logger.debug("the probe could not build an environment", exc_info=True)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a coroutine as a task. The service keeps a reference, so that it is not garbage-collected."""
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
        self._timer = manager.loop.call_later(TICK_SECONDS, self._tick)
        self._ticks += 1
        try:
            manager.tick()
            if self.siblings is not None:
                self.siblings.tick(self)
            if self._ticks % TICKS_PER_SOCKET_CHECK == 0:
                now = manager.clock()
                for socket in list(self.sockets):
                    socket.check_alive(now)
        except Exception:
            logger.exception("housekeeping failed; it goes on")


def load_fastpath(service: Service) -> FastPath | None:
    """The shortcuts of `server/fastpath`; None if `PADDOCK_FASTPATH=0` disables them, or the package was removed."""
    if not PADDOCK_FASTPATH.read():
        return None
    try:
        from paddock.server.fastpath import FastPath
    except ImportError:
        return None
    return FastPath(service)
