"""Waits until the health check of a task succeeds, with the times that it says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.errors import TaskError
from paddock.sandbox.base import Command

if TYPE_CHECKING:
    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.images.image import HealthCheck


async def wait_until_healthy(sandbox: Sandbox, check: HealthCheck) -> None:
    """Return once the command succeeds. Raises TaskError after `retries` failures, those of the start excluded."""
    loop = asyncio.get_running_loop()
    started, failures, output = loop.time(), 0, ""
    while True:
        done = await sandbox.exec(Command(list(check.argv), cwd=sandbox.workdir), timeout=check.timeout)
        if done.exit_code == 0:
            return
        output = (done.stderr or done.stdout)[-300:].decode(errors="replace").strip()
        is_starting = loop.time() - started < check.start_period
        failures += not is_starting
        if failures >= check.retries:
            break
        await asyncio.sleep(check.start_interval if is_starting else check.interval)
    raise TaskError(
        f"the health check failed {failures} times: {output or 'without output'}",
        hint="look at environment.healthcheck and at the service that it asks",
    )
