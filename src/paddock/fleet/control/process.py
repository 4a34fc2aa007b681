"""One process that is, or will be, an instance: started, told what to be, ended with all it has started.

Its standard input is its lifeline: it ends when that is closed, so nothing outlives a plane that was
killed. Where it runs is its launcher's matter: `LocalProcesses` starts it on this machine. Knows nothing of
rows and requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from paddock.errors import PaddockError

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger("paddock.fleet.control")

MOST_LINE = 64 * 1024
MOST_LOG_TAIL = 2000
KILLED_SECONDS = 5.0
OWN_SECRETS = (
    "FLEET_API_KEY",
    "RUNNER_AUTH_TOKEN",
    "FLEET_JUDGE_TOKEN",
    "PADDOCK_AUTH_TOKEN",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
)


class StartFailed(PaddockError):
    """The process did not come to serve. `passing` says whether another try may succeed."""

    code = "START_FAILED"

    def __init__(self, message: str, *, passing: bool) -> None:
        super().__init__(message)
        self.passing = passing


class HostedProcess(ABC):
    """A process, wherever it runs. Whoever holds it must `end` it."""

    pid: int | None = None
    """Its number, and when it began, if it is a process of this machine."""
    started_ticks: int | None = None
    address: str | None = None
    """The machine it serves at; None for this one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first_line: asyncio.Future[bytes | None] = self._loop.create_future()
        """What it says first; None if it ends without a word."""
        self.was_warm = False
        """Whether it waited before it was needed."""
        self.ended: asyncio.Future[int] = self._loop.create_future()

    @property
    def is_alive(self) -> bool:
        return not self.ended.done()

    async def wait_until_serving(self, seconds: float) -> int:
        """The port on which the process serves, once it was told what to be. Raises StartFailed."""
        try:
            async with asyncio.timeout(seconds):
                line = await asyncio.shield(self.first_line)
        except TimeoutError:
            raise StartFailed(f"it did not serve within {seconds:g} s", passing=True) from None
        if line is None:
            await asyncio.wait([self.ended], timeout=KILLED_SECONDS)
            raise StartFailed(self.how_it_ended("before it served"), passing=True)
        try:
            told = orjson.loads(line)
            port, error = told.get("port"), told.get("error")
        except (ValueError, AttributeError):
            port, error = None, f"it answered with {line[:200]!r}"
        if not isinstance(port, int):
            raise StartFailed(str(error)[:MOST_LOG_TAIL], passing=False)
        return port

    def how_it_ended(self, when: str = "") -> str:
        how = f"ended with code {self.ended.result()}" if self.ended.done() else "closed its output"
        return f"its process {how}{when and ' '}{when}: {self.last_words()}"

    @abstractmethod
    def send(self, line: dict[str, Any]) -> None:
        """Write a line to the process. One that is gone does not read it."""

    @abstractmethod
    def move_log(self, place: Path) -> None:
        """Give the log another name; the process goes on writing to it."""

    @abstractmethod
    def last_words(self) -> str:
        """The end of what it has said."""

    @abstractmethod
    async def end(self, seconds: float) -> None:
        """End the process and whatever it has started; kill what has not ended after `seconds`."""


class Launcher(Protocol):
    """Where processes are started. `open` comes before the first `start`, `close` after the last `end`."""

    async def open(self) -> None: ...

    async def start(self, log: Path) -> HostedProcess:
        """A process that waits to be told what to be. Raises OSError or StartFailed."""
        ...

    async def close(self) -> None: ...

    def statistics(self) -> dict[str, Any]:
        """What the plane tells about it."""
        ...


class LocalProcesses:
    """Processes of this machine."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    async def open(self) -> None:
        pass

    async def start(self, log: Path) -> InstanceProcess:
        return await InstanceProcess.start(self._command, log)

    async def close(self) -> None:
        pass

    def statistics(self) -> dict[str, Any]:
        return {"engine": "local"}


class InstanceProcess(HostedProcess):
    """A running `command` on this machine. Make it with `start`; whoever holds it must `end` it."""

    def __init__(self, child: subprocess.Popen[bytes], log: Path) -> None:
        super().__init__()
        self._child = child
        self._input: asyncio.WriteTransport | None = None
        self._output = _FirstLine(self.first_line)
        self.log = log
        self.pid: int = child.pid
        self.started_ticks = started_ticks(child.pid)

    @classmethod
    async def start(cls, command: Sequence[str], log: Path) -> InstanceProcess:
        """Start the process; what it says on standard error goes to `log`."""
        process = cls(_spawn(command, log), log)
        process._watch()
        try:
            await process._connect()
        except BaseException:
            await asyncio.shield(process.end(0))
            raise
        return process

    def send(self, line: dict[str, Any]) -> None:
        if self._input is not None and not self._input.is_closing():
            self._input.write(orjson.dumps(line) + b"\n")

    def move_log(self, place: Path) -> None:
        self.log = self.log.rename(place)

    def last_words(self) -> str:
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - MOST_LOG_TAIL))
                return log.read().decode(errors="replace").strip() or "it said nothing"
        except OSError:
            return "its log is gone"

    async def end(self, seconds: float) -> None:
        if self._input is not None:
            self._input.close()
        if self.is_alive and seconds > 0:
            self._child.send_signal(signal.SIGTERM)
            await asyncio.wait([self.ended], timeout=seconds)
        if self.is_alive:
            _kill_group(self.pid)
            await asyncio.wait([self.ended], timeout=KILLED_SECONDS)
        if self.is_alive:
            logger.error("process %d does not end, not even when killed", self.pid)

    async def _connect(self) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        await self._loop.connect_read_pipe(lambda: self._output, self._child.stdout)
        self._input, _ = await self._loop.connect_write_pipe(asyncio.Protocol, self._child.stdin)

    def _watch(self) -> None:
        if hasattr(os, "pidfd_open"):
            handle = os.pidfd_open(self.pid)
            self._loop.add_reader(handle, partial(self._has_ended, handle))
        else:
            threading.Thread(target=self._wait, name=f"wait-{self.pid}", daemon=True).start()

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._loop.call_soon_threadsafe(self._has_ended)

    def _has_ended(self, handle: int | None = None) -> None:
        if handle is not None:
            self._loop.remove_reader(handle)
            os.close(handle)
        # Until it is waited for, the number of the group cannot be given to anybody else.
        _kill_group(self.pid)
        code = self._child.wait()
        if self._input is not None:
            self._input.close()
        if not self.ended.done():
            self.ended.set_result(code)


def _spawn(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name not in OWN_SECRETS}
    with log.open("ab") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env=environment,
            start_new_session=True,
        )


class _FirstLine(asyncio.Protocol):
    """Keeps the first line of a stream, and reads on so that the writer never waits."""

    def __init__(self, told: asyncio.Future[bytes | None]) -> None:
        self.told = told
        self._seen = bytearray()

    def data_received(self, data: bytes) -> None:
        if self.told.done():
            return
        self._seen += data
        line, newline, _ = self._seen.partition(b"\n")
        if newline or len(self._seen) > MOST_LINE:
            self.told.set_result(bytes(line))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.told.done():
            self.told.set_result(None)


def started_ticks(pid: int) -> int | None:
    """When a process began, in clock ticks since the boot; None if it is gone or cannot be seen."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


def kill_left_over(pid: int, ticks: int | None) -> bool:
    """Kill a process of an earlier plane, if it is surely still that one. Whether it was."""
    if ticks is None or started_ticks(pid) != ticks:
        return False
    _kill_group(pid)
    return True


def _kill_group(pid: int) -> None:
    # Neither error is one: nobody is left in the group, or nobody who can be killed.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
