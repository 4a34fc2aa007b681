"""Limits that hold against the code of a verifier, put on by a process on itself.

A verifier computes: it reads what is there already and says a result. So a filter of system calls lets through
what computing needs and refuses the rest: no new process, no file opened for writing, no network, no signal to
others. Landlock, where the kernel has it, leaves only Python's own folders to read. Resource limits bound
memory and processor time. Knows nothing of verifiers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from dataclasses import dataclass

from paddock.bpf import JUMP_ANY_BIT, JUMP_EQUAL, allow, argument, begin, instruction, refuse, when

MEBIBYTE = 1024 * 1024
OPEN_FILES = 64

# -- resource limits ----------------------------------------------------------------------------------


def limit_resources(memory_bytes: int, cpu_seconds: int, *, jailed: bool) -> None:
    """Bound what this process may use. `memory_bytes` comes on top of what it has mapped already."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: mapped + memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    if not jailed:
        limits[resource.RLIMIT_NPROC] = 0
    for kind, wanted in limits.items():
        _, most = resource.getrlimit(kind)
        bound = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (bound, bound))


# -- system calls -------------------------------------------------------------------------------------

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x00010000
SET_OWNER = (8, 15)
"""F_SETOWN and F_SETOWN_EX: they have signals sent to another process."""
SIGNAL_OWNER = (0x8901, 0x8902, 0x5412)
"""FIOSETOWN, SIOCSPGRP, TIOCSTI: the same by another way, and typing into a terminal."""


@dataclass(frozen=True, slots=True)
class Machine:
    audit: int
    allowed: tuple[int, ...]
    """Calls that computing, reading and talking over pipes that are open already need."""
    opens: tuple[tuple[int, int], ...]
    """The calls that open files, each with the place of its flags."""
    clone: int
    clone3: int
    prlimit: int
    fcntl: int
    ioctl: int


MACHINES = {
    "x86_64": Machine(
        audit=0xC000003E,
        allowed=(
            0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 22, 23, 24, 25, 28, 32, 33, 34, 35,
            36, 37, 38, 39, 44, 45, 48, 51, 52, 53, 54, 55, 60, 63, 78, 79, 89, 96, 97, 98, 99, 100, 102, 104, 107,
            108, 110, 111, 121, 124, 127, 128, 130, 131, 137, 138, 158, 186, 201, 202, 204, 217, 218, 219, 221, 228,
            229, 230, 231, 232, 233, 262, 267, 269, 270, 271, 273, 281, 290, 291, 292, 293, 318, 324, 332, 334, 439,
            449,
        ),
        opens=((2, 1), (257, 2)),
        clone=56,
        clone3=435,
        prlimit=302,
        fcntl=72,
        ioctl=16,
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        allowed=(
            17, 19, 20, 21, 22, 23, 24, 43, 44, 48, 57, 59, 61, 62, 63, 64, 65, 66, 67, 72, 73, 78, 79, 80, 93, 94,
            96, 98, 99, 101, 102, 103, 113, 114, 115, 123, 124, 128, 132, 133, 134, 135, 136, 137, 139, 153, 155, 156,
            160, 163, 165, 169, 172, 173, 174, 175, 176, 177, 178, 179, 199, 204, 205, 206, 207, 208, 209, 210, 214,
            215, 216, 222, 223, 226, 233, 278, 283, 291, 293, 439, 449,
        ),
        opens=((56, 2),),
        clone=220,
        clone3=435,
        prlimit=261,
        fcntl=25,
        ioctl=29,
    ),
}  # fmt: skip


def program(name: str | None = None) -> bytes | None:
    """The filter; None for a machine whose numbers are not known here."""
    machine = MACHINES.get(name or platform.machine())
    if machine is None or not sys.platform.startswith("linux"):
        return None
    lines = [
        *begin(machine.audit),
        # The C library tries the older call, whose flags can be seen, when this one is missing.
        *when(machine.clone3, [refuse(errno.ENOSYS)]),
        *when(machine.clone, [argument(0), instruction(JUMP_ANY_BIT, CLONE_THREAD, 1, 0), refuse(), allow()]),
        *when(machine.prlimit, [argument(0), instruction(JUMP_EQUAL, 0, 1, 0), refuse(), allow()]),
    ]
    for number, flags in machine.opens:
        lines += when(number, [argument(flags), instruction(JUMP_ANY_BIT, WRITES, 0, 1), refuse(), allow()])
    for number, commands in ((machine.fcntl, SET_OWNER), (machine.ioctl, SIGNAL_OWNER)):
        checks = [line for command in commands for line in (instruction(JUMP_EQUAL, command, 0, 1), refuse())]
        lines += when(number, [argument(1), *checks, allow()])
    for number in machine.allowed:
        lines += when(number, [allow()])
    return b"".join([*lines, refuse()])


# -- putting it on ------------------------------------------------------------------------------------

NO_NEW_PRIVILEGES, SET_SECCOMP, SUBREAPER = 38, 22, 36
FILTER_MODE = 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
ACCESSES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All that Landlock can forbid with files, by its version."""

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_void_p))


def adopt_orphans() -> None:
    """Become the parent of every process whose own parent ends below this one."""
    _libc.prctl(SUBREAPER, 1, 0, 0, 0)


def filter_calls(lines: bytes) -> bool:
    """Let only the calls of `program` through, for ever. False if the kernel cannot."""
    if _libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    held = ctypes.create_string_buffer(lines, len(lines))
    given = _Program(len(lines) // 8, ctypes.addressof(held))
    return int(_libc.prctl(SET_SECCOMP, FILTER_MODE, ctypes.byref(given), 0, 0)) == 0


def readable_folders() -> list[str]:
    """Where Python finds modules and the libraries they are linked with."""
    found = {*sys.path, sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    system = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom"}
    return sorted(path for path in found | system if path not in ("", "/") and os.path.exists(path))


def restrict_reading(folders: list[str]) -> bool:
    """Leave only `folders` to read, for ever. False if the kernel has no Landlock."""
    version = _libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = struct.pack("=Q", ACCESSES[min(version, max(ACCESSES))])
    ruleset = _libc.syscall(CREATE_RULESET, handled, len(handled), 0)
    if ruleset < 0:
        return False
    try:
        for path in folders:
            _allow(ruleset, path)
        _libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return int(_libc.syscall(RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str) -> None:
    access = READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE
    held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, held)
        _libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
    finally:
        os.close(held)
