"""Starts the ENTRYPOINT of an image, as container runtimes do. Many start the services that a task needs.

Its arguments are a command that only waits. An entry point that prepares something and then runs its arguments, as
most do, has finished its preparations when that command is there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.sandbox.base import Command

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paddock.sandbox.base import Job, Sandbox

WAITING = ("sh", "-c", "exec sleep infinity")
"""What Harbor runs as the command of a task's container."""
WAITING_PROCESSES = (" ".join(WAITING), "sleep infinity")
READY_SECONDS = 3.0
POLL_SECONDS = 0.05


async def start_entrypoint(sandbox: Sandbox, entrypoint: Iterable[str]) -> Job:
    """Return once it runs the waiting command, has ended, or `READY_SECONDS` are over. Raises SandboxError.

    One that ends is no error: nothing here needs the waiting command. One that is a service itself never runs it.
    """
    job = await sandbox.start(Command([*entrypoint, *WAITING], cwd=sandbox.workdir))
    ended = asyncio.ensure_future(job.wait())
    try:
        async with asyncio.timeout(READY_SECONDS):
            while not ended.done() and not any(map(is_waiting, await sandbox.list_processes())):
                await asyncio.wait([ended], timeout=POLL_SECONDS)
    except TimeoutError:
        pass
    finally:
        ended.cancel()
    return job


def is_waiting(process: str) -> bool:
    """Whether a command line is that of the waiting command: neither the task nor the agent started it."""
    return process in WAITING_PROCESSES
