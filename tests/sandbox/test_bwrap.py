"""What only the bubblewrap backend promises."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from paddock.errors import SandboxError
from paddock.limits import MEBIBYTE
from paddock.sandbox import Command, Completed, Mount, SandboxSpec, syscall_policy
from paddock.sandbox.bwrap import find_bwrap, find_python
from sandbox.places import LIMITS, SPEC, needs_bwrap, opened

pytestmark = needs_bwrap


def run(script: str, spec: SandboxSpec = SPEC) -> Completed:
    async def scenario() -> Completed:
        async with await opened("bwrap", spec) as sandbox:
            return await sandbox.exec(Command(script), timeout=20)  # type: ignore[no-any-return]

    return asyncio.run(scenario())


def python(code: str) -> bytes:
    return run(f"python3 -c '{code}' 2>&1").stdout


@pytest.mark.parametrize("family", ["VSOCK", "ALG", "PACKET"])
def test_sockets_that_know_no_namespace_cannot_be_made(family: str) -> None:
    assert b"Address family not supported" in python(f"import socket; socket.socket(socket.AF_{family}, 1)")


def test_other_sockets_can_be_made() -> None:
    families = "AF_UNIX, AF_INET, AF_INET6, AF_NETLINK"
    assert python(f"from socket import *; print(len([socket(f, SOCK_DGRAM) for f in ({families})]))") == b"4\n"


@pytest.mark.parametrize("machine", syscall_policy.CALLS)
def test_the_filter_is_whole_instructions(machine: str) -> None:
    program = syscall_policy.sandbox_filter(machine)
    assert program
    assert len(program) % 8 == 0


def test_an_unknown_machine_has_no_filter() -> None:
    assert syscall_policy.sandbox_filter("pdp11") is None


def test_no_descriptor_of_the_host_is_open_inside() -> None:
    assert run("ls /proc/self/fd | wc -l").stdout.strip() == b"4"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has folders that others cannot enter and still mounts them")
def test_folders_that_only_root_can_reach_are_mounted(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    (closed / "inner/file").write_text("shown")
    (closed / "inner").chmod(0o755)
    closed.chmod(0o700)
    mounts = (
        Mount(closed / "inner", PurePosixPath("/opt/inner")),
        Mount(closed / "inner/file", PurePosixPath("/opt/file")),
    )
    spec = SandboxSpec(LIMITS, mounts=mounts, readonly_tests={"test.sh": b"#!/bin/sh\necho tested"})
    done = run("cat /opt/inner/file /opt/file; /tests/test.sh; touch /opt/inner/x; ls /", spec)
    assert done.stdout.startswith(b"shownshowntested\n")
    assert b"Read-only" in done.stderr
    assert b"mnt" not in done.stdout
    assert os.listdir(closed / "inner") == ["file"]


def test_what_is_mounted_below_the_home_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(3 * MEBIBYTE))
    tmp_path.chmod(0o755)

    async def scenario() -> list[str]:
        spec = SandboxSpec(LIMITS, mounts=(Mount(tmp_path, PurePosixPath("/home/user/tool")),))
        async with await opened("bwrap", spec) as sandbox:
            assert len(await sandbox.pack("/home/user", limit=MEBIBYTE)) < MEBIBYTE
            return [entry.path for entry in await sandbox.list("/home/user")]

    assert asyncio.run(scenario()) == ["logs", "logs/verifier", "workdir"]


def test_processors_are_limited() -> None:
    spec = replace(SPEC, limits=replace(LIMITS, cpus=1))
    assert run("nproc", spec).stdout == b"1\n"


def test_too_many_files_end_the_sandbox() -> None:
    code = "import os\nfor n in range(300000): os.close(os.open(str(n), os.O_CREAT))\nimport time; time.sleep(60)"
    done = run(f"python3 -c '{code}'")
    assert done.killed_for == "disk"


def test_shared_memory_is_counted_once() -> None:
    fork = "if not os.fork(): time.sleep(0.6); os._exit(0)"
    code = f'import os, time; held = b"x" * 60_000_000\nfor _ in range(5):\n  {fork}\ntime.sleep(0.7)'
    spec = replace(SPEC, limits=replace(LIMITS, memory_bytes=200 * MEBIBYTE))
    done = run(f"python3 -c '{code}'", spec)
    assert (done.exit_code, done.killed_for) == (0, None)


def test_a_command_that_is_too_long_is_refused() -> None:
    with pytest.raises(SandboxError, match="too long"):
        run("x" * MEBIBYTE)


def test_a_zero_byte_in_a_command_is_refused() -> None:
    with pytest.raises(SandboxError, match="zero byte"):
        run("a\0b")


def test_files_written_by_the_host_belong_to_the_user_inside() -> None:
    async def scenario() -> bytes:
        async with await opened("bwrap") as sandbox:
            await sandbox.write("/home/user/a/b", b"x")
            done = await sandbox.exec(
                Command("stat -c '%U %a' ~/a ~/a/b && echo y >> ~/a/b && rm -r ~/a"), timeout=20
            )
            assert done.exit_code == 0
            return done.stdout  # type: ignore[no-any-return]

    assert asyncio.run(scenario()) == b"user 755\nuser 644\n"


def test_the_programs_are_found() -> None:
    assert os.access(find_bwrap(), os.X_OK)
    assert os.access(find_python()[0], os.X_OK)
