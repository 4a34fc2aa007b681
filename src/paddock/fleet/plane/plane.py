"""A plane: its settings, keys, database and instances, opened and closed together. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from paddock.fleet.instance.verifier.runner import VerifierRunner
from paddock.fleet.plane import instance_records
from paddock.fleet.plane.database import PlaneDatabase
from paddock.fleet.plane.environments import store_versions
from paddock.fleet.plane.faults import Faults
from paddock.fleet.plane.instance_manager import InstanceManager
from paddock.fleet.plane.settings import KEY_FILE
from paddock.fleet.plane.verifiers import VerifierExecutions, end_unfinished

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.fleet.instance.verifier.runner import RunVerifier
    from paddock.fleet.plane.processes import Launcher
    from paddock.fleet.plane.settings import PlaneSettings

logger = logging.getLogger("paddock.fleet.plane")


class Plane:
    """Everything behind the routes. `open` takes the state folder, `start` begins to host, `stop` ends both."""

    def __init__(
        self, settings: PlaneSettings, verify: RunVerifier | None = None, launcher: Launcher | None = None
    ) -> None:
        self.settings = settings
        self._launcher = launcher
        self.api_key = settings.api_key or load_or_create_key(settings.state)
        self.runner_token = secrets.token_urlsafe(24) if settings.gate else None
        self.faults = Faults()
        self._verifier_runner = VerifierRunner()
        self.verify: RunVerifier = verify or self._verifier_runner.run
        self.created_at = time.time()
        self._database: PlaneDatabase | None = None
        self._instances: InstanceManager | None = None
        self._executions: VerifierExecutions | None = None
        self._stop_task: asyncio.Task[None] | None = None

    @property
    def database(self) -> PlaneDatabase:
        assert self._database is not None, "the plane is not open"
        return self._database

    @property
    def instances(self) -> InstanceManager:
        assert self._instances is not None, "the plane has not started"
        return self._instances

    @property
    def executions(self) -> VerifierExecutions:
        assert self._executions is not None, "the plane has not started"
        return self._executions

    @property
    def is_stopping(self) -> bool:
        return self._stop_task is not None

    def open(self) -> None:
        """Take the state folder. Raises ConfigError if another plane has it, StoreError if it is damaged."""
        if self._database is None:
            self._database = PlaneDatabase(self.settings.state)

    async def start(self) -> None:
        self.open()
        await self.database.run(end_unfinished)
        await self.database.run(store_versions, self.settings)
        self._instances = InstanceManager(
            self.settings,
            self.database,
            api_key=self.api_key,
            runner_token=self.runner_token,
            launcher=self._launcher,
        )
        self._executions = VerifierExecutions(self.database, self.settings.parallel_starts)
        await self.instances.open()

    async def stop(self) -> None:
        """Stop all instances and close the database. Further calls wait for the first."""
        if self._stop_task is None:
            self._stop_task = asyncio.create_task(self._stop())
        await asyncio.shield(self._stop_task)

    async def _stop(self) -> None:
        try:
            if self._instances is not None:
                await asyncio.gather(self._instances.close(), self.executions.close())
            await self._verifier_runner.close()
        finally:
            if self._database is not None:
                await asyncio.to_thread(self._database.close)

    async def statistics(self) -> dict[str, Any]:
        """A snapshot for `/status`, `/metrics` and the web page."""
        statuses = await self.database.run(instance_records.count_statuses)
        times = sorted(self.instances.start_seconds)
        return {
            "status": "healthy",
            "uptime_seconds": round(time.time() - self.created_at, 3),
            "team_id": self.settings.team_id,
            "profile_id": self.settings.profile_id,
            "gate": self.settings.gate,
            "instance_limit": self.settings.instance_limit,
            "instance_count": statuses["pending"] + statuses["running"],
            "instances": statuses,
            "starting": self.instances.pool.starting,
            "warm": self.instances.pool.idle,
            "since_start": dict(self.instances.totals),
            "start_seconds": {
                "median": times[len(times) // 2] if times else None,
                "most": times[-1] if times else None,
            },
            **self.instances.launcher.statistics(),
            "environments": [environment.env_key for environment in self.settings.environments],
        }


def load_or_create_key(folder: Path) -> str:
    """The key in the state folder; a new one if there is none."""
    file = folder / KEY_FILE
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = file.read_text().strip()
        if key:
            return key
        descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC)
    with os.fdopen(descriptor, "w") as opened:
        key = f"pk_{secrets.token_urlsafe(24)}"
        opened.write(key)
    return key
