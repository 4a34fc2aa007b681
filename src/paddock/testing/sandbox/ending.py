"""The end of a sandbox: everything is killed, files stay readable, limits end it."""

from __future__ import annotations

import asyncio
import shlex

from paddock.limits import MEBIBYTE
from paddock.sandbox.base import Command
from paddock.testing.checks import require
from paddock.testing.sandbox.commands import it_runs_a_command
from paddock.testing.sandbox.files import folders_are_listed
from paddock.testing.sandbox.subject import (
    COMMAND_SECONDS,
    IMMEDIATE_SECONDS,
    PORT,
    SandboxSubject,
    accept,
    check,
    refuses,
    run,
)

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
async def kill_ends_every_process(subject: SandboxSubject) -> None:
    loop = asyncio.get_running_loop()
    async with subject.another() as sandbox:
        listening, port = await sandbox.expose(PORT)
        with listening:
            done = await sandbox.exec(Command(["python3", "-c", DAEMON, str(port)]), timeout=COMMAND_SECONDS)
            require(done.exit_code == 0, f"the daemon did not start: {done}")
            with (await accept(listening))[0] as peer:
                require(await loop.sock_recv(peer, 100) == b"alive", "the daemon said nothing")
                job = await sandbox.start(Command("sleep 1000"))
                await sandbox.kill()
                require(
                    await asyncio.wait_for(loop.sock_recv(peer, 100), IMMEDIATE_SECONDS) == b"",
                    "the daemon still lives",
                )
                require((await job.wait(IMMEDIATE_SECONDS)).exit_code is None, "a killed command has an exit code")
        await refuses(sandbox.exec(Command("true"), timeout=IMMEDIATE_SECONDS), "a dead sandbox ran a command")


@check("keep the files until close", needs=[kill_ends_every_process, folders_are_listed])
async def files_stay_readable_after_kill(subject: SandboxSubject) -> None:
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
async def usage_is_known_at_the_end(subject: SandboxSubject) -> str:
    async with subject.another() as sandbox:
        await run(sandbox, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
        await sandbox.kill()
        used = sandbox.usage()
    require(used["cpu_seconds"] > 0 and used["peak_memory_bytes"] > 0 and used["killed_for"] is None, f"got {used}")
    return f"{used['cpu_seconds']} s, {used['peak_memory_bytes']} bytes"


@check("end the sandbox when its processor time is spent", needs=[usage_is_known_at_the_end])
async def processor_time_is_limited(subject: SandboxSubject) -> None:
    async with subject.another(cpu_seconds=0.4) as sandbox:
        done = await run(sandbox, "while :; do :; done")
        require(done.killed_for == "cpu" and done.exit_code is None, f"got {done}")
        require(sandbox.usage()["killed_for"] == "cpu", f"got {sandbox.usage()}")


@check("end the sandbox when its processes together use too much memory", needs=[usage_is_known_at_the_end])
async def memory_is_limited(subject: SandboxSubject) -> None:
    hog = "import time; held = b'x' * 150_000_000; time.sleep(1000)"
    async with subject.another(memory_bytes=200 * MEBIBYTE) as sandbox:
        done = await run(sandbox, f"python3 -c {shlex.quote(hog)} & python3 -c {shlex.quote(hog)}")
        require(done.killed_for == "memory" and done.exit_code is None, f"got {done}")
