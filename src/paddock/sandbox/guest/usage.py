"""What all processes of a sandbox use together, measured in `/proc`, and whether a limit is exceeded."""

from __future__ import annotations

import os
import resource
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
INTERVAL_SECONDS, SHORT_INTERVAL_SECONDS, LONGEST_INTERVAL_SECONDS = 0.25, 0.05, 2.0
"""Between two measurements: normally, close to the memory limit or after a start, and with very many processes."""
DISK_INTERVAL_SECONDS = 1.0
PAUSE_FACTOR = 20
"""A pause lasts at least this many times as long as the measurement before it, so that measuring stays cheap."""
BYTES_PER_FILE, FEWEST_FILES = 4096, 100_000


class UsageWatch:
    """Measures when `next_at` has come. Without limits it only measures."""

    def __init__(self, settings: dict[str, Any], *, is_init: bool) -> None:
        self._limits: dict[str, Any] | None = settings["limits"]
        self._disk_check: str | None = settings.get("disk_check")
        self._disk_path: str = settings.get("disk_path") or settings["home"]
        self._is_init = is_init
        self.cpu_seconds = 0.0
        self.peak_memory = 0
        self.next_at: float | None = None
        """None while nothing runs."""
        self._disk_at = 0.0
        self._earlier_seconds = reaped_seconds()

    def start(self) -> None:
        """Something was started."""
        if self.next_at is None:
            self.next_at = time.monotonic() + SHORT_INTERVAL_SECONDS

    def is_due(self) -> bool:
        return self.next_at is not None and time.monotonic() >= self.next_at

    def milliseconds_left(self) -> int | None:
        return None if self.next_at is None else max(0, int((self.next_at - time.monotonic()) * 1000) + 1)

    def pids(self) -> list[str]:
        """All processes of the sandbox but the guest."""
        if self._is_init:
            return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        return find_descendants(str(os.getpid()))

    def measure(self) -> str | None:
        """Sum up what all processes use. Returns the name of a limit that is exceeded."""
        started = time.monotonic()
        memory = ticks = tasks = 0
        pids = self.pids()
        for pid in pids:
            fields = stat_fields(pid)
            if not fields:
                continue
            ticks += sum(map(int, fields[11:15]))
            tasks += int(fields[17])
            memory += int(fields[21]) * PAGE_BYTES
        limits = self._limits
        if limits is not None and memory > limits["memory_bytes"]:
            # Resident pages that processes share were counted once for each. The proportional size counts them once,
            # but takes the kernel much longer to compute.
            memory = min(memory, sum(map(proportional_memory, pids)))
        used = ticks / TICKS_PER_SECOND + reaped_seconds() - self._earlier_seconds
        self.cpu_seconds = max(self.cpu_seconds, used)
        self.peak_memory = max(
            self.peak_memory, memory, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        )
        now = time.monotonic()
        is_close = limits is not None and memory > limits["memory_bytes"] / 2
        if self.next_at is not None:
            pause = SHORT_INTERVAL_SECONDS if is_close else INTERVAL_SECONDS
            self.next_at = now + max(pause, min(LONGEST_INTERVAL_SECONDS, PAUSE_FACTOR * (now - started)))
        if limits is None:
            return None
        if memory > limits["memory_bytes"]:
            return "memory"
        if self.cpu_seconds > limits["cpu_seconds"]:
            return "cpu"
        if tasks > limits["processes"] + 1:
            return "processes"
        return "disk" if self._is_disk_full(now, limits["disk_bytes"]) else None

    def _is_disk_full(self, now: float, most: int) -> bool:
        if self._disk_check is None or now < self._disk_at:
            return False
        if self._disk_check == "inodes":
            # The size of the filesystem is the limit for bytes. Only the number of files has none.
            status = os.statvfs(self._disk_path)
            return status.f_files - status.f_ffree > max(FEWEST_FILES, most / BYTES_PER_FILE)
        if self._disk_check == "filesystem":
            status = os.statvfs(self._disk_path)
            used_files = status.f_files - status.f_ffree
            return (status.f_blocks - status.f_bfree) * status.f_frsize + used_files * BYTES_PER_FILE // 4 > most
        used = disk_use(self._disk_path)
        self._disk_at = now + max(DISK_INTERVAL_SECONDS, PAUSE_FACTOR * (time.monotonic() - now))
        return used > most


def reaped_seconds() -> float:
    """Processor time of all processes that this one has waited for."""
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    return reaped.ru_utime + reaped.ru_stime


def read(path: str) -> bytes | None:
    """The content of a file below /proc; None when its process is gone or not ours to look at."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(8192)
    except OSError:
        return None


def stat_fields(pid: str) -> list[bytes]:
    """The fields of `/proc/PID/stat` after the name; empty if the process is gone."""
    stat = read(f"/proc/{pid}/stat")
    return stat[stat.rindex(b")") + 2 :].split() if stat else []


def process_group(pid: str) -> int | None:
    fields = stat_fields(pid)
    return int(fields[2]) if fields else None


def resident_memory(pid: str) -> int:
    statm = read(f"/proc/{pid}/statm")
    return int(statm.split()[1]) * PAGE_BYTES if statm else 0


def proportional_memory(pid: str) -> int:
    for line in (read(f"/proc/{pid}/smaps_rollup") or b"").split(b"\n"):
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    return resident_memory(pid)


def find_descendants(pid: str) -> list[str]:
    descendants: list[str] = []
    unvisited = [pid]
    while unvisited:
        parent = unvisited.pop()
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            children = (read(f"/proc/{parent}/task/{task}/children") or b"").decode().split()
            descendants += children
            unvisited += children
    return descendants


def disk_use(folder: str) -> int:
    used = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                used += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue
    return used
