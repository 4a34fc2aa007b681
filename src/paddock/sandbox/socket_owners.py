"""Finds the processes of a sandbox that hold the other end of a connection, in /proc of the host.

Knows nothing of agents and model calls. A process is described by its lineage: the programs from the command that the
sandbox started down to the process itself. Forks that ran no other program since belong to the program they were
forked from; the kernel marks them (PF_FORKNOEXEC), so no process can pretend to be one.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

FORKED_WITHOUT_EXEC = 0x40
MOST_PROCESSES = 2048
MOST_DESCRIPTORS = 50_000
"""A sandbox with more than this is not searched: the result is empty, as if the process had ended."""
LONGEST_LINEAGE = 64
NETLINK_SECONDS = 1.0
CACHED_PROCESSES, CACHED_DESCRIPTORS = 4, 4
SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST = 20, 1
ALL_STATES, ANY_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF
PORTS_OFFSET, INODE_OFFSET = 20, 84
"""In `struct inet_diag_msg`, behind the header of a netlink message."""

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Program:
    """What one process executed: the same value for its forks, another one after each exec."""

    pid: int
    started: int
    """Start time of the process in clock ticks: with the pid it identifies the process."""
    executable: tuple[int, int]
    """Device and inode of the file."""
    name: str


Lineage = tuple[Program, ...]
"""From the command that the sandbox started to the process. Empty for a process that is not below a command: its
parent ended before it, or it does not belong to the sandbox."""


@dataclass(frozen=True, slots=True)
class SocketOwners:
    """The processes that hold a connection."""

    lineages: tuple[Lineage, ...] = ()
    is_private: bool = False
    """Whether no program that they execute gets the connection too (their descriptors are closed on exec)."""


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    is_fork: bool
    """Forked, and has executed nothing since."""
    started: int


@dataclass(frozen=True, slots=True)
class _CachedOwner:
    """A process that was found before, and the descriptors that were its connections."""

    process: _Process
    program: Program | None
    lineage: Lineage
    descriptors: tuple[str, ...]


class SocketOwnerFinder:
    """Looks at the processes below `guest`. `find` blocks for a moment: call it in a thread."""

    def __init__(
        self,
        guest: int,
        diagnosis: socket.socket | None,
        commands: Callable[[], set[int]],
        acting_as_owner: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._guest = guest
        self._diagnosis = diagnosis
        """A netlink socket of the sandbox' network namespace; without one, the tables in /proc are read."""
        self._diagnosis_lock = threading.Lock()
        self._cached: dict[int, _CachedOwner] = {}
        self._commands = commands
        """The pids of the commands that run, as they are inside."""
        self._acting_as_owner = acting_as_owner
        """Enters the rights with which processes inside may be looked at."""

    def close(self) -> None:
        with self._diagnosis_lock:
            if self._diagnosis is not None:
                self._diagnosis.close()
                self._diagnosis = None

    def find(self, near: Address, far: Address) -> SocketOwners:
        """All processes that hold the connection from `near` to `far`, IPv4 addresses inside."""
        with self._acting_as_owner():
            target = self._query_netlink(near, far) or self._read_tables(near[1], far[1])
            if target is None:
                return SocketOwners()
            processes = self._processes()
            left = MOST_DESCRIPTORS
            lineages: list[Lineage] = []
            is_private = True
            for pid in processes:
                left, descriptors = find_descriptors(pid, target, left)
                if left <= 0:
                    return SocketOwners()
                if descriptors:
                    lineages.append(self._lineage(pid, processes))
                    is_private = is_private and all(closes_on_exec(pid, each) for each in descriptors)
                    self._remember(processes[pid], lineages[-1], descriptors)
            return SocketOwners(tuple(lineages), is_private)

    def find_cached(self, near: Address, far: Address) -> SocketOwners | None:
        """The same without a search, in some 50 microseconds: only for a process that was found before, has the
        connection under a descriptor number that it used before, and shares it with nobody. Otherwise None."""
        with self._acting_as_owner():
            target = self._query_netlink(near, far)
            for pid, cached in list(self._cached.items()) if target is not None else ():
                for descriptor in cached.descriptors:
                    if link_of(f"/proc/{pid}/fd/{descriptor}") != target or not closes_on_exec(pid, descriptor):
                        continue
                    process = read_process(pid)
                    if process is not None and process == cached.process and read_program(process) == cached.program:
                        return SocketOwners((cached.lineage,), True)
            return None

    def _remember(self, process: _Process, lineage: Lineage, descriptors: list[str]) -> None:
        before = self._cached.pop(process.pid, None)
        same = before is not None and before.process == process
        older = before.descriptors if before is not None and same else ()
        newest = tuple(dict.fromkeys((*descriptors, *older)))[:CACHED_DESCRIPTORS]
        self._cached[process.pid] = _CachedOwner(process, read_program(process), lineage, newest)
        while len(self._cached) > CACHED_PROCESSES:
            del self._cached[next(iter(self._cached))]

    def _query_netlink(self, near: Address, far: Address) -> str | None:
        """The link target in /proc/PID/fd of the socket at `near`."""
        with self._diagnosis_lock:
            if self._diagnosis is None:
                return None
            try:
                self._diagnosis.settimeout(NETLINK_SECONDS)
                self._diagnosis.send(diagnosis_request(near, far))
                inode = diagnosed_inode(self._diagnosis.recv(8192), near, far)
                return None if inode is None else f"socket:[{inode}]"
            except OSError:
                # A late answer would be taken for the answer to the next request.
                self._diagnosis.close()
                self._diagnosis = None
                return None

    def _read_tables(self, near: int, far: int) -> str | None:
        """The same from /proc. The kernel walks through the sockets of the whole machine for that."""
        for table in ("tcp", "tcp6"):
            with suppress(OSError), open(f"/proc/{self._guest}/net/{table}", "rb") as file:
                inode = inode_of(file.read(), near, far)
                if inode is not None:
                    return f"socket:[{inode}]"
        return None

    def _processes(self) -> dict[int, _Process]:
        """All processes of the sandbox but the guest."""
        processes: dict[int, _Process] = {}
        unvisited = [self._guest]
        while unvisited and len(processes) < MOST_PROCESSES:
            for pid in children(unvisited.pop()):
                if pid not in processes and (process := read_process(pid)) is not None:
                    processes[pid] = process
                    unvisited.append(pid)
        return processes

    def _lineage(self, pid: int, processes: dict[int, _Process]) -> Lineage:
        ancestors: list[_Process] = []
        current = processes.get(pid)
        while current is not None and len(ancestors) < LONGEST_LINEAGE:
            ancestors.append(current)
            current = processes.get(current.parent)
        if ancestors[-1].parent != self._guest or inner_pid(ancestors[-1].pid) not in self._commands():
            return ()
        programs: list[Program] = []
        for process in reversed(ancestors):
            if process.is_fork and programs:
                continue
            program = read_program(process)
            if program is None:
                return ()
            programs.append(program)
        return tuple(programs)


def diagnosis_request(near: Address, far: Address) -> bytes:
    """A netlink request for the one TCP socket whose own end is `near` and whose other end is `far`."""
    ports = struct.pack(">HH", near[1], far[1])
    places = b"".join(socket.inet_aton(host) + bytes(12) for host, _ in (near, far))
    body = struct.pack("=BBBBI", socket.AF_INET, socket.IPPROTO_TCP, 0, 0, ALL_STATES)
    body += ports + places + struct.pack("=III", 0, ANY_COOKIE, ANY_COOKIE)
    return struct.pack("=IHHII", 16 + len(body), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 0, 0) + body


def diagnosed_inode(answer: bytes, near: Address, far: Address) -> str | None:
    """The inode in the answer; None if there is no such socket, or if nobody holds it any more."""
    if len(answer) < INODE_OFFSET + 4 or struct.unpack_from("=H", answer, 4)[0] != SOCK_DIAG_BY_FAMILY:
        return None
    # Where there is no such connection, the kernel may answer with a socket that listens.
    if struct.unpack_from(">HH", answer, PORTS_OFFSET) != (near[1], far[1]):
        return None
    inode: int = struct.unpack_from("=I", answer, INODE_OFFSET)[0]
    return str(inode) if inode else None


def inode_of(table: bytes, near: int, far: int) -> str | None:
    """The inode of a socket in a table of the kernel; None if it is closed, or not there."""
    own, other = b":%04X" % near, b":%04X" % far
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[1].endswith(own) and fields[2].endswith(other) and is_loopback(fields[1]):
            return None if fields[9] == b"0" else fields[9].decode()
    return None


def is_loopback(address: bytes) -> bool:
    """Of an address as the kernel prints it: 127.0.0.0/8, also as an IPv6 address."""
    last = int(address.partition(b":")[0][-8:], 16)
    return struct.pack("=I", last)[0] == 127


def find_descriptors(pid: int, target: str, left: int) -> tuple[int, list[str]]:
    """How many more descriptors may be read, and those of a process that link to `target`."""
    folder = f"/proc/{pid}/fd"
    descriptors = []
    with suppress(OSError):
        for name in os.listdir(folder):
            left -= 1
            if left <= 0:
                break
            with suppress(OSError):
                if os.readlink(f"{folder}/{name}") == target:
                    descriptors.append(name)
    return left, descriptors


def link_of(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def closes_on_exec(pid: int, descriptor: str) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/fdinfo/{descriptor}", "rb", buffering=0) as file:
        for line in file.read(4096).splitlines():
            if line.startswith(b"flags:"):
                return bool(int(line.split()[1], 8) & os.O_CLOEXEC)
    return False


def children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                yield from map(int, file.read(65536).split())


def read_process(pid: int) -> _Process | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            stat = file.read(4096)
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return _Process(pid, int(fields[1]), bool(int(fields[6]) & FORKED_WITHOUT_EXEC), int(fields[19]))


def read_program(process: _Process) -> Program | None:
    path = f"/proc/{process.pid}/exe"
    try:
        file = os.stat(path)
        name = os.path.basename(os.readlink(path))
    except OSError:
        return None
    return Program(process.pid, process.started, (file.st_dev, file.st_ino), name)


def inner_pid(pid: int) -> int | None:
    """The pid of a process in the innermost namespace that it is in."""
    with suppress(OSError), open(f"/proc/{pid}/status", "rb", buffering=0) as file:
        for line in file.read(8192).splitlines():
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return None
