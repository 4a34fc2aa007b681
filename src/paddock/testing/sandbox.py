"""What a sandbox backend must get right, check by check.

Inside, `sh` and `python3` must be there. Most checks share one sandbox; those that break theirs open another.
What only an isolating backend can promise is skipped for the others.
"""

from __future__ import annotations

import asyncio
import io
import os
import shlex
import signal
import socket
import tarfile
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.rollouts.limits import MEBIBYTE, SandboxLimits
from paddock.rollouts.sandbox.base import Command, Completed, Entry, Mount, Sandbox, SandboxSpec
from paddock.testing.checks import Skipped, Suite, Wrong

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from paddock.testing.checks import Announce, Result

CHECK_TIMEOUT = 60.0
COMMAND_TIMEOUT = 20.0
AT_ONCE = 5.0
"""Seconds that are far more than something immediate needs, even on a busy machine."""
PORT = 7000
SPEC = SandboxSpec(
    SandboxLimits(disk_bytes=64 * MEBIBYTE),
    env={"FROM_SPEC": "yes"},
    readonly_tests={"test.sh": b"#!/bin/sh\necho tested\n", "data/expected.txt": b"42"},
)


class Subject:
    """A backend to examine, and one open sandbox of it."""

    def __init__(self, open_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]], shared: Sandbox) -> None:
        self.open = open_sandbox
        self.shared = shared

    @asynccontextmanager
    async def another(self, spec: SandboxSpec = SPEC, **limits: float) -> AsyncIterator[Sandbox]:
        sandbox = await self.open(replace(spec, limits=replace(spec.limits, **limits)))  # type: ignore[arg-type]
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def run(self, script: str) -> Completed:
        return await run(self.shared, script)


async def check_sandbox(
    open: Callable[[SandboxSpec], Awaitable[Sandbox]], *, announce: Announce | None = None
) -> list[Result]:
    """Examine a backend, given the function that opens a sandbox of it. Raises if not even one can be opened."""
    async with await open(SPEC) as shared:
        return await SANDBOX.run(Subject(open, shared), timeout=CHECK_TIMEOUT, announce=announce)


SANDBOX: Suite[Subject] = Suite()
check = SANDBOX.check


# -- commands -----------------------------------------------------------------------------------------------


@check("start the command with its outputs connected, and wait for its end")
async def it_runs_a_command(subject: Subject) -> None:
    done = await subject.run("echo out; echo err >&2")
    require((done.exit_code, done.stdout, done.stderr) == (0, b"out\n", b"err\n"), f"got {done}")


@check("a command that fails is a result, also when there is no such program", needs=[it_runs_a_command])
async def exit_codes_are_reported(subject: Subject) -> None:
    require((await subject.run("exit 3")).exit_code == 3, "exit 3 was not reported")
    done = await subject.shared.exec(Command(["/no/such/program"]), timeout=COMMAND_TIMEOUT)
    require(done.exit_code == 127, f"a missing program gave {done}")


@check("report 128 + N after signal N", needs=[it_runs_a_command])
async def a_signal_is_an_exit_code(subject: Subject) -> None:
    done = await subject.run("kill -TERM $$")
    require(done.exit_code == 128 + signal.SIGTERM, f"got {done}")


@check("connect stdin to the given bytes, and to nothing if there are none", needs=[it_runs_a_command])
async def stdin_is_given(subject: Subject) -> None:
    data = os.urandom(MEBIBYTE)
    done = await subject.shared.exec(Command(["cat"], stdin=data), timeout=COMMAND_TIMEOUT)
    require(done.stdout == data, f"{len(done.stdout)} bytes of {len(data)} came back")
    require((await subject.run("cat")).stdout == b"", "there was something on an empty stdin")


@check("a clean environment: HOME, PATH, then spec.env, then the command's", needs=[it_runs_a_command])
async def the_environment_is_clean(subject: Subject) -> None:
    os.environ["PADDOCK_CHECK_SECRET"] = "secret"
    try:
        env = {"FROM_COMMAND": "also"}
        done = await subject.shared.exec(Command(["env"], env=env), timeout=COMMAND_TIMEOUT)
    finally:
        del os.environ["PADDOCK_CHECK_SECRET"]
    seen = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if "=" in line)
    require(seen.get("FROM_SPEC") == "yes" and seen.get("FROM_COMMAND") == "also", f"got {seen}")
    require(seen.get("HOME") == str(subject.shared.home), f"HOME is {seen.get('HOME')}")
    require("PADDOCK_CHECK_SECRET" not in seen, "a variable of the host was passed on")


@check("start in the work folder, or where the command says", needs=[it_runs_a_command])
async def the_working_folder_is_set(subject: Subject) -> None:
    require((await subject.run("pwd")).stdout.decode().strip() == str(subject.shared.workdir), "not in the workdir")
    done = await subject.shared.exec(Command("pwd", cwd=PurePosixPath("/logs/verifier")), timeout=COMMAND_TIMEOUT)
    require(done.exit_code == 0 and done.stdout.strip().endswith(b"verifier"), f"got {done}")


@check("hand output on as it comes, do not wait for the end", needs=[it_runs_a_command])
async def output_streams_before_the_end(subject: Subject) -> None:
    job = await subject.shared.start(Command("echo first; while [ ! -e go ]; do sleep 0.01; done; echo second"))
    lines = job.lines()
    require(await asyncio.wait_for(anext(lines), AT_ONCE) == b"first", "the first line did not come")
    require("first" in job.tail(), "tail does not show it")
    await subject.shared.write("/home/user/workdir/go", b"")
    require([line async for line in lines] == [b"second"], "the second line did not come")
    require((await job.wait(COMMAND_TIMEOUT)).stdout == b"first\nsecond\n", "wait lost some of it")


@check("signal the whole process group", needs=[it_runs_a_command])
async def killing_a_job_ends_its_group(subject: Subject) -> None:
    job = await subject.shared.start(Command("sleep 1000 & echo $!; sleep 1000"))
    child = int(await asyncio.wait_for(anext(job.lines()), AT_ONCE))
    await job.kill()
    done = await job.wait(AT_ONCE)
    require(done.exit_code == 128 + signal.SIGKILL, f"got {done}")
    gone = f"while kill -0 {child} 2>/dev/null; do sleep 0.01; done"
    require((await run(subject.shared, gone, AT_ONCE)).exit_code == 0, "its child still runs")
    job = await subject.shared.start(Command("sleep 1000 > /dev/null 2>&1 & echo $!"))
    left = int((await job.wait(AT_ONCE)).stdout)
    await job.kill()
    gone = f"while kill -0 {left} 2>/dev/null; do sleep 0.01; done"
    require((await run(subject.shared, gone, AT_ONCE)).exit_code == 0, "what an ended command left behind still runs")


@check("a command can be signalled from the moment it was started", needs=[it_runs_a_command])
async def a_job_is_killed_as_soon_as_it_began(subject: Subject) -> None:
    for number in [signal.SIGKILL, signal.SIGTERM] * 10:
        job = await subject.shared.start(Command(["sleep", "1000"]))
        await job.kill(number)
        done = await job.wait(AT_ONCE)
        require(done.exit_code == 128 + number, f"got {done}")


@check("kill the command at its deadline", needs=[it_runs_a_command])
async def a_timeout_ends_the_command(subject: Subject) -> None:
    began = perf_counter()
    done = await run(subject.shared, "echo begun; sleep 1000", 0.3)
    require(done.timed_out and done.exit_code is None and done.stdout == b"begun\n", f"got {done}")
    require(perf_counter() - began < AT_ONCE, "it took too long")


@check("after the command's end wait only a moment for its output to end", needs=[it_runs_a_command])
async def what_stays_behind_does_not_hold_a_command_up(subject: Subject) -> None:
    began = perf_counter()
    done = await subject.run("sleep 1000 & echo done")
    require(done.exit_code == 0 and done.stdout == b"done\n", f"got {done}")
    require(perf_counter() - began < AT_ONCE, "it waited for the process in the background")


@check("keep the first and the last half, drop the rest, set truncated", needs=[it_runs_a_command])
async def output_is_limited(subject: Subject) -> None:
    async with subject.another(output_bytes=10_000) as sandbox:
        done = await run(sandbox, "echo BEGIN; head -c 3000000 /dev/zero; echo END")
    require(done.truncated, "truncated is not set")
    require(len(done.stdout) <= 10_000, f"{len(done.stdout)} bytes were kept")
    require(done.stdout.startswith(b"BEGIN") and done.stdout.endswith(b"END\n"), "not the first and the last of it")


# -- tests --------------------------------------------------------------------------------------------------


@check("examine the guarded files when the last command ends", needs=[it_runs_a_command])
async def a_forged_reward_is_reported(subject: Subject) -> None:
    reward = PurePosixPath("/logs/verifier/reward.txt")
    for script, is_trusted in (
        ("echo 1 > /logs/verifier/reward.txt", True),
        ("echo 1 > /logs/verifier/reward.txt; chmod 0444 /logs/verifier/reward.txt", False),
        ("(sleep 60 &); echo 1 > /logs/verifier/reward.txt", False),
    ):
        async with subject.another() as sandbox:
            command = Command(sandbox.localize(script), last=True, guarded=(reward,))
            done = await sandbox.exec(command, timeout=COMMAND_TIMEOUT)
            require((done.tampered is None) is is_trusted, f"{script!r} gave {done}")


@check("run a command of paddock-run apart from the tests, or not at all", needs=[it_runs_a_command])
async def paddock_run_hides_the_tests(subject: Subject) -> None:
    done = await subject.run("paddock-run sh -c 'echo ran; cat /tests/test.sh'")
    if done.exit_code == 125:
        require(done.stdout == b"" and b"paddock-run" in done.stderr, f"got {done}")
    else:
        require((done.exit_code, done.stdout) == (1, b"ran\n"), f"got {done}")


# -- files --------------------------------------------------------------------------------------------------


@check("read and write bytes as they are", needs=[it_runs_a_command])
async def files_are_exchanged(subject: Subject) -> None:
    data = os.urandom(300_000)
    await subject.shared.write("/home/user/new/folder/data.bin", data, mode=0o755)
    require(await subject.shared.read("/home/user/new/folder/data.bin") == data, "other bytes came back")
    done = await subject.run("cd /home/user/new/folder && [ -x data.bin ] && touch more && wc -c < data.bin")
    require(done.stdout.strip() == b"300000", f"inside it looks different: {done}")


@check("/logs is the folder logs of the home; logs/verifier is there from the start", needs=[files_are_exchanged])
async def the_logs_are_in_one_place(subject: Subject) -> None:
    require((await subject.run("echo 1 > /logs/verifier/reward.txt")).exit_code == 0, "/logs/verifier is missing")
    for path in ("/logs/verifier/reward.txt", "/home/user/logs/verifier/reward.txt"):
        require(await subject.shared.read(path) == b"1\n", f"{path} is another file")


@check("spec.readonly_tests are below /tests, test.sh can be run", needs=[it_runs_a_command])
async def the_tests_are_there(subject: Subject) -> None:
    done = await subject.run("/tests/test.sh && cat /home/user/tests/data/expected.txt")
    require(done.stdout == b"tested\n42", f"got {done}")


@check("FileNotFoundError for what is missing, SandboxError for what is too big or not a file")
async def unreadable_files_are_refused(subject: Subject) -> None:
    await subject.run("mkfifo pipe; head -c 1000 /dev/zero > thousand")
    try:
        await subject.shared.read("/home/user/workdir/missing")
    except FileNotFoundError:
        pass
    else:
        raise Wrong("a missing file could be read")
    await refuses(subject.shared.read("/home/user/workdir/pipe"), "a pipe was read")
    await refuses(subject.shared.read("/home/user/workdir/thousand", limit=999), "a file above the limit was read")
    await refuses(subject.shared.read("/home/user/workdir"), "a folder was read")
    require(len(await subject.shared.read("/home/user/workdir/thousand", limit=1000)) == 1000, "not read in full")


@check("take every step of a path by itself, with O_NOFOLLOW", needs=[files_are_exchanged])
async def links_are_never_followed(subject: Subject) -> None:
    await subject.run("mkdir -p real && echo x > real/file && ln -s real/file link && ln -s real linked")
    await subject.run("ln -s /etc/passwd absolute && ln -s / root && ln -s new.txt dangling")
    for path in ("link", "linked/file", "absolute", "root/etc/passwd"):
        full = f"/home/user/workdir/{path}"
        await refuses(subject.shared.read(full), f"{path} was read")
        await refuses(subject.shared.write(full, b"y"), f"{path} was written")
    await refuses(subject.shared.write("/home/user/workdir/dangling", b"y"), "a dangling link was written through")
    for folder in ("linked", "root"):
        await refuses(subject.shared.list(f"/home/user/workdir/{folder}"), f"{folder} was listed")
        await refuses(subject.shared.pack(f"/home/user/workdir/{folder}", limit=MEBIBYTE), f"{folder} was packed")
    for outside in ("/home/user/../../etc/passwd", "../../../etc/passwd", "/etc/passwd"):
        await refuses(subject.shared.read(outside), f"{outside} was read")
    require(await subject.shared.read("/home/user/workdir/real/file") == b"x\n", "the real file was changed")


@check("list everything below, links as links", needs=[files_are_exchanged])
async def folders_are_listed(subject: Subject) -> None:
    await subject.run("mkdir -p /home/user/listed/sub && cd /home/user/listed && echo 123 > sub/f && ln -s sub l")
    found = await subject.shared.list("/home/user/listed")
    require(
        [(entry.path, entry.kind) for entry in found] == [("l", "link"), ("sub", "folder"), ("sub/f", "file")], found
    )
    require(found[2] == Entry("sub/f", "file", 4, 0o644), f"got {found[2]}")
    await refuses(subject.shared.list("/home/user/listed", limit=2), "more entries than the limit came")


@check("equal folders give equal archives, and unpack restores them", needs=[folders_are_listed])
async def folders_are_packed_and_unpacked(subject: Subject) -> None:
    make = "mkdir -p sub/empty && echo 1 > b && echo 2 > sub/a && chmod 755 b && ln -s ../b sub/l && mkfifo p"
    await subject.run(f"mkdir /home/user/one && cd /home/user/one && {make}")
    first = await subject.shared.pack("/home/user/one", limit=MEBIBYTE)
    await subject.shared.unpack("/home/user/two", first)
    require(await subject.shared.pack("/home/user/two", limit=MEBIBYTE) == first, "not the same after unpacking")
    done = await subject.run(
        "cd /home/user/two && cat sub/l && [ -x b ] && [ -d sub/empty ] && [ ! -e p ] && echo ok"
    )
    require(done.stdout == b"1\nok\n", f"got {done}")
    await refuses(subject.shared.pack("/home/user/one", limit=1000), "an archive above the limit was made")


@check("refuse archives that lead outside", needs=[folders_are_packed_and_unpacked])
async def archives_cannot_lead_outside(subject: Subject) -> None:
    await subject.run("mkdir /home/user/trap /home/user/outside && ln -s ../outside /home/user/trap/link")
    hard = tarfile.TarInfo("hard")
    hard.type, hard.linkname = tarfile.LNKTYPE, "../outside"
    members = [tarfile.TarInfo(name) for name in ("../up", "/absolute", "link/through")]
    for member in (*members, hard):
        await refuses(subject.shared.unpack("/home/user/trap", archive_of(member)), f"{member.name} was unpacked")
    require(await subject.shared.list("/home/user/outside") == [], "something got out")


# -- network ------------------------------------------------------------------------------------------------

GREET = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as peer:
    peer.sendall(sys.argv[2].encode())
    print(peer.recv(100).decode())
"""
SERVE = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    peer.sendall(peer.recv(100).upper())
"""


@check("listen inside and hand the socket out", needs=[it_runs_a_command])
async def the_host_can_be_reached_through_an_exposed_port(subject: Subject) -> None:
    require(await greet(subject.shared, b"hello") == b"hello", "another greeting came")


@check("a port belongs to one sandbox", needs=[the_host_can_be_reached_through_an_exposed_port])
async def two_sandboxes_use_the_same_port(subject: Subject) -> None:
    async with subject.another() as other:
        said = await asyncio.gather(greet(subject.shared, b"one"), greet(other, b"two"))
    require(list(said) == [b"one", b"two"], f"got {said}")


@check("connect inside and hand the socket out", needs=[it_runs_a_command])
async def a_server_inside_can_be_dialled(subject: Subject) -> None:
    job = await subject.shared.start(Command(["python3", "-c", SERVE]))
    port = int(await asyncio.wait_for(anext(job.lines()), COMMAND_TIMEOUT))
    loop = asyncio.get_running_loop()
    with await subject.shared.dial(port) as peer:
        await loop.sock_sendall(peer, b"abc")
        require(await asyncio.wait_for(loop.sock_recv(peer, 100), AT_ONCE) == b"ABC", "another answer came")
    await job.wait(AT_ONCE)
    try:
        (await subject.shared.dial(port)).close()
    except ConnectionRefusedError:
        return
    raise Wrong("a port where nobody listens was connected")


# -- the end ------------------------------------------------------------------------------------------------

DAEMON = """
import os, socket, sys, time
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        peer.sendall(b"alive")
        time.sleep(1000)
    os._exit(0)
"""


@check("kill everything, also what left its session and its parent", needs=[it_runs_a_command])
async def kill_ends_every_process(subject: Subject) -> None:
    loop = asyncio.get_running_loop()
    async with subject.another() as sandbox:
        listening, port = await sandbox.expose(PORT)
        with listening:
            done = await sandbox.exec(Command(["python3", "-c", DAEMON, str(port)]), timeout=COMMAND_TIMEOUT)
            require(done.exit_code == 0, f"the daemon did not start: {done}")
            with (await accept(listening))[0] as peer:
                require(await loop.sock_recv(peer, 100) == b"alive", "the daemon said nothing")
                job = await sandbox.start(Command("sleep 1000"))
                await sandbox.kill()
                require(await asyncio.wait_for(loop.sock_recv(peer, 100), AT_ONCE) == b"", "the daemon still lives")
                require((await job.wait(AT_ONCE)).exit_code is None, "a killed command has an exit code")
        await refuses(sandbox.exec(Command("true"), timeout=AT_ONCE), "a dead sandbox ran a command")


@check("keep the files until close", needs=[kill_ends_every_process, folders_are_listed])
async def files_stay_readable_after_kill(subject: Subject) -> None:
    async with subject.another() as sandbox:
        await run(sandbox, "echo kept > file; echo 1 > /logs/verifier/reward.txt")
        await sandbox.kill()
        await sandbox.kill()
        require(await sandbox.read("/home/user/workdir/file") == b"kept\n", "the file is gone")
        require(await sandbox.read("/logs/verifier/reward.txt") == b"1\n", "the logs are gone")
        require([entry.path for entry in await sandbox.list("/home/user/workdir")] == ["file"], "cannot be listed")
        require(len(await sandbox.pack("/home/user/workdir", limit=MEBIBYTE)) > 0, "cannot be packed")
    await sandbox.close()
    await refuses(sandbox.read("/home/user/workdir/file"), "a closed sandbox was read")


@check("sum up the processor time and memory of all processes", needs=[it_runs_a_command])
async def usage_is_known_at_the_end(subject: Subject) -> str:
    async with subject.another() as sandbox:
        await run(sandbox, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
        await sandbox.kill()
        used = sandbox.usage()
    require(used["cpu_seconds"] > 0 and used["peak_memory_bytes"] > 0 and used["killed_for"] is None, f"got {used}")
    return f"{used['cpu_seconds']} s, {used['peak_memory_bytes']} bytes"


@check("end the sandbox when its processor time is spent", needs=[usage_is_known_at_the_end])
async def processor_time_is_limited(subject: Subject) -> None:
    async with subject.another(cpu_seconds=0.4) as sandbox:
        done = await run(sandbox, "while :; do :; done")
        require(done.killed_for == "cpu" and done.exit_code is None, f"got {done}")
        require(sandbox.usage()["killed_for"] == "cpu", f"got {sandbox.usage()}")


@check("end the sandbox when its processes together use too much memory", needs=[usage_is_known_at_the_end])
async def memory_is_limited(subject: Subject) -> None:
    hog = "import time; held = b'x' * 150_000_000; time.sleep(1000)"
    async with subject.another(memory_bytes=200 * MEBIBYTE) as sandbox:
        done = await run(sandbox, f"python3 -c {shlex.quote(hog)} & python3 -c {shlex.quote(hog)}")
        require(done.killed_for == "memory" and done.exit_code is None, f"got {done}")


# -- isolation ----------------------------------------------------------------------------------------------


@check("give it a network of its own, without a way out")
async def the_network_is_out_of_reach(subject: Subject) -> None:
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
        done = await subject.shared.exec(Command(["python3", "-c", probe]), timeout=COMMAND_TIMEOUT)
    require(b"reached" not in done.stdout and done.stdout.count(b"\n") == 3, f"got {done}")
    require(b"unreachable" in done.stdout, f"there is a route out: {done.stdout!r}")


@check("show nothing of the host but its programs")
async def files_of_the_host_are_invisible(subject: Subject) -> None:
    require_isolation(subject)
    with tempfile.NamedTemporaryFile() as secret:
        places = f"{shlex.quote(secret.name)} /etc/shadow {shlex.quote(str(Path.home()))}/."
        done = await subject.run(f"for place in {places}; do [ -e $place ] && echo $place; done; true")
    require(done.stdout == b"", f"visible: {done.stdout.decode()}")


@check("give it process numbers of its own")
async def processes_of_the_host_are_invisible(subject: Subject) -> None:
    require_isolation(subject)
    done = await subject.run("cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | wc -l; ls -d /proc/[0-9]* | wc -l")
    require(int(done.stdout.split()[1]) < 30, f"{done.stdout!r} processes are visible")
    done = await subject.run(f"kill -0 {os.getpid()}")
    require(done.exit_code != 0 or os.getpid() < 1000, "our own process can be signalled")


@check("drop every capability, and forbid new ones")
async def it_has_no_special_rights(subject: Subject) -> None:
    require_isolation(subject)
    done = await subject.run("grep -E '^(CapEff|CapBnd|NoNewPrivs):' /proc/self/status")
    seen = {name: int(value, 16) for name, value in (line.split(b":") for line in done.stdout.splitlines())}
    require(seen == {b"CapEff": 0, b"CapBnd": 0, b"NoNewPrivs": 1}, f"got {seen}")
    done = await subject.run("unshare --user true")
    require(done.exit_code != 0, "it can make user namespaces, and be root in them")


@check("only the home, the logs and the temporary folder can be written")
async def the_rest_is_read_only(subject: Subject) -> None:
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
async def it_cannot_be_broken_from_inside(subject: Subject) -> None:
    require_isolation(subject)
    done = await subject.run("for s in HUP INT TERM USR1 STOP KILL; do kill -$s 1; done; ls /proc/1/fd /proc/1/cwd/")
    require(done.exit_code != 0 and done.stdout == b"", f"its first process can be looked into: {done}")
    require((await subject.run("echo here")).stdout == b"here\n", "it did not survive")


@check("limit the number of processes", needs=[it_runs_a_command])
async def processes_are_limited(subject: Subject) -> None:
    require_isolation(subject)
    bomb = """
import os, time
born = 0
try:
    while born < 500:
        if os.fork() == 0:
            time.sleep(1000)
        born += 1
except BlockingIOError:
    pass
print(born)
"""
    async with subject.another(processes=40) as sandbox:
        done = await sandbox.exec(Command(["python3", "-c", bomb]), timeout=COMMAND_TIMEOUT)
        born = int(done.stdout or 0)
        require(done.killed_for == "processes" or 20 < born <= 40, f"{born} processes were born: {done}")


@check("limit what can be written, temporary files included, with an honest ENOSPC", needs=[it_runs_a_command])
async def the_disk_is_limited(subject: Subject) -> None:
    require_isolation(subject)
    async with subject.another(disk_bytes=8 * MEBIBYTE) as sandbox:
        fill = "for p in ~ /tmp /logs /dev/shm; do head -c 9000000 /dev/zero > $p/big; done"
        done = await run(sandbox, f"{fill}; cat ~/big /tmp/big /logs/big /dev/shm/big | wc -c")
        require(b"No space left" in done.stderr, f"it was not told: {done}")
        require(0 < int(done.stdout) <= 8 * MEBIBYTE, f"{done.stdout!r} bytes were written")
        await refuses(sandbox.write("/home/user/more", bytes(MEBIBYTE)), "the host could write more")


# -- helpers ------------------------------------------------------------------------------------------------


async def run(sandbox: Sandbox, script: str, timeout: float = COMMAND_TIMEOUT) -> Completed:
    return await sandbox.exec(Command(script), timeout=timeout)


async def greet(sandbox: Sandbox, word: bytes) -> bytes:
    """What a process inside says to us through an exposed port. It must hear our answer."""
    loop = asyncio.get_running_loop()
    listening, port = await sandbox.expose(PORT)
    with listening:
        job = await sandbox.start(Command(["python3", "-c", GREET, str(port), word.decode()]))
        with (await accept(listening))[0] as peer:
            said = await asyncio.wait_for(loop.sock_recv(peer, 100), AT_ONCE)
            await loop.sock_sendall(peer, b"welcome")
            done = await job.wait(COMMAND_TIMEOUT)
    require(done.stdout == b"welcome\n", f"our answer did not arrive: {done}")
    return said


async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listening), COMMAND_TIMEOUT)


def make_file(path: Path, text: str) -> None:
    path.write_text(text)


def archive_of(member: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member)
    return buffer.getvalue()


async def refuses(attempt: Awaitable[object], otherwise: str) -> None:
    try:
        await attempt
    except SandboxError:
        return
    raise Wrong(otherwise)


def require(holds: bool, otherwise: object) -> None:
    if not holds:
        raise Wrong(str(otherwise))


def require_isolation(subject: Subject) -> None:
    if not subject.shared.isolates:
        raise Skipped("this backend does not isolate")
