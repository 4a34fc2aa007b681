"""Assembler for seccomp filters in the kernel's classic BPF. Knows nothing of what a filter is for."""

from __future__ import annotations

import errno
import struct

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
"""SECCOMP_RET_ALLOW and SECCOMP_RET_ERRNO."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""
AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* by `platform.machine()`."""
X32 = 0x40000000


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def allow() -> bytes:
    return instruction(RETURN, ALLOW)


def refuse(reason: int = errno.EPERM) -> bytes:
    """The call fails with this errno."""
    return instruction(RETURN, REFUSE | reason)


def load_argument(place: int, *, upper: bool = False) -> bytes:
    """Load 32 bits of an argument. Both architectures are little-endian: the lower half comes first."""
    return instruction(LOAD, ARGUMENTS + 8 * place + 4 * upper)


def on_call(number: int, lines: list[bytes]) -> list[bytes]:
    """Run `lines` for one system call; they must end in a return. Other calls jump over them."""
    return [instruction(JUMP_EQUAL, number, 0, len(lines)), *lines]


def check_architecture(machine: str) -> list[bytes]:
    """Refuse calls of another architecture, and of x32: their numbers mean other calls. Then load the call number."""
    return [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, AUDIT_ARCHITECTURES[machine], 1, 0),
        refuse(errno.ENOSYS),
        instruction(LOAD, NUMBER),
        instruction(JUMP_AT_LEAST, X32, 0, 1),
        refuse(errno.ENOSYS),
    ]
