"""A filter of system calls, for what namespaces leave open.

Some address families do not belong to a network namespace (a virtual machine's line to its host is one), so
only local, internet and netlink sockets can be made; io_uring goes, because it makes sockets past the filter.
Key rings, BPF, perf and userfaultfd are large, rarely needed ways into the kernel.

The tests of a verifier, and the agent's programs that they run, share a user. A second filter refuses the calls with
which one process changes another: its memory, its descriptors, its limits, its terminal.
"""

from __future__ import annotations

import errno
import platform
from dataclasses import dataclass

from paddock.bpf import JUMP_EQUAL, allow, argument, begin, instruction, refuse, when

FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
IO_URING = (425, 426, 427)

PIDFD_GETFD = 438
TIOCSTI = 0x5412


@dataclass(frozen=True, slots=True)
class Machine:
    audit: int
    socket: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd."""
    reaches_others: tuple[int, ...]
    """ptrace, process_vm_readv, process_vm_writev."""
    prlimit: int
    ioctl: int


MACHINES = {
    "x86_64": Machine(0xC000003E, 41, (248, 249, 250, 298, 321, 323), (101, 310, 311), 302, 16),
    "aarch64": Machine(0xC00000B7, 198, (217, 218, 219, 241, 280, 282), (117, 270, 271), 261, 29),
}


def program(name: str | None = None) -> bytes | None:
    """The filter as bubblewrap takes it; None for a machine whose numbers are not known here."""
    machine = MACHINES.get(name or platform.machine())
    if machine is None:
        return None
    lines = begin(machine.audit)
    for numbers, reason in ((IO_URING, errno.ENOSYS), (machine.refused, errno.EPERM)):
        for number in numbers:
            lines += when(number, [refuse(reason)])
    lines += [instruction(JUMP_EQUAL, machine.socket, 1, 0), allow(), argument(0)]
    for family in FAMILIES:
        lines += [instruction(JUMP_EQUAL, family, 0, 1), allow()]
    return b"".join([*lines, refuse(errno.EAFNOSUPPORT)])


def program_for_tests(name: str | None = None) -> bytes | None:
    """The further filter for the tests of a verifier; None for a machine whose numbers are not known here."""
    machine = MACHINES.get(name or platform.machine())
    if machine is None:
        return None
    lines = begin(machine.audit)
    for number in (*machine.reaches_others, PIDFD_GETFD):
        lines += when(number, [refuse()])
    # With the number of a process and a new limit; 0 is the caller itself, and without a new limit it only asks.
    lines += when(
        machine.prlimit,
        [
            argument(0),
            instruction(JUMP_EQUAL, 0, 0, 1),
            allow(),
            argument(2),
            instruction(JUMP_EQUAL, 0, 0, 3),
            argument(2, upper=True),
            instruction(JUMP_EQUAL, 0, 0, 1),
            allow(),
            refuse(),
        ],
    )
    lines += when(machine.ioctl, [argument(1), instruction(JUMP_EQUAL, TIOCSTI, 0, 1), refuse(), allow()])
    return b"".join([*lines, allow()])
