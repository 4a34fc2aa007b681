"""Starts a supervisor and keeps hold of its process until that is gone."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import marshal
import os
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.rollouts.sandbox.wire import close_all
from paddock.rollouts.unhurried import unhurried

if TYPE_CHECKING:
    from collections.abc import Sequence

LAST_WORDS = 16384
LAST_WORDS_TIMEOUT = 1.0
STARTERS = 4


@dataclass(slots=True)
class Launched:
    """A started supervisor, perhaps behind another process that waits for it."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    errors: int | None
    """Where it and what started it complain."""
    information: int | None = None
    """Where bubblewrap tells the pid of the supervisor."""
    supervisor: int | None = field(default=None)
    """A pidfd, where a kill of the supervisor ends everything at once."""

    def first_pid(self) -> int:
        """The host's pid of the supervisor."""
        if self.information is None:
            return self.process.pid
        told: dict[str, Any] = json.loads(os.read(self.information, 4096))
        pid = int(told["child-pid"])
        self.supervisor = os.pidfd_open(pid)
        return pid

    @property
    def gone(self) -> bool:
        return self.process.poll() is not None

    def kill_at_once(self) -> None:
        """Kill the supervisor if it is process 1, and whatever started it if there is no supervisor yet."""
        if self.supervisor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.supervisor, signal.SIGKILL)
        elif self.information is not None:
            kill_group(self.process)

    async def last_words(self) -> str:
        """What was complained about, once the process has ended."""
        await wait_gone(self, LAST_WORDS_TIMEOUT)
        if self.errors is None:
            return ""
        os.set_blocking(self.errors, False)
        with suppress(BlockingIOError):
            return os.read(self.errors, LAST_WORDS).decode("utf-8", "replace").strip()
        return ""

    def release(self) -> None:
        for descriptor in (self.errors, self.information, self.supervisor):
            if descriptor is not None:
                os.close(descriptor)
        self.connection.close()
        self.errors = self.information = self.supervisor = None


async def wait_gone(launched: Launched, seconds: float) -> bool:
    """Whether the process ended, and with it all it waits for, within `seconds`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    pause = 0.001
    while not launched.gone:
        if loop.time() > deadline:
            kill_group(launched.process)
            return False
        await asyncio.sleep(pause)
        pause = min(0.02, pause * 1.5)
    return True


@cache
def program_text(name: str) -> str:
    """The source of a program that runs without Paddock around it."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


@cache
def program_part(name: str) -> tuple[str, bytes, bytes]:
    """The source of a part of the supervisor, and its code with the magic number of the Python that can run it."""
    text = program_text(name)
    return text, importlib.util.MAGIC_NUMBER, marshal.dumps(compile(text, name, "exec", dont_inherit=True))


async def launch(
    argv: Sequence[str], *, descriptors: Sequence[int], information: int | None, **options: Any
) -> Launched:
    """Run `argv` and behind it the number of the supervisor's end of the socket.

    All descriptors are handed over: `information` to the result, the others are closed here.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors, errors_inside = os.pipe()

    def begin() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*argv, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors_inside,
            pass_fds=[theirs.fileno(), *descriptors],
            start_new_session=True,
            **options,
        )

    starting = asyncio.get_running_loop().run_in_executor(starters(), begin)
    try:
        process = await asyncio.shield(starting)
        return Launched(process, ours, errors, information)
    except BaseException as error:
        # Before our ends of its pipes are closed: it may die of that, and leave a child that waits for it.
        await unhurried(end_unwanted(starting))
        ours.close()
        os.close(errors)
        if information is not None:
            os.close(information)
        if isinstance(error, OSError | subprocess.SubprocessError):
            raise SandboxError(f"{argv[0]} cannot be started: {error}") from error
        raise
    finally:
        close_all([theirs.detach(), errors_inside, *descriptors])


async def end_unwanted(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """Nobody wants this process any more. A thread that is starting it cannot be stopped, but is quick."""
    await asyncio.wait([starting])
    if starting.exception() is None:
        process = starting.result()
        kill_group(process)
        process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Bubblewrap's child waits for its parent's word, and would wait for ever without it: both are in one group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_starters: tuple[int, ThreadPoolExecutor] | None = None


def starters() -> ThreadPoolExecutor:
    """Threads that live as long as the process: a child that asks to die with its parent dies with the thread."""
    global _starters
    if _starters is None or _starters[0] != os.getpid():
        _starters = (os.getpid(), ThreadPoolExecutor(STARTERS, thread_name_prefix="paddock-sandbox"))
    return _starters[1]
