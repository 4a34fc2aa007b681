import errno
import struct

import pytest

from paddock.fleet.instance.verifier.restrictions import SYSCALLS, build_filter
from paddock.seccomp import ALLOW, AUDIT_ARCHITECTURES, REFUSE

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
REFUSED = REFUSE | errno.EPERM


def answer(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the filter says to a system call, worked out line by line."""
    lines = build_filter(machine)
    assert lines is not None
    place = AUDIT_ARCHITECTURES[machine] if audit is None else audit
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, place, 0, *padded)
    held, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", lines, at * 8)
        at += 1
        if code == RETURN:
            return int(value)
        if code == LOAD:
            held = struct.unpack_from("=I", data, value)[0]
            continue
        holds = {JUMP_EQUAL: held == value, JUMP_AT_LEAST: held >= value, JUMP_ANY_BIT: bool(held & value)}[code]
        at += if_true if holds else if_false


@pytest.mark.parametrize("machine", sorted(SYSCALLS))
def test_computing_is_allowed_and_the_rest_is_not(machine: str) -> None:
    numbers = SYSCALLS[machine]
    assert all(answer(machine, number) == ALLOW for number in numbers.allowed)
    special = {
        numbers.clone,
        numbers.clone3,
        numbers.prlimit,
        numbers.fcntl,
        numbers.ioctl,
        *(n for n, _ in numbers.opens),
    }
    others = set(range(470)) - set(numbers.allowed) - special
    assert {answer(machine, number) for number in others} == {REFUSED}


@pytest.mark.parametrize("machine", sorted(SYSCALLS))
def test_threads_are_allowed_and_processes_are_not(machine: str) -> None:
    numbers = SYSCALLS[machine]
    assert answer(machine, numbers.clone, 0x3D0F00) == ALLOW
    assert answer(machine, numbers.clone, 0x1200011) == REFUSED
    assert answer(machine, numbers.clone3) == REFUSE | errno.ENOSYS


@pytest.mark.parametrize("machine", sorted(SYSCALLS))
def test_files_are_opened_for_reading_only(machine: str) -> None:
    for number, place in SYSCALLS[machine].opens:
        flags = [0] * place
        assert answer(machine, number, *flags, 0o2000000) == ALLOW
        assert all(answer(machine, number, *flags, bits) == REFUSED for bits in (1, 2, 0o100, 0o1000, 0o2000))


@pytest.mark.parametrize("machine", sorted(SYSCALLS))
def test_others_are_left_alone(machine: str) -> None:
    numbers = SYSCALLS[machine]
    assert answer(machine, numbers.prlimit, 0) == ALLOW
    assert answer(machine, numbers.prlimit, 77) == REFUSED
    assert [answer(machine, numbers.fcntl, 3, command) for command in (1, 8, 15)] == [ALLOW, REFUSED, REFUSED]
    assert [answer(machine, numbers.ioctl, 3, command) for command in (0x5401, 0x8901)] == [ALLOW, REFUSED]


def test_another_calling_convention_gets_nothing() -> None:
    assert answer("x86_64", 0, audit=0x40000003) == REFUSE | errno.ENOSYS
    assert answer("x86_64", 0x40000000) == REFUSE | errno.ENOSYS


def test_an_unknown_machine_has_no_filter() -> None:
    assert build_filter("abacus") is None
