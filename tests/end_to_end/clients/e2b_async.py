"""E2B's own SDK on `paddock e2b up`, asynchronously. Usage: e2b_async.py, with E2B's variables set."""

import asyncio
import json
import os
from typing import Any

from e2b import AsyncSandbox, CommandExitException, PtySize


async def caught(work: Any) -> list[str]:
    try:
        return ["no error", str(await work)]
    except Exception as error:
        return [type(error).__name__, str(error)]


async def commands(sandbox: AsyncSandbox) -> Any:
    run = sandbox.commands.run
    received: list[str] = []
    done = await run("echo one; sleep 0.1; echo two >&2", on_stdout=received.append, on_stderr=received.append)
    fed = await run("cat; exit 5", background=True, stdin=True)
    async with sandbox.commands.stream_input(fed.pid) as line:
        await line.send("in order ")
        await line.send(b"and whole")
    await sandbox.commands.close_stdin(fed.pid)
    try:
        await fed.wait()
    except CommandExitException as error:
        ended = [error.exit_code, error.stdout]
    together = await asyncio.gather(*(run(f"sleep 0.1; echo {number}") for number in range(8)))
    left = await run("sleep 0.4; echo heard", background=True)
    await left.disconnect()
    again = await sandbox.commands.connect(left.pid)
    return {
        "heard": received,
        "done": done.exit_code,
        "fed": ended,
        "together": [one.stdout.strip() for one in together],
        "again": (await again.wait()).stdout,
        "late": (await caught(run("sleep 30", timeout=0.3)))[0],
    }


async def terminal(sandbox: AsyncSandbox) -> Any:
    seen = bytearray()
    pty = await sandbox.pty.create(PtySize(rows=10, cols=20), on_data=seen.extend)
    await sandbox.pty.send_stdin(pty.pid, b"stty size; exit\n")
    await pty.wait()
    return b"10 20" in seen


async def files(sandbox: AsyncSandbox) -> Any:
    events: list[str] = []
    await sandbox.files.make_dir("w")
    watch = await sandbox.files.watch_dir(
        "w", on_event=lambda event: events.append(f"{event.type.value} {event.name}")
    )
    await sandbox.files.write("w/a", "x")
    for _ in range(100):
        if len(events) >= 2:
            break
        await asyncio.sleep(0.02)
    await watch.stop()

    async def pieces() -> Any:
        for number in range(50):
            yield bytes([number]) * 10_000

    await sandbox.files.write("pieces", pieces())
    read = [len(piece) async for piece in await sandbox.files.read("pieces", format="stream")]
    return {
        "events": events[:2],
        "pieces": sum(read),
        "missing": (await caught(sandbox.files.read("nothing")))[0],
    }


async def full_disk() -> Any:
    """Our own server lowers the limits of a sandbox to what its metadata asks for."""
    async with await AsyncSandbox.create(
        timeout=30, metadata={"paddock-limits": '{"disk_bytes": 8000000}'}
    ) as sandbox:
        inside = await caught(sandbox.commands.run("head -c 9000000 /dev/zero > ~/full; rm ~/full; exit 7"))
        return [(await caught(sandbox.files.write("big", bytes(9_000_000))))[0], inside[0]]


async def killed_meanwhile(sandbox: AsyncSandbox) -> Any:
    waiting = asyncio.ensure_future(caught(sandbox.commands.run("sleep 30")))
    await asyncio.sleep(0.2)
    gone = await sandbox.kill()
    return [gone, (await asyncio.wait_for(waiting, 10))[0], await sandbox.is_running()]


async def fill() -> Any:
    """Make sandboxes until there is no room for more."""
    made: list[AsyncSandbox] = []
    try:
        while len(made) < 10:
            made.append(await AsyncSandbox.create(timeout=30, retries=0))
    except Exception as error:
        return [len(made), type(error).__name__]
    finally:
        await asyncio.gather(*(sandbox.kill() for sandbox in made))
    return [len(made), "no error"]


async def main() -> None:
    sandbox = await AsyncSandbox.create(timeout=60)
    reply = {
        "commands": await commands(sandbox),
        "terminal": await terminal(sandbox),
        "files": await files(sandbox),
        "full_disk": await full_disk(),
        "killed": await killed_meanwhile(sandbox),
        "full": await fill(),
    }
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
    # Threads of the SDK's HTTP library (pyqwest) may still let go of Python objects, and abort an interpreter that is
    # being taken down: one run in twelve.
    os._exit(0)
