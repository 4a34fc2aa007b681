"""Ends what a dead owner left behind. Knows processes and paths of the host, not sandboxes."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.rollouts.processes import process_fields, process_start_time

if TYPE_CHECKING:
    from collections.abc import Iterable

POLITE_SECONDS = 1.0
FIRM_SECONDS = 5.0


MARK = "PADDOCK_SANDBOX"
"""The variable that names its sandbox to whoever looks at a process that helps to make one, or runs in a fallback."""


def end_leftover(
    host_pid: int | None,
    started: float | None,
    paths: Iterable[str | os.PathLike[str]],
    *,
    sandbox_id: str | None = None,
) -> bool:
    """Kill a sandbox whose owner is gone, if the pid still is that process, and remove its paths.

    Also ends what bears its mark: an owner that dies while a sandbox is being made leaves processes that wait for
    ever, and whose number nobody has written down. Returns whether nothing is left. Blocks up to a few seconds.
    """
    gone = host_pid is None or process_start_time(host_pid) != started or _end(host_pid, started)
    gone = (sandbox_id is None or end_marked(sandbox_id)) and gone
    for path in map(Path, paths):
        shutil.rmtree(path, ignore_errors=True)
        gone = gone and not path.exists()
    return gone


def _end(pid: int, started: float | None) -> bool:
    family = [(member, process_start_time(member)) for member in (pid, *descendants(pid))]
    for number, seconds in ((signal.SIGTERM, POLITE_SECONDS), (signal.SIGKILL, FIRM_SECONDS)):
        # A supervisor ends its processes itself when asked. Process 1 of a namespace only hears SIGKILL.
        targets = [(pid, started)] if number == signal.SIGTERM else family
        for member, began in targets:
            if process_start_time(member) == began:
                with suppress(ProcessLookupError):
                    os.kill(member, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if all(process_start_time(member) != began for member, began in family):
                return True
            time.sleep(0.01)
    return False


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, as of now."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := process_fields(int(name))):
            children.setdefault(int(fields[1]), []).append(int(name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found


def end_marked(sandbox_id: str) -> bool:
    """Kill every process that bears the mark of a sandbox. Returns whether none is left."""
    deadline = time.monotonic() + FIRM_SECONDS
    while found := marked(sandbox_id):
        if time.monotonic() > deadline:
            return False
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return True


def marked(sandbox_id: str) -> list[int]:
    """Processes that were started with the mark of a sandbox in their environment."""
    mark = f"{MARK}={sandbox_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                    found.append(int(entry))
    return found
