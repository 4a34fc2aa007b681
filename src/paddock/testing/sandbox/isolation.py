"""What only an isolating backend can promise."""

from __future__ import annotations

import os
import shlex
import socket
import tempfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

from paddock.limits import MEBIBYTE
from paddock.sandbox.base import Command, Mount
from paddock.testing.checks import require
from paddock.testing.sandbox.commands import it_runs_a_command
from paddock.testing.sandbox.subject import (
    COMMAND_SECONDS,
    SPEC,
    SandboxSubject,
    check,
    make_file,
    refuses,
    require_isolation,
    run,
)


@check("give it a network of its own, without a way out")
async def the_network_is_out_of_reach(subject: SandboxSubject) -> None:
    require_isolation(subject)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        probe = f"""
import socket
for place in (("127.0.0.1", {port}), ("192.0.2.1", 80), ("8.8.8.8", 53)):
    try:
        socket.create_connection(place, 2).close()
        print("reached", place)
    except OSError as error:
        print(error)
"""
        done = await subject.shared.exec(Command(["python3", "-c", probe]), timeout=COMMAND_SECONDS)
    require(b"reached" not in done.stdout and done.stdout.count(b"\n") == 3, f"got {done}")
    require(b"unreachable" in done.stdout, f"there is a route out: {done.stdout!r}")


@check("show nothing of the host but its programs")
async def files_of_the_host_are_invisible(subject: SandboxSubject) -> None:
    require_isolation(subject)
    with tempfile.NamedTemporaryFile() as secret:
        places = f"{shlex.quote(secret.name)} /etc/shadow {shlex.quote(str(Path.home()))}/."
        done = await subject.run(f"for place in {places}; do [ -e $place ] && echo $place; done; true")
    require(done.stdout == b"", f"visible: {done.stdout.decode()}")


@check("give it process numbers of its own")
async def processes_of_the_host_are_invisible(subject: SandboxSubject) -> None:
    require_isolation(subject)
    done = await subject.run("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | wc -l; ls -d /proc/[0-9]* | wc -l")
    require(int(done.stdout.split()[1]) < 30, f"{done.stdout!r} processes are visible")
    done = await subject.run(f"kill -0 {os.getpid()}")
    require(done.exit_code != 0 or os.getpid() < 1000, "our own process can be signalled")


@check("drop every capability, and forbid new ones")
async def it_has_no_special_rights(subject: SandboxSubject) -> None:
    require_isolation(subject)
    done = await subject.run("grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status")
    seen = {name: int(value, 16) for name, value in (line.split(b":") for line in done.stdout.splitlines())}
    require(seen == {b"CapEff": 0, b"CapBnd": 0, b"NoNewPrivs": 1}, f"got {seen}")
    done = await subject.run("unshare --user true")
    require(done.exit_code != 0, "it can make user namespaces, and be root in them")


@check("only the home, the logs and the temporary folder can be written")
async def the_rest_is_read_only(subject: SandboxSubject) -> None:
    require_isolation(subject)
    with tempfile.TemporaryDirectory() as folder:
        make_file(Path(folder, "file"), "of the host")
        os.chmod(folder, 0o777)
        spec = replace(SPEC, mounts=(Mount(Path(folder), PurePosixPath("/opt/mounted")),))
        async with subject.another(spec) as sandbox:
            require((await run(sandbox, "cat /opt/mounted/file")).stdout == b"of the host", "the mount is not there")
            places = "/ /usr /usr/bin /etc /opt/mounted /tests /tests/data /dev /proc/sys"
            done = await run(sandbox, f"for p in {places}; do touch $p/x 2>/dev/null && echo $p; done; true")
            require(done.stdout == b"", f"could be written: {done.stdout.decode()}")
            done = await run(sandbox, "touch ~/x /tmp/x /logs/x && echo > /opt/mounted/file")
            require(done.exit_code != 0 and b"mounted" in done.stderr, f"got {done}")
        require(os.listdir(folder) == ["file"], "the mounted folder was changed")


@check("let nothing inside end or trace the process that keeps it", needs=[it_runs_a_command])
async def it_cannot_be_broken_from_inside(subject: SandboxSubject) -> None:
    require_isolation(subject)
    done = await subject.run("for s in HUP INT TERM USR1 STOP KILL; do kill -$s 1; done; ls /proc/1/fd /proc/1/cwd/")
    require(done.exit_code != 0 and done.stdout == b"", f"its first process can be looked into: {done}")
    require((await subject.run("echo here")).stdout == b"here\n", "it did not survive")


@check("limit the number of processes", needs=[it_runs_a_command])
async def processes_are_limited(subject: SandboxSubject) -> None:
    require_isolation(subject)
    bomb = """
import os, time
started = 0
try:
    while started < 500:
        if os.fork() == 0:
            time.sleep(1000)
        started += 1
except BlockingIOError:
    pass
print(started)
"""
    async with subject.another(processes=40) as sandbox:
        done = await sandbox.exec(Command(["python3", "-c", bomb]), timeout=COMMAND_SECONDS)
        started = int(done.stdout or 0)
        require(done.killed_for == "processes" or 20 < started <= 40, f"{started} processes were started: {done}")


@check("limit what can be written, temporary files included, with an honest ENOSPC", needs=[it_runs_a_command])
async def the_disk_is_limited(subject: SandboxSubject) -> None:
    require_isolation(subject)
    async with subject.another(disk_bytes=8 * MEBIBYTE) as sandbox:
        fill = "for p in ~ /tmp /logs /dev/shm; do head -c 9000000 /dev/zero > $p/big; done"
        done = await run(sandbox, f"{fill}; cat ~/big /tmp/big /logs/big /dev/shm/big | wc -c")
        require(b"No space left" in done.stderr, f"it was not told: {done}")
        require(0 < int(done.stdout) <= 8 * MEBIBYTE, f"{done.stdout!r} bytes were written")
        await refuses(sandbox.write("/home/user/more", bytes(MEBIBYTE)), "the host could write more")
