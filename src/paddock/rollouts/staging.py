"""A task's files into a sandbox, and an agent's work out of it, each as one archive."""

from __future__ import annotations

import io
import tarfile
from typing import TYPE_CHECKING

from paddock.errors import SandboxError, TaskError
from paddock.rollouts.sandbox.base import Command

if TYPE_CHECKING:
    from paddock.rollouts.limits import SandboxLimits
    from paddock.rollouts.sandbox.base import Sandbox
    from paddock.rollouts.task import Task

ARCHIVE_OVERHEAD = 64 * 1024 * 1024
EMPTY = bytes(2 * tarfile.BLOCKSIZE)
"""The archive of an empty folder."""


async def stage(task: Task, sandbox: Sandbox, *, timeout: float) -> None:
    """Put the files in place and run the set-up shell. Raises TaskError if that fails."""
    if task.files:
        await sandbox.unpack(sandbox.workdir, archive(task))
    if not task.setup:
        return
    command = Command(["/bin/bash", "-c", sandbox.localize(task.setup)], cwd=sandbox.workdir)
    done = await sandbox.exec(command, timeout=timeout)
    if done.timed_out:
        raise TaskError(f"the task's set-up did not finish within {timeout:g} s")
    if done.exit_code != 0:
        words = (done.stderr or done.stdout)[-500:].decode(errors="replace").strip()
        raise TaskError(f"the task's set-up failed with exit code {done.exit_code}: {words}")


async def seal(sandbox: Sandbox, limits: SandboxLimits) -> tuple[bytes, str | None]:
    """The work folder as it is now, and what is wrong with it. For a sandbox whose processes have ended.

    A folder that is gone, is a link, or is beyond all limits is an empty one: it is the agent who left it so.
    """
    try:
        # What lies on the disk cannot be more than the disk; only holes in files can claim to be.
        return await sandbox.pack(sandbox.workdir, limit=limits.disk_bytes + ARCHIVE_OVERHEAD), None
    except (SandboxError, OSError) as error:
        return EMPTY, f"the work folder could not be sealed: {error}"


def archive(task: Task) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for path, data in sorted(task.files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), task.mode(path)
            packed.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
