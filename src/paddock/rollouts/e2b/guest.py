"""One sandbox as E2B's clients see it: its commands, its watchers, its files. Knows no HTTP."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections import deque
from contextlib import suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.rollouts.e2b.connect import ConnectError
from paddock.rollouts.sandbox.base import HOME, TESTS
from paddock.rollouts.sandbox.channel import Channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from paddock.rollouts.sandbox.base import Sandbox
    from paddock.rollouts.sandbox.channel import Line

OUTPUT_GRACE = 0.5
"""Seconds that outputs may stay open after their command ended, held by something it left behind."""
CONNECT_TIMEOUT = 10.0
MOST_EVENTS = 10_000
SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
NAMES = {9: "killed", 15: "terminated", 2: "interrupt", 6: "aborted", 11: "segmentation fault"}


class Process:
    """A command inside. Several clients may listen to it; who is slow slows it down, who leaves does not."""

    def __init__(self, guest: Guest, config: dict[str, Any], tag: str | None) -> None:
        self.guest, self.config, self.tag = guest, config, tag
        self.pid = 0
        self.stdin = 0
        """The stream that leads to its input; 0 if it has none."""
        self.terminal: int | None = None
        self.end: dict[str, Any] | None = None
        self._listeners: list[Listener] = []
        self._open: set[int] = set()
        self._over = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def end_within(self, seconds: float | None) -> None:
        """Kill it if it is still there by then."""
        if seconds is not None and self.end is None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.signal, 9)

    def hear(self, kind: str) -> int:
        """A stream for one of its outputs."""
        heard = self.guest.channel.hear(lambda data: self._came(kind, number, data))
        number = heard.number
        self._open.add(number)
        return number

    def _came(self, kind: str, number: int, data: bytes) -> None:
        if not data:
            self._open.discard(number)
            if not self._open and self.end is not None:
                self._finish()
        elif self._listeners:
            item = Piece(self.guest.channel, number, len(data), len(self._listeners))
            for listener in self._listeners:
                listener.put(kind, data, item)
        else:
            self.guest.channel.grant(number, len(data))

    def exited(self, code: int | None, *, signalled: bool) -> None:
        number = (code or 0) - 128
        if code is None:
            end = {"exitCode": -1, "exited": False, "status": "gone", "error": "the sandbox ended"}
        elif signalled:
            words = f"signal: {NAMES.get(number, number)}"
            end = {"exitCode": -1, "exited": False, "status": words, "error": words}
        else:
            end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
            if code:
                end["error"] = f"exit status {code}"
        self.end = end
        if self._deadline is not None:
            self._deadline.cancel()
        if self._open and code is not None:
            asyncio.get_running_loop().call_later(OUTPUT_GRACE, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if not self._over.is_set():
            self._over.set()
            for listener in self._listeners:
                listener.close()

    def listen(self) -> Listener:
        listener = Listener(self)
        self._listeners.append(listener)
        if self._over.is_set():
            listener.close()
        return listener

    def leave(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def signal(self, number: int) -> None:
        self.guest.channel.tell("signal", {"pid": self.pid, "signal": number})

    async def write(self, data: bytes, *, terminal: bool) -> None:
        number = self.terminal if terminal else self.stdin
        if not number:
            what = "no terminal" if terminal else "no open stdin"
            raise ConnectError("failed_precondition", f"process {self.pid} has {what}")
        await self.guest.channel.write(number, data)

    async def close_stdin(self) -> None:
        if not self.stdin:
            raise ConnectError("failed_precondition", f"process {self.pid} has no open stdin")
        number, self.stdin = self.stdin, 0
        await self.guest.channel.write(number, b"", end=True)


class Piece:
    """Some output that is on its way to several listeners: there is room for more when the last one has it."""

    def __init__(self, channel: Channel, number: int, size: int, listeners: int) -> None:
        self._channel, self._number, self._size, self._left = channel, number, size, listeners

    def taken(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._channel.grant(self._number, self._size)


class Listener:
    """What one client has yet to hear."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._waiting: deque[tuple[str, bytes, Piece]] = deque()
        self._news = asyncio.Event()
        self._closed = False

    def put(self, kind: str, data: bytes, piece: Piece) -> None:
        self._waiting.append((kind, data, piece))
        self._news.set()

    def close(self) -> None:
        self._closed = True
        self._news.set()

    async def next(self, timeout: float | None) -> tuple[str, bytes] | None:
        """The next output and its kind; None at the end. Raises TimeoutError."""
        while not self._waiting:
            if self._closed:
                return None
            self._news.clear()
            async with asyncio.timeout(timeout):
                await self._news.wait()
        kind, data, piece = self._waiting.popleft()
        piece.taken()
        return kind, data

    def leave(self) -> None:
        self._process.leave(self)
        while self._waiting:
            self._waiting.popleft()[2].taken()


class Watcher:
    """Changes in a folder, until somebody asks for them."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.events: deque[tuple[str, str, dict[str, Any] | None]] = deque(maxlen=MOST_EVENTS)
        self.news = asyncio.Event()


class Guest:
    """Made by `Guests`. `sandbox` is what it runs in, `channel` leads to `inner`."""

    def __init__(self, sandbox: Sandbox, *, template: str, metadata: dict[str, str], envs: dict[str, str]) -> None:
        self.id = sandbox.id
        self.sandbox = sandbox
        self.template, self.metadata = template, metadata
        self.token = secrets.token_urlsafe(24)
        self.started_at = time.time()
        self.end_at = self.started_at
        self.alive = True
        self.processes: dict[int, Process] = {}
        self._by_number: dict[int, Process] = {}
        self.watchers: dict[str, Watcher] = {}
        self.channel: Channel
        self.staged: Path | None = None
        """The folder of the host that is seen at `/tests`: only whoever is root may write there."""
        self.gone = asyncio.Event()
        self.envs = {
            "HOME": str(sandbox.home),
            "USER": "user",
            "LOGNAME": "user",
            "SHELL": "/bin/bash",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "E2B_SANDBOX": "true",
            "E2B_SANDBOX_ID": self.id,
            "E2B_TEMPLATE_ID": template,
            **envs,
        }

    async def begin(self, line: Line) -> None:
        self.channel = Channel(line, self)
        home = str(self.sandbox.home)
        await self.channel.ask("prepare", {"home": home, "folders": [home]})

    # -- told by inner --------------------------------------------------------------------------------

    def happened(self, words: list[Any]) -> None:
        if words[0] == "exit":
            process = self._by_number.pop(int(words[1]), None)
            if process is not None:
                self.processes.pop(process.pid, None)
                process.exited(int(words[2]), signalled="signalled" in words[3:])
        elif words[0] == "changed" and words[1] in self.watchers:
            watcher = self.watchers[words[1]]
            watcher.events.append((words[2], words[3], words[4]))
            watcher.news.set()

    def ended(self) -> None:
        self.alive = False
        self.gone.set()
        processes, self._by_number = self._by_number, {}
        self.processes.clear()
        for process in processes.values():
            process.exited(None, signalled=False)
        for watcher in self.watchers.values():
            watcher.news.set()

    # -- commands -------------------------------------------------------------------------------------

    async def start(
        self, config: dict[str, Any], *, tag: str | None, stdin: bool, terminal: list[int] | None
    ) -> tuple[Process, Listener]:
        """Start a command, with a listener that misses nothing of it."""
        channel, localize = self.channel, self.sandbox.localize
        process = Process(self, config, tag)
        listener = process.listen()
        envs = {**self.envs, **{str(name): str(value) for name, value in (config.get("envs") or {}).items()}}
        argv = [str(config.get("cmd") or ""), *map(str, config.get("args") or ())]
        cwd = self.inside(str(config.get("cwd") or "~"))
        cwd = (await self.ask("stat", {"path": cwd}, said=f"cwd {cwd}"))["path"]
        number = channel.new_number()
        if terminal is None:
            outputs = {"stdout": process.hear("stdout"), "stderr": process.hear("stderr")}
            process.stdin = channel.new_number() if stdin else 0
        else:
            process.terminal = process.hear("pty")
            outputs = {"stdout": process.terminal, "stderr": 0}
        self._by_number[number] = process
        asked = {
            "argv": [localize(word) for word in argv],
            "cwd": cwd,
            "env": {name: localize(value) for name, value in envs.items()},
            "last": False,
            "guarded": [],
            "stdin": process.stdin,
            "terminal": terminal,
            **outputs,
        }
        try:
            process.pid = (await self.channel.ask("spawn", asked, number=number))["pid"]
        except BaseException as error:
            self._by_number.pop(number, None)
            if isinstance(error, OSError):
                raise ConnectError("internal", f"no process can be started: {error.strerror}") from None
            raise
        if process.end is None:
            self.processes[process.pid] = process
        return process, listener

    def select(self, selector: dict[str, Any] | None) -> Process:
        chosen = selector or {}
        for process in self.processes.values():
            if ("pid" in chosen and process.pid == int(chosen["pid"])) or (
                chosen.get("tag") and process.tag == chosen["tag"]
            ):
                return process
        wanted = " ".join(f"{name} {value}" for name, value in chosen.items()) or "nothing"
        raise ConnectError("not_found", f"process with {wanted} not found")

    # -- files ----------------------------------------------------------------------------------------

    def inside(self, path: str) -> str:
        """Where a path that a client names is in this sandbox."""
        return self.sandbox.localize(path)

    def shown(self, path: str) -> str:
        """How a client knows a path of this sandbox."""
        home = str(self.sandbox.home)
        if home != str(HOME) and (path == home or path.startswith(f"{home}/")):
            return str(HOME) + path[len(home) :]
        return path

    async def ask(self, name: str, arguments: dict[str, Any], *, said: str | None = None) -> Any:
        """Ask `inner` about a file. Raises ConnectError in the words of E2B's daemon."""
        try:
            return await self.channel.ask(name, arguments, timeout=60)
        except OSError as error:
            raise told(error, said or str(arguments.get("path", ""))) from None

    async def read(self, path: str) -> tuple[int, AsyncIterator[bytes]]:
        """How long a file is, and its bytes as they come."""
        pieces: asyncio.Queue[bytes] = asyncio.Queue()
        heard = self.channel.hear(pieces.put_nowait)
        try:
            opened = await self.ask("open", {"path": self.inside(path), "into": heard.number})
        except BaseException:
            self.channel.forget(heard.number)
            raise
        return opened["size"], self._pieces(heard.number, pieces)

    async def _pieces(self, number: int, pieces: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
        whole = False
        try:
            while data := await pieces.get():
                yield data
                self.channel.grant(number, len(data))
            whole = True
        finally:
            if not whole:
                self.channel.forget(number)
                self.channel.tell("drop", {"stream": number})

    async def write(self, path: str, content: AsyncIterator[bytes], metadata: dict[str, str]) -> dict[str, Any]:
        """Write a file, with the folders on its way. Answers with what `stat` would."""
        number = self.channel.new_number()
        arguments = {"path": self.inside(path), "content": number, "metadata": metadata}
        answer = self.channel.request("create", arguments)
        try:
            async for data in content:
                if answer.done():
                    break
                await self.channel.write(number, data)
            with suppress(SandboxError):
                await self.channel.write(number, b"", end=True)
            found: dict[str, Any] = await answer
            return found
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            raise told(error, path) from None
        finally:
            if not answer.done():
                self.channel.tell("drop", {"stream": number})
                answer.cancel()

    def stage(self, path: str, content: bytes, mode: int) -> PurePosixPath:
        """Write below `/tests` as root: from the host, because inside it can only be read."""
        place = PurePosixPath(os.path.normpath(path))
        if self.staged is None or not place.is_relative_to(TESTS) or place == TESTS:
            raise ConnectError("invalid_argument", f"root can only write below {TESTS} here, not to {path}")
        target = self.staged.joinpath(*place.relative_to(TESTS).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in target.parents:
            if folder == self.staged.parent:
                break
            folder.chmod(0o755)
        target.write_bytes(content)
        target.chmod(mode & 0o777)
        return place

    async def close(self) -> None:
        self.alive = False
        self.gone.set()
        if hasattr(self, "channel"):
            await self.channel.close()


def told(error: OSError, path: str) -> ConnectError:
    kinds: tuple[tuple[type[OSError], str, str], ...] = (
        (FileNotFoundError, "not_found", "not found"),
        (FileExistsError, "already_exists", "already exists"),
        (NotADirectoryError, "invalid_argument", "is not a directory"),
        (IsADirectoryError, "invalid_argument", str(error.strerror)),
        (PermissionError, "permission_denied", "permission denied"),
    )
    for kind, code, words in kinds:
        if isinstance(error, kind):
            return ConnectError(code, f"{path}: {words}")
    if error.errno in (28, 122):
        return ConnectError("out_of_space", f"{path}: not enough disk space available")
    return ConnectError("internal", f"{path}: {error.strerror}")
