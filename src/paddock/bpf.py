"""Writes filters of system calls (seccomp) in the kernel's classic BPF. Knows nothing of what they are for."""

from __future__ import annotations

import errno
import struct

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
X32 = 0x40000000


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def allow() -> bytes:
    return instruction(RETURN, ALLOW)


def refuse(reason: int = errno.EPERM) -> bytes:
    """The call fails with this errno."""
    return instruction(RETURN, REFUSE | reason)


def argument(place: int, *, upper: bool = False) -> bytes:
    """Load 32 bits of an argument. The machines that we know store the lower half first."""
    return instruction(LOAD, ARGUMENTS + 8 * place + 4 * upper)


def when(number: int, lines: list[bytes]) -> list[bytes]:
    """`lines` for one system call; they must end in an answer. Any other call goes on behind them."""
    return [instruction(JUMP_EQUAL, number, 0, len(lines)), *lines]


def begin(audit: int) -> list[bytes]:
    """Refuse what another architecture, or x32, calls by the same numbers. Then the number of the call is loaded."""
    return [
        instruction(LOAD, ARCHITECTURE),
        instruction(JUMP_EQUAL, audit, 1, 0),
        refuse(errno.ENOSYS),
        instruction(LOAD, NUMBER),
        instruction(JUMP_AT_LEAST, X32, 0, 1),
        refuse(errno.ENOSYS),
    ]
