"""The processes of instances: started, configured by one line, ended with their children; and a pool of warm ones.

The standard input of a process is its lifeline: it ends when the input is closed, so no process outlives a plane that
was killed. A `Launcher` decides where processes run: `LocalLauncher` starts them on this machine. Knows no database
and no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from paddock.child_process import LOG_TAIL_BYTES, ChildProcess
from paddock.errors import PaddockError
from paddock.processes import KILL_SECONDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

logger = logging.getLogger("paddock.fleet.plane")

OWN_SECRETS = (
    "FLEET_API_KEY",
    "RUNNER_AUTH_TOKEN",
    "FLEET_JUDGE_TOKEN",
    "PADDOCK_AUTH_TOKEN",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
)
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0


class StartFailed(PaddockError):
    """The process does not serve. `transient` says whether another attempt may succeed."""

    code = "START_FAILED"

    def __init__(self, message: str, *, transient: bool) -> None:
        super().__init__(message)
        self.transient = transient


class HostedProcess(ABC):
    """A process, wherever it runs. Its owner must `end` it."""

    pid: int | None = None
    """The pid and the start time, if it is a process of this machine."""
    start_time: int | None = None
    address: str | None = None
    """The machine it serves at; None for this one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.first_line: asyncio.Future[bytes | None] = self._loop.create_future()
        """The first line of its output; None if it ends without one."""
        self.was_warm = False
        """Whether it came from the pool."""
        self.ended: asyncio.Future[int] = self._loop.create_future()

    @property
    def is_alive(self) -> bool:
        return not self.ended.done()

    async def wait_until_serving(self, seconds: float) -> int:
        """The port of the process, after it got its spec. Raises StartFailed."""
        try:
            async with asyncio.timeout(seconds):
                line = await asyncio.shield(self.first_line)
        except TimeoutError:
            raise StartFailed(f"it did not serve within {seconds:g} s", transient=True) from None
        if line is None:
            await asyncio.wait([self.ended], timeout=KILL_SECONDS)
            raise StartFailed(self.describe_end("before it served"), transient=True)
        try:
            document = orjson.loads(line)
            port, error = document.get("port"), document.get("error")
        except (ValueError, AttributeError):
            port, error = None, f"it answered with {line[:200]!r}"
        if not isinstance(port, int):
            raise StartFailed(str(error)[:LOG_TAIL_BYTES], transient=False)
        return port

    def describe_end(self, when: str = "") -> str:
        ending = f"ended with code {self.ended.result()}" if self.ended.done() else "closed its output"
        return f"its process {ending}{when and ' '}{when}: {self.log_tail()}"

    @abstractmethod
    def send(self, line: dict[str, Any]) -> None:
        """Write a line to the process. One that has ended does not read it."""

    @abstractmethod
    def move_log(self, path: Path) -> None:
        """Rename the log; the process goes on writing to it."""

    @abstractmethod
    def log_tail(self) -> str:
        """The end of its log."""

    @abstractmethod
    async def end(self, seconds: float) -> None:
        """End the process and its children; kill those that have not ended after `seconds`."""


class Launcher(Protocol):
    """Where processes are started. `open` comes before the first `start`, `close` after the last `end`."""

    async def open(self) -> None: ...

    async def start(self, log: Path) -> HostedProcess:
        """A process that waits for its spec. Raises OSError or StartFailed."""
        ...

    async def close(self) -> None: ...

    def statistics(self) -> dict[str, Any]:
        """Its part of the plane's statistics."""
        ...


class LocalLauncher:
    """Starts processes on this machine."""

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
    """A running `command` on this machine. Create it with `start`; its owner must `end` it."""

    def __init__(self, child: ChildProcess) -> None:
        super().__init__()
        self._child = child
        self.pid: int = child.pid
        self.start_time = child.start_time
        self.ended = child.ended
        self._reader = self._loop.create_task(self._read_output())

    @classmethod
    async def start(cls, command: Sequence[str], log: Path) -> InstanceProcess:
        """Start the process; its standard error goes to `log`."""
        env = {name: value for name, value in os.environ.items() if name not in OWN_SECRETS}
        return cls(await ChildProcess.start(command, log=log, env=env))

    def send(self, line: dict[str, Any]) -> None:
        self._child.send(line)

    def move_log(self, path: Path) -> None:
        assert self._child.log is not None
        self._child.log = self._child.log.rename(path)

    def log_tail(self) -> str:
        return self._child.log_tail() or "its log is empty"

    async def end(self, seconds: float) -> None:
        await self._child.end(seconds)

    async def _read_output(self) -> None:
        try:
            line = await self._child.read_line()
        except ValueError:
            line = b"a line that is too long"
        if not self.first_line.done():
            self.first_line.set_result(line)
        await self._child.discard_output()


class WarmPool:
    """Hands out processes: a warm one if there is one, else one started for the caller.

    Starting Python and its imports is most of the cost of an instance, so a few processes are started in advance. At
    most `parallel` callers start at a time, in the order of arrival.
    """

    def __init__(self, launcher: Launcher, folder: Path, *, warm: int, parallel: int, end_seconds: float) -> None:
        self._launcher = launcher
        self._folder = folder
        self._warm = warm
        self._end_seconds = end_seconds
        self._slots = asyncio.Semaphore(parallel)
        self._idle: deque[HostedProcess] = deque()
        self._log_numbers = itertools.count(1)
        self._refill = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None
        self._pause = FIRST_PAUSE_SECONDS
        self.starting = 0
        """How many callers start a process or wait for a slot."""

    @property
    def idle(self) -> int:
        return len(self._idle)

    def open(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._refill.set()
        self._refiller = asyncio.create_task(self._keep_warm(), name="warm-pool")

    async def close(self) -> None:
        if self._refiller is not None:
            self._refiller.cancel()
            await asyncio.gather(self._refiller, return_exceptions=True)
        idle = list(self._idle)
        self._idle.clear()
        await asyncio.gather(*(process.end(self._end_seconds) for process in idle))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """The right to start something now. The pool is refilled only while no caller starts anything."""
        self.starting += 1
        try:
            async with self._slots:
                yield
        finally:
            self.starting -= 1
            if not self.starting:
                self._refill.set()

    async def take(self, *, fresh: bool = False) -> HostedProcess:
        """A process for the caller, who must end it; with `fresh` a new one."""
        while self._idle and not fresh:
            process = self._idle.popleft()
            if process.is_alive:
                return process
        return await self._start()

    async def _start(self) -> HostedProcess:
        return await self._launcher.start(self._folder / f"{next(self._log_numbers)}.log")

    async def _keep_warm(self) -> None:
        while True:
            await self._refill.wait()
            self._refill.clear()
            while len(self._idle) < self._warm and not self.starting:
                try:
                    process = await self._start()
                except (OSError, PaddockError) as error:
                    logger.warning("no process can be started: %s; trying again in %g s", error, self._pause)
                    await asyncio.sleep(self._pause)
                    self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
                    continue
                process.was_warm = True
                self._idle.append(process)
                process.ended.add_done_callback(partial(self._replace_ended, process))
                # Callers that arrived meanwhile go first.
                await asyncio.sleep(0)

    def _replace_ended(self, process: HostedProcess, ended: asyncio.Future[int]) -> None:
        if process not in self._idle:
            return
        self._idle.remove(process)
        logger.warning("a warm process ended: %s", process.log_tail())
        asyncio.get_running_loop().call_later(self._pause, self._refill.set)
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
