import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from paddock.child_process import KILL_SECONDS, ChildProcess, kill_orphan
from paddock.processes import process_fields, process_start_time

pytestmark = pytest.mark.anyio

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
DESCENDANT_IN_ANOTHER_SESSION = """
import os, time
has_left, leave = os.pipe()
if os.fork():
    os.read(has_left, 1)
    raise SystemExit
os.setsid()
print(os.getpid(), flush=True)
os.write(leave, b"1")
time.sleep(60)
"""
GRANDCHILD = "import os, time\npid = os.fork()\nif pid: print(pid, flush=True)\ntime.sleep(60)"
STUBBORN = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(60)"


@asynccontextmanager
async def running(code: str, **options: Any) -> AsyncIterator[ChildProcess]:
    child = await ChildProcess.start([sys.executable, "-c", code], **options)
    try:
        yield child
    finally:
        await child.kill()
        assert not process_fields(child.pid), "it is left as a zombie"


async def test_lines_go_in_and_out() -> None:
    async with running(ECHO) as child:
        child.send({"number": 1})
        child.write_line(b"two")
        await child.drain()
        assert [await child.read_line(), await child.read_line()] == [b'{"number":1}', b"two"]
        child.close_input()
        assert [line async for line in child.lines()] == []
        assert await child.wait(KILL_SECONDS)
        assert child.ended.result() == 0


async def test_half_a_line_is_no_line() -> None:
    async with running("print('half', end='')") as child:
        assert await child.read_line() is None


async def test_a_line_that_is_too_long_is_refused() -> None:
    async with running("print('x' * 5000)", max_line_bytes=1000) as child:
        with pytest.raises(ValueError, match="limit"):
            await child.read_line()


async def test_a_child_that_prints_much_does_not_block() -> None:
    async with running("print('x' * 10_000_000)") as child:
        await child.discard_output()
        assert await child.wait(KILL_SECONDS)


async def test_the_end_of_its_log_explains_its_end(tmp_path: Path) -> None:
    async with running("import sys; sys.exit('no memory')", log=tmp_path / "log") as child:
        assert await child.read_line() is None
        await child.wait()
        assert child.describe_end("at once") == "its process ended with code 1 at once: no memory"
        (tmp_path / "log").unlink()
        assert "cannot be read" in child.describe_end()


async def test_writing_to_a_child_that_is_gone_is_harmless() -> None:
    async with running("") as child:
        await child.wait()
        child.send({"number": 1})
        with pytest.raises(ConnectionError):
            await child.drain()


async def test_sigterm_comes_before_the_kill() -> None:
    handler = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n"
    async with running(f"{handler}print(1, flush=True)\ntime.sleep(60)") as child:
        await child.read_line()
        await child.end(KILL_SECONDS)
        assert child.ended.result() == 3


async def test_a_child_that_ignores_sigterm_is_killed() -> None:
    async with running(STUBBORN) as child:
        await child.read_line()
        began = time.monotonic()
        await child.end(0.1)
        assert child.ended.result() == -signal.SIGKILL
        assert time.monotonic() - began < KILL_SECONDS


@pytest.mark.parametrize("end", [ChildProcess.kill, lambda child: os.kill(child.pid, signal.SIGKILL)])
async def test_descendants_end_with_it(end: Callable[[ChildProcess], Any]) -> None:
    async with running(GRANDCHILD) as child:
        line = await child.read_line()
        assert line is not None
        grandchild = int(line)
        assert process_start_time(grandchild) is not None
        if (waiting := end(child)) is not None:
            await waiting
        await child.wait()
        async with asyncio.timeout(KILL_SECONDS):
            while process_start_time(grandchild) is not None:
                await asyncio.sleep(0.01)


async def test_a_descendant_in_another_session_does_not_hold_the_end_up() -> None:
    async with running(DESCENDANT_IN_ANOTHER_SESSION) as child:
        line = await child.read_line()
        assert line is not None
        pid = int(line)
        await child.kill()
        assert await child.read_line() is None
        os.kill(pid, signal.SIGKILL)


async def test_its_environment_and_descriptors_are_passed() -> None:
    reading, writing = os.pipe()
    code = f"import os; os.write({writing}, os.environ['COLOUR'].encode())"
    async with running(code, env={"COLOUR": "blue"}, pass_fds=(writing,)) as child:
        await child.wait()
        assert os.read(reading, 10) == b"blue"
    os.close(reading)
    os.close(writing)


async def test_a_missing_program_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        await ChildProcess.start(["/nonexistent/program"])


async def test_an_end_is_noticed_without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    async with running("raise SystemExit(4)") as child:
        assert await child.wait(KILL_SECONDS)
        assert child.ended.result() == 4


async def test_only_the_same_process_is_killed_as_an_orphan() -> None:
    async with running(ECHO) as child:
        assert child.start_time is not None
        assert not kill_orphan(child.pid, None)
        assert not kill_orphan(child.pid, child.start_time - 1)
        assert child.is_alive
        assert kill_orphan(child.pid, child.start_time)
        assert await child.wait(KILL_SECONDS)
