"""Processes of the host, told apart by when they began: a number alone is given out again."""

from __future__ import annotations

from pathlib import Path


def process_start_time(pid: int | None) -> int | None:
    """When a process began, in clock ticks since the boot. None if it is gone (or no more than a
    zombie), or where there is no `/proc`."""
    fields = process_fields(pid)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[19])


def process_fields(pid: int | None) -> list[str]:
    """What `/proc/PID/stat` says behind the name, the state first; empty if there is no such process."""
    if pid is None:
        return []
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    # The name in parentheses may hold spaces and parentheses of its own.
    return text.rpartition(")")[2].split()
