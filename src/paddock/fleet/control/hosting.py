"""The life of instances: pending, running, then stopped or error. Each ends once, whoever ends it.

A start belongs to the plane, not to the request that asked for it: a client that lost its connection
finds its instance again. Knows processes and rows, not HTTP.
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

from paddock.errors import ServerDraining
from paddock.fleet.control import records
from paddock.fleet.control.pool import Pool
from paddock.fleet.control.process import LocalProcesses, StartFailed, kill_left_over

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from paddock.fleet.control.database import Database
    from paddock.fleet.control.process import HostedProcess, Launcher
    from paddock.fleet.control.records import Instance, Order
    from paddock.fleet.control.settings import PlaneSettings

logger = logging.getLogger("paddock.fleet.control")

LATE_HEARTBEAT_SECONDS = 0.5
PLANE_GONE = "the plane that hosted it ended"


@dataclass(slots=True, eq=False)
class Live:
    """An instance that has not ended."""

    order: Order
    began: float
    process: HostedProcess | None = None
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)
    start: asyncio.Task[Instance] | None = None
    ending: asyncio.Task[None] | None = None
    end_reason: str = ""

    def set_timer(self, name: str, seconds: float, action: Any) -> None:
        self.clear_timer(name)
        self.timers[name] = asyncio.get_running_loop().call_later(seconds, action)

    def clear_timer(self, name: str) -> None:
        if name in self.timers:
            self.timers.pop(name).cancel()


class Hosting:
    """All instances of a plane."""

    def __init__(
        self,
        settings: PlaneSettings,
        database: Database,
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
        self._live: dict[str, Live] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._faults: list[dict[str, Any]] = []
        self.launcher: Launcher = launcher or LocalProcesses(settings.instance_command)
        self.pool = Pool(
            self.launcher,
            settings.state / "warm",
            warm=settings.warm,
            parallel=settings.parallel_starts,
            end_seconds=settings.end_seconds,
        )
        self.totals: Counter[str] = Counter()
        self.start_seconds: deque[float] = deque(maxlen=1000)

    async def open(self) -> None:
        """End what an earlier plane left, and begin to warm up."""
        left = await self._database.run(records.end_left_over, PLANE_GONE)
        killed = [
            found.pid for found in left if found.pid is not None and kill_left_over(found.pid, found.started_ticks)
        ]
        if killed:
            logger.warning("killed %d processes that an earlier plane left behind", len(killed))
        for folder in (self._folder, self._settings.state / "warm"):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
        await self.launcher.open()
        self.pool.open()

    async def close(self) -> None:
        """Stop every instance and every waiting process."""
        self._closing = True
        await asyncio.gather(
            *(self._end(live, "stopped", "the plane was stopped") for live in list(self._live.values()))
        )
        await self.pool.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.end_seconds)
        await self.launcher.close()

    # -- what users ask for ---------------------------------------------------------------------------

    async def create(self, order: Order) -> Instance:
        """The instance, running.

        Raises DuplicateRequest, LimitReached, StartFailed, and ServerDraining when the plane is stopping.
        """
        if self._closing:
            raise ServerDraining("the plane is stopping")
        # Shielded: a row without a start, or a start that nobody watches, must not come to be.
        return await asyncio.shield(self._own(self._create(order)))

    async def stop(self, instance_id: str, request_id: str | None = None) -> bool:
        """End an instance on demand, and wait until it has. Whether it was this call that ended it."""
        live = self._live.get(instance_id)
        return live is not None and await self._end(live, "stopped", "it was deleted", request_id)

    async def stop_run(self, run_id: str | None) -> list[Instance]:
        """End all instances of a run, or all there are; those that this call ended."""
        chosen = [live for live in self._live.values() if run_id is None or live.order.run_id == run_id]
        chosen = [live for live in chosen if live.ending is None]
        await asyncio.gather(*(self._end(live, "stopped", "its run was deleted") for live in chosen))
        return [await self._database.run(records.needed, live.order.instance_id) for live in chosen]

    async def heartbeat(self, instance_id: str, region: str | None) -> Instance | None:
        """The instance after a sign of life; None if it does not run."""
        found = await self._database.run(records.mark_heartbeat, instance_id, region)
        live = self._live.get(instance_id)
        if found is not None and live is not None:
            self._expect_heartbeat(live)
        return found

    def set_faults(self, faults: list[dict[str, Any]]) -> None:
        """Make every instance, present and to come, misbehave in these ways."""
        self._faults = faults
        for live in self._live.values():
            if live.process is not None:
                live.process.send({"faults": faults})

    def folder_of(self, instance_id: str) -> Path:
        return self._folder / instance_id

    @property
    def alive(self) -> int:
        return len(self._live)

    # -- from pending to running ----------------------------------------------------------------------

    async def _create(self, order: Order) -> Instance:
        began = time.monotonic()
        await self._database.run(records.insert, order, self._settings.instance_limit)
        live = self._live[order.instance_id] = Live(order, began)
        self.totals["created"] += 1
        if self._closing:
            await self._end(live, "stopped", "the plane was stopped")
            raise StartFailed("the plane was stopped", passing=True)
        left = order.ttl_seconds - (time.monotonic() - began)
        live.set_timer(
            "ttl", left, partial(self._expire, live, f"its time to live of {order.ttl_seconds} s was over")
        )
        live.start = asyncio.create_task(self._start(live), name=f"start-{order.instance_id}")
        await asyncio.wait([live.start], timeout=order.max_wait_seconds)
        if not live.start.done():
            reason = f"it did not serve within {order.max_wait_seconds:g} s (max_wait_seconds); the plane is busy"
            await self._end(live, "error", reason)
            raise StartFailed(reason, passing=True)
        if live.start.cancelled():
            await self._finish(live)
            raise StartFailed(f"it was ended while it started: {live.end_reason}", passing=False)
        try:
            return live.start.result()
        except (StartFailed, OSError) as error:
            await self._end(live, "error", str(error))
            if isinstance(error, StartFailed):
                raise
            raise StartFailed(str(error), passing=True) from error
        except BaseException:
            await self._end(live, "error", "the plane failed to start it")
            raise

    async def _start(self, live: Live) -> Instance:
        order = live.order
        async with self.pool.turn():
            self.folder_of(order.instance_id).mkdir(mode=0o700)
            live.process = process = await self.pool.take()
            try:
                port = await self._bring_up(live, process)
            except StartFailed:
                if process.is_alive or not process.was_warm:
                    raise
                # It may have died long before it was asked; one that is started now has no such excuse.
                live.process = process = await self.pool.take(fresh=True)
                port = await self._bring_up(live, process)
        found = await self._database.run(records.mark_running, order.instance_id, port, process.address)
        if found is None:
            raise StartFailed("it was ended while it started", passing=False)
        process.ended.add_done_callback(partial(self._has_died, live))
        self._expect_heartbeat(live)
        self.start_seconds.append(time.monotonic() - live.began)
        return found

    async def _bring_up(self, live: Live, process: HostedProcess) -> int:
        """Tell a process what it is to be, and wait until it serves; its port."""
        order, folder = live.order, self.folder_of(live.order.instance_id)
        environment = self._settings.environment(order.env_key)
        assert environment is not None
        process.move_log(folder / "instance.log")
        await self._database.run(records.mark_process, order.instance_id, process.pid, process.started_ticks)
        process.send(
            {
                "instance_id": order.instance_id,
                "env_key": order.env_key,
                "version": order.version,
                "target": environment.target,
                "image_type": order.image_type,
                "data_key": order.data_key,
                "data_version": order.data_version,
                "env_variables": order.env_variables or {},
                "runner_token": self._runner_token,
                "api_key": self._api_key,
                "folder": str(folder.absolute()),
                "host": self._settings.host,
            }
        )
        if self._faults:
            process.send({"faults": self._faults})
        return await process.wait_until_serving(self._settings.start_seconds)

    # -- to the end -----------------------------------------------------------------------------------

    def _expect_heartbeat(self, live: Live) -> None:
        interval = live.order.heartbeat_interval
        if interval is not None and live.ending is None:
            missed = partial(self._expire, live, f"no heartbeat came for {interval} s")
            live.set_timer("heartbeat", interval + LATE_HEARTBEAT_SECONDS, missed)

    def _expire(self, live: Live, reason: str) -> None:
        self._own(self._end(live, "stopped", reason))

    def _has_died(self, live: Live, ended: asyncio.Future[int]) -> None:
        if live.ending is None and live.process is not None:
            reason = live.process.how_it_ended()
            logger.warning("instance %s: %s", live.order.instance_id, reason)
            self._own(self._end(live, "error", reason))

    async def _end(self, live: Live, status: str, reason: str, request_id: str | None = None) -> bool:
        """The only way an instance ends. Whoever comes later waits for the first. Whether this was the first."""
        is_first = live.ending is None
        if is_first:
            live.end_reason = reason
            live.ending = self._own(self._wind_up(live, status, reason, request_id))
        await self._finish(live)
        return is_first

    async def _finish(self, live: Live) -> None:
        if live.ending is not None:
            await asyncio.shield(live.ending)

    async def _wind_up(self, live: Live, status: str, reason: str, request_id: str | None) -> None:
        instance_id = live.order.instance_id
        for name in list(live.timers):
            live.clear_timer(name)
        await self._database.run(records.mark_ended, instance_id, status, reason, request_id)
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

    def _own(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
