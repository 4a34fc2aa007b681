"""A plane: its settings, its secrets, its memory and its instances, opened and closed together."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

from paddock.fleet.control import executions, records
from paddock.fleet.control.access import kept_key
from paddock.fleet.control.database import Database, now_text
from paddock.fleet.control.executions import Executions
from paddock.fleet.control.faults import Faults
from paddock.fleet.control.hosting import Hosting
from paddock.fleet.control.verifying import LocalVerifiers

if TYPE_CHECKING:
    import sqlite3

    from paddock.fleet.control.process import Launcher
    from paddock.fleet.control.settings import PlaneSettings
    from paddock.fleet.control.verifying import Verify

logger = logging.getLogger("paddock.fleet.control")


class Plane:
    """Everything behind the routes. `open` takes the state folder, `start` begins to host, `stop` ends both."""

    def __init__(
        self, settings: PlaneSettings, verify: Verify | None = None, launcher: Launcher | None = None
    ) -> None:
        self.settings = settings
        self._launcher = launcher
        self.api_key = settings.api_key or kept_key(settings.state)
        self.runner_token = secrets.token_urlsafe(24) if settings.gate else None
        self.faults = Faults()
        self.verify: Verify = verify or LocalVerifiers()
        self.began = time.time()
        self._database: Database | None = None
        self._hosting: Hosting | None = None
        self._executions: Executions | None = None
        self._stopped: asyncio.Task[None] | None = None

    @property
    def database(self) -> Database:
        assert self._database is not None, "the plane is not open"
        return self._database

    @property
    def hosting(self) -> Hosting:
        assert self._hosting is not None, "the plane has not started"
        return self._hosting

    @property
    def executions(self) -> Executions:
        assert self._executions is not None, "the plane has not started"
        return self._executions

    @property
    def is_stopping(self) -> bool:
        return self._stopped is not None

    def open(self) -> None:
        """Take the state folder. Raises ConfigError if another plane has it, StoreError if it is damaged."""
        if self._database is None:
            self._database = Database(self.settings.state)

    async def start(self) -> None:
        self.open()
        await self.database.run(executions.end_left_over)
        await self.database.run(_note_versions, self.settings)
        self._hosting = Hosting(
            self.settings,
            self.database,
            api_key=self.api_key,
            runner_token=self.runner_token,
            launcher=self._launcher,
        )
        self._executions = Executions(self.database, self.settings.parallel_starts)
        await self.hosting.open()

    async def stop(self) -> None:
        """Stop all instances and close the memory. More calls wait for the first."""
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopped)

    async def _stop(self) -> None:
        try:
            if self._hosting is not None:
                await asyncio.gather(self._hosting.close(), self.executions.close())
            if isinstance(self.verify, LocalVerifiers):
                await self.verify.close()
        finally:
            if self._database is not None:
                await asyncio.to_thread(self._database.close)

    async def statistics(self) -> dict[str, Any]:
        """How the plane is: for `paddock fleet ls`, the metrics and whoever asks."""
        statuses = await self.database.run(records.count_statuses)
        times = sorted(self.hosting.start_seconds)
        return {
            "status": "healthy",
            "uptime_seconds": round(time.time() - self.began, 3),
            "team_id": self.settings.team_id,
            "profile_id": self.settings.profile_id,
            "gate": self.settings.gate,
            "instance_limit": self.settings.instance_limit,
            "instance_count": statuses["pending"] + statuses["running"],
            "instances": statuses,
            "starting": self.hosting.pool.asked,
            "warm": self.hosting.pool.idle,
            "since_start": dict(self.hosting.totals),
            "start_seconds": {
                "median": times[len(times) // 2] if times else None,
                "most": times[-1] if times else None,
            },
            **self.hosting.launcher.statistics(),
            "environments": [environment.env_key for environment in self.settings.environments],
        }


def _note_versions(connection: sqlite3.Connection, settings: PlaneSettings) -> None:
    """Remember since when each version is offered."""
    for environment in settings.environments:
        connection.executemany(
            "INSERT OR IGNORE INTO versions (env_key, version, since) VALUES (?, ?, ?)",
            [(environment.env_key, version, now_text()) for version in environment.versions],
        )
