"""Which process a running rollout belongs to, and whether that process is surely gone.

Surely: a process on another machine or in another container cannot be seen, so it counts as alive.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from paddock.rollouts.processes import process_start_time


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from later ones with the same number by when it started."""

    pid: int
    start_time: int | None
    """In clock ticks since the boot; None where the system does not tell."""
    boot_id: str | None
    hostname: str
    pid_namespace: str | None = None

    @classmethod
    def current(cls) -> Owner:
        pid = os.getpid()
        return cls(pid, process_start_time(pid), _boot_id(), socket.gethostname(), _pid_namespace())

    @classmethod
    def from_text(cls, text: str) -> Owner:
        return cls(**orjson.loads(text))

    def to_text(self) -> str:
        return orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS).decode()

    def is_dead(self) -> bool:
        here = Owner.current()
        if self.boot_id != here.boot_id:
            # The same machine after a reboot; under another name it may be another machine.
            return self.hostname == here.hostname
        if self.boot_id is None and self.hostname != here.hostname:
            return False
        if self.pid_namespace != here.pid_namespace:
            return False
        if self.start_time is None:
            return not _exists(self.pid)
        return process_start_time(self.pid) != self.start_time


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _pid_namespace() -> str | None:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None
