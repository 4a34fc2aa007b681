"""A child process with a line protocol: JSON lines to its stdin, lines from its stdout, stderr to a log file.

The child leads a process group of its own. When it ends, in whatever way, the rest of its group is killed and it is
reaped, so neither a zombie nor a descendant in the group is left. When the parent is
killed, the child reads the end of its stdin, and should end then. This module does not know what the lines mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from paddock.processes import KILL_SECONDS, process_start_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from pathlib import Path

logger = logging.getLogger("paddock")

MAX_LINE_BYTES = 64 * 1024
LOG_TAIL_BYTES = 2000


class ChildProcess:
    """Make it with `start`. The owner must call `end`."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path | None) -> None:
        self.pid = popen.pid
        self.start_time = process_start_time(popen.pid)
        """In clock ticks since the boot. With the pid it identifies the process."""
        self.log = log
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = self._loop.create_future()
        """Its exit code, negative for a signal."""
        self._popen = popen
        self._output = asyncio.StreamReader()
        self._output_pipe: asyncio.ReadTransport | None = None
        self._input: asyncio.StreamWriter | None = None

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> ChildProcess:
        """Start `command`. Its stderr is appended to `log`; without one it is ours. Raises OSError."""
        child = cls(_spawn(command, log, env=env, pass_fds=pass_fds), log)
        child._watch()
        try:
            await child._connect(max_line_bytes)
        except BaseException:
            await asyncio.shield(child.kill())
            raise
        return child

    @property
    def is_alive(self) -> bool:
        """Whether the process has not ended yet."""
        return not self.ended.done()

    # -- lines ----------------------------------------------------------------------------------------

    def send(self, document: dict[str, Any]) -> None:
        """Write one line of JSON, without waiting. A child that is gone does not read it."""
        self.write_line(orjson.dumps(document))

    def write_line(self, line: bytes) -> None:
        """Write a line to its input, if that is still open."""
        if self._input is not None and not self._input.is_closing():
            self._input.write(line + b"\n")

    async def drain(self) -> None:
        """Wait while the child is slow to read. Raises ConnectionError when it is gone."""
        if self._input is None or self._input.is_closing():
            raise ConnectionResetError("the process has closed its input")
        await self._input.drain()

    async def read_line(self) -> bytes | None:
        """The next whole line, without its end; None after the last one. Raises ValueError if it is too long."""
        line = await self._output.readline()
        return line[:-1] if line.endswith(b"\n") else None

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines of its output until it closes it."""
        while (line := await self.read_line()) is not None:
            yield line

    async def discard_output(self) -> None:
        """Read until the end of the output, so that the child never blocks on a full pipe."""
        while await self._output.read(MAX_LINE_BYTES):
            pass

    # -- the end --------------------------------------------------------------------------------------

    def log_tail(self) -> str:
        """The last of what it wrote to its log."""
        return "" if self.log is None else read_tail(self.log)

    def describe_end(self, when: str = "") -> str:
        """How it ended, with the end of its log, for error messages."""
        how = f"ended with code {self.ended.result()}" if self.ended.done() else "closed its output"
        return f"its process {how}{when and ' '}{when}: {self.log_tail() or 'it wrote nothing to its log'}"

    def close_input(self) -> None:
        """Close its input: by convention it ends then."""
        if self._input is not None:
            self._input.close()

    def send_signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to it, or to its process group."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                (os.killpg if group else os.kill)(self.pid, number)

    async def wait(self, seconds: float | None = None) -> bool:
        """Whether it has ended, after `seconds` at the latest."""
        await asyncio.wait([self.ended], timeout=seconds)
        return self.ended.done()

    async def end(self, grace_seconds: float = 0.0) -> None:
        """Close its input and send SIGTERM; after `grace_seconds`, kill its group."""
        self.close_input()
        if self.is_alive and grace_seconds > 0:
            self.send_signal(signal.SIGTERM)
            await self.wait(grace_seconds)
        await self.kill()

    async def kill(self) -> None:
        """Kill its group, and wait until it is reaped."""
        self.close_input()
        if self.is_alive:
            kill_group(self.pid)
            if not await self.wait(KILL_SECONDS):
                logger.error("process %d does not end, not even when killed", self.pid)
        if self._output_pipe is not None:
            # A descendant that left the group may hold the other end open.
            self._output_pipe.close()

    # -- inside ---------------------------------------------------------------------------------------

    async def _connect(self, max_line_bytes: int) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._output = asyncio.StreamReader(limit=max_line_bytes)
        output = _OutputProtocol(self._output)
        self._output_pipe, _ = await self._loop.connect_read_pipe(lambda: output, self._popen.stdout)
        # A reader of its own: the protocol of a writer needs one for `drain`.
        control = asyncio.StreamReaderProtocol(asyncio.StreamReader())
        transport, _ = await self._loop.connect_write_pipe(lambda: control, self._popen.stdin)
        self._input = asyncio.StreamWriter(transport, control, None, self._loop)

    def _watch(self) -> None:
        """Watch for its end with a pidfd. asyncio's child watcher would reap it before its group is killed."""
        try:
            handle = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            threading.Thread(target=self._wait_on_thread, name=f"wait-{self.pid}", daemon=True).start()
        else:
            self._loop.add_reader(handle, partial(self._has_ended, handle))

    def _wait_on_thread(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._has_ended)

    def _has_ended(self, handle: int | None = None) -> None:
        if handle is not None:
            self._loop.remove_reader(handle)
            os.close(handle)
        # The process group id cannot be reused until the child is reaped, so this kills the right group.
        kill_group(self.pid)
        code = self._popen.wait()
        self.close_input()
        if not self.ended.done():
            self.ended.set_result(code)


class _OutputProtocol(asyncio.StreamReaderProtocol):
    def eof_received(self) -> bool:
        super().eof_received()
        return False  # Close the pipe, also on uvloop. asyncio's own protocol keeps it open there.


def _spawn(
    command: Sequence[str], log: Path | None, *, env: Mapping[str, str] | None, pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    with open(log or os.devnull, "ab") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if log is None else errors,
            bufsize=0,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
        )


def read_tail(log: Path) -> str:
    """The end of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace").strip()
    except OSError as error:
        return f"its log cannot be read: {error.strerror}"


def kill_orphan(pid: int, start_time: int | None) -> bool:
    """Kill the group of a process that an earlier parent left. False if the process is gone and its pid is reused."""
    if start_time is None or process_start_time(pid) != start_time:
        return False
    kill_group(pid)
    return True


def kill_group(pid: int) -> None:
    """Kill all processes of a group."""
    # The group is empty, or has only processes that we may not kill.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
