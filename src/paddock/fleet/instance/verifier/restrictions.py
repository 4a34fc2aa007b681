"""Restrictions that a process puts on itself before it runs untrusted code: rlimits, Landlock, seccomp.

The seccomp filter allows what computing needs and refuses the rest: no new process, no file opened for writing, no
network, no signal to others. Landlock, where the kernel has it, leaves only Python's own folders readable. Resource
limits bound memory and CPU time. Knows nothing of verifiers.
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

from paddock.seccomp import (
    JUMP_ANY_BIT,
    JUMP_EQUAL,
    allow,
    check_architecture,
    instruction,
    load_argument,
    on_call,
    refuse,
)

MAX_OPEN_FILES = 64

# -- resource limits ----------------------------------------------------------------------------------


def limit_resources(memory_bytes: int, cpu_seconds: int, *, has_filter: bool) -> None:
    """Bound what this process may use. `memory_bytes` comes on top of what it has mapped already."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limits = {
        resource.RLIMIT_AS: mapped + memory_bytes,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
    }
    if not has_filter:
        limits[resource.RLIMIT_NPROC] = 0
    for kind, wanted in limits.items():
        _, hard = resource.getrlimit(kind)
        bound = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(kind, (bound, bound))


# -- system calls -------------------------------------------------------------------------------------

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CLONE_THREAD = 0x00010000
SIGNAL_FCNTLS = (8, 15)
"""F_SETOWN and F_SETOWN_EX: they make the kernel send signals to another process."""
SIGNAL_IOCTLS = (0x8901, 0x8902, 0x5412)
"""FIOSETOWN and SIOCSPGRP do the same; TIOCSTI types into a terminal."""


@dataclass(frozen=True, slots=True)
class SyscallNumbers:
    """The numbers of one CPU architecture."""

    allowed: tuple[int, ...]
    """Calls that computing, reading and open pipes need."""
    opens: tuple[tuple[int, int], ...]
    """The calls that open files, each with the position of its flags."""
    clone: int
    clone3: int
    prlimit: int
    fcntl: int
    ioctl: int


SYSCALLS = {
    "x86_64": SyscallNumbers(
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
    "aarch64": SyscallNumbers(
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


def build_filter(machine: str | None = None) -> bytes | None:
    """The seccomp program; None for an architecture that is not listed here."""
    machine = machine or platform.machine()
    syscalls = SYSCALLS.get(machine)
    if syscalls is None or not sys.platform.startswith("linux"):
        return None
    instructions = [
        *check_architecture(machine),
        # When clone3 is missing, the C library uses clone, whose flags the filter can read.
        *on_call(syscalls.clone3, [refuse(errno.ENOSYS)]),
        *on_call(
            syscalls.clone, [load_argument(0), instruction(JUMP_ANY_BIT, CLONE_THREAD, 1, 0), refuse(), allow()]
        ),
        *on_call(syscalls.prlimit, [load_argument(0), instruction(JUMP_EQUAL, 0, 1, 0), refuse(), allow()]),
    ]
    for number, flags in syscalls.opens:
        instructions += on_call(
            number, [load_argument(flags), instruction(JUMP_ANY_BIT, WRITE_FLAGS, 0, 1), refuse(), allow()]
        )
    for number, commands in ((syscalls.fcntl, SIGNAL_FCNTLS), (syscalls.ioctl, SIGNAL_IOCTLS)):
        checks = [step for command in commands for step in (instruction(JUMP_EQUAL, command, 0, 1), refuse())]
        instructions += on_call(number, [load_argument(1), *checks, allow()])
    for number in syscalls.allowed:
        instructions += on_call(number, [allow()])
    return b"".join([*instructions, refuse()])


# -- installing ------------------------------------------------------------------------------------

NO_NEW_PRIVILEGES, SET_SECCOMP, SUBREAPER = 38, 22, 36
FILTER_MODE = 2
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
PATH_BENEATH = 1
READ_FILE, READ_FOLDER = 1 << 2, 1 << 3
ACCESSES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file access rights that Landlock can forbid, by its version."""

_libc = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _libc.prctl(SUBREAPER, 1, 0, 0, 0)


def install_filter(instructions: bytes) -> bool:
    """Install a seccomp program; it cannot be removed. False if the kernel refuses."""
    if _libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = _FilterProgram(len(instructions) // 8, ctypes.addressof(buffer))
    return int(_libc.prctl(SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0)) == 0


def readable_folders() -> list[str]:
    """The folders of Python's modules and of the libraries they link to."""
    python = {*sys.path, sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    system = {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/dev/urandom"}
    return sorted(path for path in python | system if path not in ("", "/") and os.path.exists(path))


def restrict_reading(folders: list[str]) -> bool:
    """Make only `folders` readable; this cannot be undone. False if the kernel has no Landlock."""
    version = _libc.syscall(CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    handled = struct.pack("=Q", ACCESSES[min(version, max(ACCESSES))])
    ruleset = _libc.syscall(CREATE_RULESET, handled, len(handled), 0)
    if ruleset < 0:
        return False
    try:
        for path in folders:
            _allow_reading(ruleset, path)
        _libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return int(_libc.syscall(RESTRICT_SELF, ruleset, 0)) == 0
    finally:
        os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    access = READ_FILE | READ_FOLDER if os.path.isdir(path) else READ_FILE
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, descriptor)
        _libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
