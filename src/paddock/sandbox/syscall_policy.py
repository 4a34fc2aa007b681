"""The seccomp filters of a sandbox: system calls that namespaces do not confine.

`sandbox_filter` holds for everything in a sandbox. Some address families do not belong to a network namespace
(AF_VSOCK reaches the host of a virtual machine), so only local, internet and netlink sockets can be made. io_uring is
refused because it makes sockets past the filter. Key rings, BPF, perf and userfaultfd are large, rarely needed parts
of the kernel.

`verifier_filter` holds for the tests of a verifier and the agent's programs that they run. They share a user, so it
refuses the calls with which one process changes another: its memory, its descriptors, its limits, its terminal.
"""

from __future__ import annotations

import errno
import platform
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

SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
IO_URING = (425, 426, 427)
PIDFD_GETFD = 438
TIOCSTI = 0x5412
CLONE3, CLONE_NEWUSER = 435, 0x10000000


@dataclass(frozen=True, slots=True)
class SandboxCalls:
    """Numbers of system calls on one architecture."""

    socket: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, perf_event_open, bpf, userfaultfd."""
    reach_processes: tuple[int, ...]
    """ptrace, process_vm_readv, process_vm_writev."""
    prlimit: int
    ioctl: int
    make_process: tuple[int, ...]
    """clone, unshare: their first argument has the flags for new namespaces."""
    change_owner: tuple[int, ...]
    """chown, fchown, lchown, fchownat, setuid, setgid, setreuid, setregid, setgroups, setresuid, setresgid, setfsuid,
    setfsgid, as far as the architecture has them."""


X86_OWNERS = (92, 93, 94, 260, 105, 106, 113, 114, 116, 117, 119, 122, 123)
ARM_OWNERS = (54, 55, 146, 144, 145, 143, 159, 147, 149, 151, 152)
CALLS = {
    "x86_64": SandboxCalls(41, (248, 249, 250, 298, 321, 323), (101, 310, 311), 302, 16, (56, 272), X86_OWNERS),
    "aarch64": SandboxCalls(198, (217, 218, 219, 241, 280, 282), (117, 270, 271), 261, 29, (220, 97), ARM_OWNERS),
}


def sandbox_filter(machine: str | None = None) -> bytes | None:
    """The filter as bubblewrap takes it; None for an architecture without known numbers."""
    machine = machine or platform.machine()
    calls = CALLS.get(machine)
    if calls is None:
        return None
    lines = check_architecture(machine)
    for numbers, reason in ((IO_URING, errno.ENOSYS), (calls.refused, errno.EPERM)):
        for number in numbers:
            lines += on_call(number, [refuse(reason)])
    lines += [instruction(JUMP_EQUAL, calls.socket, 1, 0), allow(), load_argument(0)]
    for family in SOCKET_FAMILIES:
        lines += [instruction(JUMP_EQUAL, family, 0, 1), allow()]
    return b"".join([*lines, refuse(errno.EAFNOSUPPORT)])


def image_filter(*, pretends_ownership: bool, machine: str | None = None) -> bytes | None:
    """The additional filter for a sandbox on an image, in which commands are root.

    It refuses new user namespaces, in which root would have every capability. With `pretends_ownership`, where all
    files and processes have one id, changes of owners and users succeed without effect.
    """
    machine = machine or platform.machine()
    calls = CALLS.get(machine)
    if calls is None:
        return None
    lines = check_architecture(machine)
    # The flags of clone3 are in memory, which a filter cannot read. Without clone3, libraries use clone.
    lines += on_call(CLONE3, [refuse(errno.ENOSYS)])
    for number in calls.make_process:
        lines += on_call(
            number, [load_argument(0), instruction(JUMP_ANY_BIT, CLONE_NEWUSER, 0, 1), refuse(), allow()]
        )
    if pretends_ownership:
        for number in calls.change_owner:
            lines += on_call(number, [refuse(0)])
    return b"".join([*lines, allow()])


def verifier_filter(machine: str | None = None) -> bytes | None:
    """The additional filter for the tests of a verifier; None for an architecture without known numbers."""
    machine = machine or platform.machine()
    calls = CALLS.get(machine)
    if calls is None:
        return None
    lines = check_architecture(machine)
    for number in (*calls.reach_processes, PIDFD_GETFD):
        lines += on_call(number, [refuse()])
    # prlimit(pid, resource, new_limit, …): allowed for pid 0 (the caller itself), and without a new limit.
    lines += on_call(
        calls.prlimit,
        [
            load_argument(0),
            instruction(JUMP_EQUAL, 0, 0, 1),
            allow(),
            load_argument(2),
            instruction(JUMP_EQUAL, 0, 0, 3),
            load_argument(2, upper=True),
            instruction(JUMP_EQUAL, 0, 0, 1),
            allow(),
            refuse(),
        ],
    )
    lines += on_call(calls.ioctl, [load_argument(1), instruction(JUMP_EQUAL, TIOCSTI, 0, 1), refuse(), allow()])
    return b"".join([*lines, allow()])
