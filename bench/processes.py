"""What a group of processes costs, read from `/proc`: CPU time, memory, threads."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from bench.ray_cluster import children_of

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
QUIET_WINDOW_SECONDS = 0.25
QUIET_CPU_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Usage:
    """The sums over all processes of a group."""

    cpu_seconds: float
    resident_bytes: int
    threads: int


def group_usage(group: int) -> Usage:
    """Read the usage of every living process whose process group is `group`."""
    cpu_ticks = resident_pages = threads = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The command name may hold spaces and brackets: fields count from its last bracket.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group:
            cpu_ticks += int(fields[11]) + int(fields[12])
            threads += int(fields[17])
            resident_pages += int(fields[21])
    return Usage(
        cpu_seconds=cpu_ticks / CLOCK_TICKS,
        resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        threads=threads,
    )


def wait_quiet(groups: list[int], timeout_seconds: float = 30.0) -> None:
    """Wait until the groups use next to no CPU, so that no sample pays for the one before it.

    Raises:
        TimeoutError: they stayed busy.
    """
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        before = sum(group_usage(group).cpu_seconds for group in groups)
        time.sleep(QUIET_WINDOW_SECONDS)
        used = sum(group_usage(group).cpu_seconds for group in groups) - before
        if used <= QUIET_CPU_SHARE * QUIET_WINDOW_SECONDS:
            return
    raise TimeoutError(f"a server without load was still busy after {timeout_seconds:g} s")


def family(pids: list[int]) -> list[int]:
    """These processes and all their descendants."""
    members: dict[int, None] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in members:
            members[pid] = None
            waiting += children_of(pid)
    return list(members)


def proportional_memory(pid: int) -> float:
    """MiB of a process, memory that it shares counted by its share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)
