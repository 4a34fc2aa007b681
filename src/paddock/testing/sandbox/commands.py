"""Commands: how they start, what they print, how they end, and what tests are told about a forged reward."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import PurePosixPath
from time import perf_counter

from paddock.limits import MEBIBYTE
from paddock.sandbox.base import Command
from paddock.testing.checks import require
from paddock.testing.sandbox.subject import (
    COMMAND_SECONDS,
    IMMEDIATE_SECONDS,
    SPEC,
    SandboxSubject,
    check,
    run,
)


@check("start the command with its outputs connected, and wait for its end")
async def it_runs_a_command(subject: SandboxSubject) -> None:
    done = await subject.run("echo out; echo err >&2")
    require((done.exit_code, done.stdout, done.stderr) == (0, b"out\n", b"err\n"), f"got {done}")


@check("a command that fails is a result, also when there is no such program", needs=[it_runs_a_command])
async def exit_codes_are_reported(subject: SandboxSubject) -> None:
    require((await subject.run("exit 3")).exit_code == 3, "exit 3 was not reported")
    done = await subject.shared.exec(Command(["/no/such/program"]), timeout=COMMAND_SECONDS)
    require(done.exit_code == 127, f"a missing program gave {done}")


@check("report 128 + N after signal N", needs=[it_runs_a_command])
async def a_signal_is_an_exit_code(subject: SandboxSubject) -> None:
    done = await subject.run("kill -TERM $$")
    require(done.exit_code == 128 + signal.SIGTERM, f"got {done}")


@check("connect stdin to the given bytes, and to nothing if there are none", needs=[it_runs_a_command])
async def stdin_is_given(subject: SandboxSubject) -> None:
    data = os.urandom(MEBIBYTE)
    done = await subject.shared.exec(Command(["cat"], stdin=data), timeout=COMMAND_SECONDS)
    require(done.stdout == data, f"{len(done.stdout)} bytes of {len(data)} came back")
    require((await subject.run("cat")).stdout == b"", "there was something on an empty stdin")


@check("without tests, find programs that an installer put into ~/.local/bin", needs=[it_runs_a_command])
async def user_programs_are_found(subject: SandboxSubject) -> None:
    make = "mkdir -p ~/.local/bin && printf '#!/bin/sh\\necho here' > ~/.local/bin/made && chmod +x ~/.local/bin/made"
    async with subject.another(replace(SPEC, readonly_tests={})) as sandbox:
        done = await run(sandbox, f"{make} && made")
    require(done.stdout == b"here\n", f"got {done}")


@check("a clean environment: HOME, PATH, then spec.env, then the command's", needs=[it_runs_a_command])
async def the_environment_is_clean(subject: SandboxSubject) -> None:
    os.environ["PADDOCK_CHECK_SECRET"] = "secret"
    try:
        env = {"FROM_COMMAND": "also"}
        done = await subject.shared.exec(Command(["env"], env=env), timeout=COMMAND_SECONDS)
    finally:
        del os.environ["PADDOCK_CHECK_SECRET"]
    seen = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if "=" in line)
    require(seen.get("FROM_SPEC") == "yes" and seen.get("FROM_COMMAND") == "also", f"got {seen}")
    require(seen.get("HOME") == str(subject.shared.home), f"HOME is {seen.get('HOME')}")
    require("PADDOCK_CHECK_SECRET" not in seen, "a variable of the host was passed on")


@check("start in the work folder, or where the command says", needs=[it_runs_a_command])
async def the_working_folder_is_set(subject: SandboxSubject) -> None:
    require((await subject.run("pwd")).stdout.decode().strip() == str(subject.shared.workdir), "not in the workdir")
    done = await subject.shared.exec(Command("pwd", cwd=PurePosixPath("/logs/verifier")), timeout=COMMAND_SECONDS)
    require(done.exit_code == 0 and done.stdout.strip().endswith(b"verifier"), f"got {done}")


@check("hand output on as it comes, do not wait for the end", needs=[it_runs_a_command])
async def output_streams_before_the_end(subject: SandboxSubject) -> None:
    job = await subject.shared.start(Command("echo first; while [ ! -e go ]; do sleep 0.01; done; echo second"))
    lines = job.lines()
    require(await asyncio.wait_for(anext(lines), IMMEDIATE_SECONDS) == b"first", "the first line did not come")
    require("first" in job.tail(), "tail does not show it")
    await subject.shared.write("/home/user/workdir/go", b"")
    require([line async for line in lines] == [b"second"], "the second line did not come")
    require((await job.wait(COMMAND_SECONDS)).stdout == b"first\nsecond\n", "wait lost some of it")


@check("signal the whole process group", needs=[it_runs_a_command])
async def killing_a_job_ends_its_group(subject: SandboxSubject) -> None:
    job = await subject.shared.start(Command("sleep 1000 & echo $!; sleep 1000"))
    child = int(await asyncio.wait_for(anext(job.lines()), IMMEDIATE_SECONDS))
    await job.kill()
    done = await job.wait(IMMEDIATE_SECONDS)
    require(done.exit_code == 128 + signal.SIGKILL, f"got {done}")
    gone = f"while kill -0 {child} 2>/dev/null; do sleep 0.01; done"
    require((await run(subject.shared, gone, IMMEDIATE_SECONDS)).exit_code == 0, "its child still runs")
    job = await subject.shared.start(Command("sleep 1000 > /dev/null 2>&1 & echo $!"))
    left = int((await job.wait(IMMEDIATE_SECONDS)).stdout)
    await job.kill()
    gone = f"while kill -0 {left} 2>/dev/null; do sleep 0.01; done"
    require(
        (await run(subject.shared, gone, IMMEDIATE_SECONDS)).exit_code == 0,
        "what an ended command left behind still runs",
    )


@check("a command can be signalled from the moment it was started", needs=[it_runs_a_command])
async def a_job_is_killed_as_soon_as_it_began(subject: SandboxSubject) -> None:
    for number in [signal.SIGKILL, signal.SIGTERM] * 10:
        job = await subject.shared.start(Command(["sleep", "1000"]))
        await job.kill(number)
        done = await job.wait(IMMEDIATE_SECONDS)
        require(done.exit_code == 128 + number, f"got {done}")


@check("kill the command at its deadline", needs=[it_runs_a_command])
async def a_timeout_ends_the_command(subject: SandboxSubject) -> None:
    began = perf_counter()
    done = await run(subject.shared, "echo begun; sleep 1000", 0.3)
    require(done.timed_out and done.exit_code is None and done.stdout == b"begun\n", f"got {done}")
    require(perf_counter() - began < IMMEDIATE_SECONDS, "it took too long")


@check("after the command's end wait only a moment for its output to end", needs=[it_runs_a_command])
async def what_stays_behind_does_not_hold_a_command_up(subject: SandboxSubject) -> None:
    began = perf_counter()
    done = await subject.run("sleep 1000 & echo done")
    require(done.exit_code == 0 and done.stdout == b"done\n", f"got {done}")
    require(perf_counter() - began < IMMEDIATE_SECONDS, "it waited for the process in the background")


@check("keep the first and the last half, drop the rest, set truncated", needs=[it_runs_a_command])
async def output_is_limited(subject: SandboxSubject) -> None:
    async with subject.another(output_bytes=10_000) as sandbox:
        done = await run(sandbox, "echo BEGIN; head -c 3000000 /dev/zero; echo END")
    require(done.truncated, "truncated is not set")
    require(len(done.stdout) <= 10_000, f"{len(done.stdout)} bytes were kept")
    require(done.stdout.startswith(b"BEGIN") and done.stdout.endswith(b"END\n"), "not the first and the last of it")


@check("examine the guarded files when the last command ends", needs=[it_runs_a_command])
async def a_forged_reward_is_reported(subject: SandboxSubject) -> None:
    reward = PurePosixPath("/logs/verifier/reward.txt")
    for script, is_trusted in (
        ("echo 1 > /logs/verifier/reward.txt", True),
        ("echo 1 > /logs/verifier/reward.txt; chmod 0444 /logs/verifier/reward.txt", False),
        ("(sleep 60 &); echo 1 > /logs/verifier/reward.txt", False),
    ):
        async with subject.another() as sandbox:
            command = Command(sandbox.localize(script), last=True, guarded=(reward,))
            done = await sandbox.exec(command, timeout=COMMAND_SECONDS)
            require((done.tampered is None) is is_trusted, f"{script!r} gave {done}")


@check("run a command of paddock-run apart from the tests, or not at all", needs=[it_runs_a_command])
async def paddock_run_hides_the_tests(subject: SandboxSubject) -> None:
    done = await subject.run("paddock-run sh -c 'echo ran; cat /tests/test.sh'")
    if done.exit_code == 125:
        require(done.stdout == b"" and b"paddock-run" in done.stderr, f"got {done}")
    else:
        require((done.exit_code, done.stdout) == (1, b"ran\n"), f"got {done}")
