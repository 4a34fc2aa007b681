"""The lifecycle of instances: pending, running, then stopped or error. Each ends exactly once.

A start belongs to the plane, not to the request that caused it: a client that lost its connection can get its
instance again. Knows processes and database rows, not HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from paddock.child_process import kill_orphan
from paddock.errors import ServerDraining
from paddock.fleet.plane import instance_records
from paddock.fleet.plane.processes import LocalLauncher, StartFailed, WarmPool

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from paddock.fleet.plane.database import PlaneDatabase
    from paddock.fleet.plane.instance_records import InstanceRecord, InstanceRequest
    from paddock.fleet.plane.processes import HostedProcess, Launcher
    from paddock.fleet.plane.settings import PlaneSettings

logger = logging.getLogger("paddock.fleet.plane")

LATE_HEARTBEAT_SECONDS = 0.5
PLANE_GONE = "the plane that hosted it ended"
PLANE_STOPPED = "the plane was stopped"


@dataclass(slots=True, eq=False)
class LiveInstance:
    """An instance that has not ended."""

    request: InstanceRequest
    created_at: float
    process: HostedProcess | None = None
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    start: asyncio.Task[InstanceRecord] | None = None
    ending: asyncio.Task[None] | None = None
    end_reason: str = ""

    def set_timer(self, name: str, seconds: float, action: Callable[[], object]) -> None:
        if name in self.timers:
            self.timers.pop(name).cancel()
        self.timers[name] = asyncio.get_running_loop().call_later(seconds, action)

    def clear_timers(self) -> None:
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()


class InstanceManager:
    """All instances of a plane."""

    def __init__(
        self,
        settings: PlaneSettings,
        database: PlaneDatabase,
        *,
        api_key: str,
        runner_token: str | None,
        launcher: Launcher | None = None,
    ) -> None:
        self._settings = settings
        self._database = database
        self._api_key = api_key if settings.gate else None
        self._runner_token = runner_token
        self._folder = settings.state / "instances"
        self._live: dict[str, LiveInstance] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_closing = False
        self._faults: list[dict[str, Any]] = []
        self.launcher: Launcher = launcher or LocalLauncher(settings.instance_command)
        self.pool = WarmPool(
            self.launcher,
            settings.state / "warm",
            warm=settings.warm,
            parallel=settings.parallel_starts,
            end_seconds=settings.end_seconds,
        )
        self.totals: Counter[str] = Counter()
        self.start_seconds: deque[float] = deque(maxlen=1000)

    async def open(self) -> None:
        """End the instances that an earlier plane left, and fill the pool."""
        orphans = await self._database.run(instance_records.end_orphans, PLANE_GONE)
        killed = sum(each.pid is not None and kill_orphan(each.pid, each.started_ticks) for each in orphans)
        if killed:
            logger.warning("killed %d processes that an earlier plane left behind", killed)
        for folder in (self._folder, self._settings.state / "warm"):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        await self.launcher.open()
        self.pool.open()

    async def close(self) -> None:
        """Stop every instance and every warm process."""
        self._is_closing = True
        await asyncio.gather(*(self._end(live, "stopped", PLANE_STOPPED) for live in list(self._live.values())))
        await self.pool.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.end_seconds)
        await self.launcher.close()

    # -- operations -----------------------------------------------------------------------------------

    async def create(self, request: InstanceRequest) -> InstanceRecord:
        """The instance, running.

        Raises DuplicateRequest, LimitReached, StartFailed, and ServerDraining when the plane is stopping.
        """
        if self._is_closing:
            raise ServerDraining(PLANE_STOPPED)
        # Shielded: a cancelled caller must not leave a row without a start, or a start without an owner.
        return await asyncio.shield(self._spawn(self._create(request)))

    async def stop(self, instance_id: str, request_id: str | None = None) -> bool:
        """End an instance and wait for its end. Whether this call ended it."""
        live = self._live.get(instance_id)
        return live is not None and await self._end(live, "stopped", "it was deleted", request_id)

    async def stop_run(self, run_id: str | None) -> list[InstanceRecord]:
        """End all instances of a run, or all there are; those that this call ended."""
        lives = [live for live in self._live.values() if run_id is None or live.request.run_id == run_id]
        lives = [live for live in lives if live.ending is None]
        await asyncio.gather(*(self._end(live, "stopped", "its run was deleted") for live in lives))
        return [await self._database.run(instance_records.require, live.request.instance_id) for live in lives]

    async def record_heartbeat(self, instance_id: str, region: str | None) -> InstanceRecord | None:
        """The instance after a heartbeat; None if it does not run."""
        record = await self._database.run(instance_records.mark_heartbeat, instance_id, region)
        live = self._live.get(instance_id)
        if record is not None and live is not None:
            self._expect_heartbeat(live)
        return record

    def set_faults(self, faults: list[dict[str, Any]]) -> None:
        """Inject these faults into every present and future instance."""
        self._faults = faults
        for live in self._live.values():
            if live.process is not None:
                live.process.send({"faults": faults})

    def folder_of(self, instance_id: str) -> Path:
        return self._folder / instance_id

    # -- start ----------------------------------------------------------------------------------------

    async def _create(self, request: InstanceRequest) -> InstanceRecord:
        created_at = time.monotonic()
        await self._database.run(instance_records.insert, request, self._settings.instance_limit)
        live = self._live[request.instance_id] = LiveInstance(request, created_at)
        self.totals["created"] += 1
        if self._is_closing:
            await self._end(live, "stopped", PLANE_STOPPED)
            raise StartFailed(PLANE_STOPPED, transient=True)
        seconds_left = request.ttl_seconds - (time.monotonic() - created_at)
        reason = f"its time to live of {request.ttl_seconds} s was over"
        live.set_timer("ttl", seconds_left, partial(self._expire, live, reason))
        live.start = asyncio.create_task(self._start(live), name=f"start-{request.instance_id}")
        await asyncio.wait([live.start], timeout=request.max_wait_seconds)
        if not live.start.done():
            reason = f"it did not serve within {request.max_wait_seconds:g} s (max_wait_seconds); the plane is busy"
            await self._end(live, "error", reason)
            raise StartFailed(reason, transient=True)
        if live.start.cancelled():
            await self._wait_ended(live)
            raise StartFailed(f"it was ended while it started: {live.end_reason}", transient=False)
        try:
            return live.start.result()
        except (StartFailed, OSError) as error:
            await self._end(live, "error", str(error))
            if isinstance(error, StartFailed):
                raise
            raise StartFailed(str(error), transient=True) from error
        except BaseException:
            await self._end(live, "error", "the plane failed to start it")
            raise

    async def _start(self, live: LiveInstance) -> InstanceRecord:
        request = live.request
        async with self.pool.slot():
            self.folder_of(request.instance_id).mkdir(mode=0o700)
            live.process = process = await self.pool.take()
            try:
                port = await self._configure(live, process)
            except StartFailed:
                if process.is_alive or not process.was_warm:
                    raise
                # A warm process may have died before it was taken, so one fresh process gets the request.
                live.process = process = await self.pool.take(fresh=True)
                port = await self._configure(live, process)
        record = await self._database.run(instance_records.mark_running, request.instance_id, port, process.address)
        if record is None:
            raise StartFailed("it was ended while it started", transient=False)
        process.ended.add_done_callback(partial(self._on_process_end, live))
        self._expect_heartbeat(live)
        self.start_seconds.append(time.monotonic() - live.created_at)
        return record

    async def _configure(self, live: LiveInstance, process: HostedProcess) -> int:
        """Send a process its spec and wait until it serves; its port."""
        request, folder = live.request, self.folder_of(live.request.instance_id)
        environment = self._settings.environment(request.env_key)
        assert environment is not None
        process.move_log(folder / "instance.log")
        await self._database.run(instance_records.mark_process, request.instance_id, process.pid, process.start_time)
        # The fields of `paddock.fleet.instance.environment.InstanceSpec`.
        process.send(
            {
                "instance_id": request.instance_id,
                "env_key": request.env_key,
                "version": request.version,
                "target": environment.target,
                "image_type": request.image_type,
                "data_key": request.data_key,
                "data_version": request.data_version,
                "env_variables": request.env_variables or {},
                "runner_token": self._runner_token,
                "api_key": self._api_key,
                "folder": str(folder.absolute()),
                "host": self._settings.host,
            }
        )
        if self._faults:
            process.send({"faults": self._faults})
        return await process.wait_until_serving(self._settings.start_seconds)

    # -- end ------------------------------------------------------------------------------------------

    def _expect_heartbeat(self, live: LiveInstance) -> None:
        interval = live.request.heartbeat_interval
        if interval is not None and live.ending is None:
            expire = partial(self._expire, live, f"no heartbeat came for {interval} s")
            live.set_timer("heartbeat", interval + LATE_HEARTBEAT_SECONDS, expire)

    def _expire(self, live: LiveInstance, reason: str) -> None:
        self._spawn(self._end(live, "stopped", reason))

    def _on_process_end(self, live: LiveInstance, ended: asyncio.Future[int]) -> None:
        if live.ending is None and live.process is not None:
            reason = live.process.describe_end()
            logger.warning("instance %s: %s", live.request.instance_id, reason)
            self._spawn(self._end(live, "error", reason))

    async def _end(self, live: LiveInstance, status: str, reason: str, request_id: str | None = None) -> bool:
        """The only way an instance ends. Later calls wait for the first one. Whether this was the first."""
        is_first = live.ending is None
        if is_first:
            live.end_reason = reason
            live.ending = self._spawn(self._clean_up(live, status, reason, request_id))
        await self._wait_ended(live)
        return is_first

    async def _wait_ended(self, live: LiveInstance) -> None:
        if live.ending is not None:
            await asyncio.shield(live.ending)

    async def _clean_up(self, live: LiveInstance, status: str, reason: str, request_id: str | None) -> None:
        instance_id = live.request.instance_id
        live.clear_timers()
        await self._database.run(instance_records.mark_ended, instance_id, status, reason, request_id)
        self.totals[status] += 1
        try:
            if live.start is not None and not live.start.done():
                live.start.cancel()
                await asyncio.wait([live.start])
            if live.process is not None:
                await live.process.end(self._settings.end_seconds)
        finally:
            self._live.pop(instance_id, None)
            await asyncio.to_thread(shutil.rmtree, self.folder_of(instance_id), ignore_errors=True)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` as a task of the plane."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
