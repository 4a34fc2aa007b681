"""Processes of this host, read from `/proc`: their identity, and those that carry a mark.

A pid is reused after its process ends, so a process is identified by its pid and its start time. A mark is a variable
in the environment: all descendants inherit it, also those that leave the process group.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from paddock.errors import ClientError

KILL_SECONDS = 5.0
POLL_SECONDS = 0.01
SANDBOX_VARIABLE = "PADDOCK_SANDBOX"
"""Environment variable with a mark, usually a sandbox id. Processes that help to make a sandbox have it, and so does
everything in a sandbox without isolation, or below an MCP server."""


def process_start_time(pid: int | None) -> int | None:
    """When a process started, in clock ticks since boot. None if it has ended, is a zombie, or without `/proc`."""
    fields = process_fields(pid)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[19])


def process_fields(pid: int | None) -> list[str]:
    """The fields of `/proc/PID/stat` after the name, state first; empty if there is no such process."""
    if pid is None:
        return []
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The name in parentheses may contain spaces and parentheses.
    return text.rpartition(")")[2].split()


def find_descendants(pid: int) -> list[int]:
    """All processes below `pid`, as of now."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := process_fields(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    descendants = list(children.get(pid, ()))
    for child in descendants:
        descendants += children.get(child, ())
    return descendants


def end_marked_processes(mark: str) -> bool:
    """Kill every process that carries `mark`. Returns whether none is left."""
    deadline = time.monotonic() + KILL_SECONDS
    while pids := find_marked_processes(mark):
        if time.monotonic() > deadline:
            return False
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return True


def find_marked_processes(mark: str) -> list[int]:
    """Pids of the processes that were started with `SANDBOX_VARIABLE` set to `mark`."""
    variable = f"{SANDBOX_VARIABLE}={mark}".encode()
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if variable in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    pids.append(int(entry))
    return pids


def check_process(pid: int) -> None:
    """Raise ClientError in any process but this one."""
    if pid != os.getpid():
        raise ClientError(
            "the client was opened in another process, from which this one was forked",
            hint="make a client in the child, or start it with the method spawn",
        )
