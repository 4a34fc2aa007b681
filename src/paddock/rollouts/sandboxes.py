"""The sandboxes of rollouts, registered in the store from before their start until after their end.

After a crash the next process finds them there and removes them (`recover`). A task's files go in, and an agent's
work comes out, each as one tar archive.
"""

from __future__ import annotations

import io
import tarfile
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from paddock.errors import SandboxError, TaskError
from paddock.sandbox import end_orphan, end_remote_orphan, new_sandbox_id, open_sandbox
from paddock.sandbox.base import Command, host_folder
from paddock.shielded import run_shielded
from paddock.store import SandboxEntry

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from paddock.limits import SandboxLimits
    from paddock.sandbox.base import Completed, Sandbox, SandboxSpec
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.store import Recovery, Store
    from paddock.tasks.task import Task

ARCHIVE_OVERHEAD_BYTES = 64 * 1024 * 1024
EMPTY = bytes(2 * tarfile.BLOCKSIZE)
"""The archive of an empty folder."""


@asynccontextmanager
async def owned_sandbox(
    store: Store,
    backend: str,
    spec: SandboxSpec,
    *,
    rollout_id: str | None,
    consent: bool,
    timeout: float,
    on_connection: Callable[[ConnectionRecord], None] | None = None,
) -> AsyncIterator[Sandbox]:
    """A sandbox that is in the store before it exists. It is closed when the block ends, however it ends."""
    entry = SandboxEntry(new_sandbox_id(), backend, rollout_id, created_at=time.time())
    entry.paths = [str(host_folder(entry.sandbox_id))]
    sandbox: Sandbox | None = None
    try:
        await store.run(store.record_sandbox, entry)
        sandbox = opened = await open_sandbox(
            backend, spec, sandbox_id=entry.sandbox_id, consent=consent, timeout=timeout
        )
        entry.host_pid, entry.host_start_time = opened.host_pid, opened.host_start_time
        await store.run(store.record_sandbox, entry)
        if on_connection is not None:
            opened.on_connection(on_connection)
        yield opened
    finally:
        await run_shielded(_close(store, entry, sandbox))


async def _close(store: Store, entry: SandboxEntry, sandbox: Sandbox | None) -> None:
    if sandbox is not None:
        await sandbox.close()
    await store.run(store.end_sandbox, entry.sandbox_id)


def recover(store: Store) -> Recovery:
    """Give every rollout of a dead process its outcome, and end its sandboxes."""
    return store.recover(_end)


def _end(entry: SandboxEntry) -> bool:
    gone = end_orphan(entry.host_pid, entry.host_start_time, entry.paths, sandbox_id=entry.sandbox_id)
    return end_remote_orphan(entry.backend, entry.sandbox_id) and gone


async def stage_task(task: Task, sandbox: Sandbox, *, timeout: float) -> None:
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
        message = (done.stderr or done.stdout)[-500:].decode(errors="replace").strip()
        raise TaskError(f"the task's set-up failed with exit code {done.exit_code}: {message}")


async def seal(sandbox: Sandbox, limits: SandboxLimits) -> tuple[bytes, str | None]:
    """The work folder as it is now, and the problem if it cannot be read. For a sandbox without processes.

    A folder that is gone, is a link, or is beyond all limits counts as empty: the agent left it so.
    """
    try:
        # The disk limit bounds the content; only sparse files can be larger.
        return await sandbox.pack(sandbox.workdir, limit=limits.disk_bytes + ARCHIVE_OVERHEAD_BYTES), None
    except (SandboxError, OSError) as error:
        return EMPTY, f"the work folder could not be sealed: {error}"


def archive(task: Task) -> bytes:
    """The task's files."""
    return pack_files(task.files, {path: task.mode(path) for path in task.files})


def describe_end(done: Completed) -> str:
    """How a command ended, with the end of its output."""
    output = (done.stderr or done.stdout)[-500:].decode(errors="replace").strip()
    if done.timed_out:
        return f"it did not end in time: {output}"
    reason = f"it used too much {done.killed_for}" if done.killed_for else f"exit code {done.exit_code}"
    return f"{reason}: {output}"


def pack_files(files: Mapping[str, bytes], modes: Mapping[str, int] | None = None) -> bytes:
    """A tar of files, sorted by path, so that equal files make equal archives."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for path, data in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(data), (modes or {}).get(path, 0o644)
            packed.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
