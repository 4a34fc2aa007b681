"""Ends sandboxes whose owner died before it closed them."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.processes import KILL_SECONDS, POLL_SECONDS, end_marked_processes, find_descendants, process_start_time
from paddock.sandbox.opening import REMOTE_BACKENDS, find_backend

if TYPE_CHECKING:
    from collections.abc import Iterable

TERM_SECONDS = 1.0


def end_orphan(
    host_pid: int | None,
    started: float | None,
    paths: Iterable[str | os.PathLike[str]],
    *,
    sandbox_id: str | None = None,
) -> bool:
    """Kill a sandbox whose owner is gone, if the pid still is that process, and remove its paths.

    Also ends every process whose environment names the sandbox: an owner that dies while it opens a sandbox has not
    recorded a pid yet. Returns whether nothing is left. Blocks up to a few seconds.
    """
    gone = host_pid is None or process_start_time(host_pid) != started or _end_process(host_pid, started)
    gone = (sandbox_id is None or end_marked_processes(sandbox_id)) and gone
    for path in map(Path, paths):
        shutil.rmtree(path, ignore_errors=True)
        gone = gone and not path.exists()
    return gone


def _end_process(pid: int, started: float | None) -> bool:
    family = [(member, process_start_time(member)) for member in (pid, *find_descendants(pid))]
    for number, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
        # The guest ends its processes on SIGTERM. Process 1 of a namespace ignores SIGTERM, but not SIGKILL.
        targets = [(pid, started)] if number == signal.SIGTERM else family
        for member, member_started in targets:
            if process_start_time(member) == member_started:
                with suppress(ProcessLookupError):
                    os.kill(member, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(process_start_time(member) != member_started for member, member_started in family):
                return True
            time.sleep(POLL_SECONDS)
    return False


def end_remote_orphan(backend: str, sandbox_id: str) -> bool:
    """Remove what a dead owner left at a container runtime or a service. Returns whether nothing is left. Blocks.

    Raises SandboxError if that cannot be reached.
    """
    if backend not in REMOTE_BACKENDS:
        return True
    sandbox_class: Any = find_backend(backend)
    # In a thread of its own: the caller's may run an event loop already.
    with ThreadPoolExecutor(1) as thread:
        return bool(thread.submit(sandbox_class.end_orphan, sandbox_id).result())
