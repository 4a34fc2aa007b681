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

from paddock.e2b_server.connect_protocol import ConnectError
from paddock.errors import SandboxError
from paddock.sandbox.base import TESTS
from paddock.sandbox.connection import GuestConnection
from paddock.sandbox.guest.entry import HOME
from paddock.sandbox.host_runtime import SHELL_FOLDER
from paddock.sandbox.image_root import base_environment
from paddock.sandbox.image_sandbox import OWN_USERS, ImageSandbox
from paddock.sandbox.remote import COMMAND_OOM_SCORE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from paddock.sandbox.base import Sandbox
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.transports import GuestTransport

OUTPUT_GRACE_SECONDS = 0.5
"""Outputs may stay open this long after their command ended, held by something it left behind."""
REQUEST_SECONDS = 60.0
MAX_EVENTS = 10_000
SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
SIGNAL_NAMES = {9: "killed", 15: "terminated", 2: "interrupt", 6: "aborted", 11: "segmentation fault"}


class ServedProcess:
    """A command inside. Several clients may listen to it. The slowest one sets the pace; one that leaves does not."""

    def __init__(self, served: ServedSandbox, config: dict[str, Any], tag: str | None) -> None:
        self.served, self.config, self.tag = served, config, tag
        self.pid = 0
        self.stdin = 0
        """The stream to its input; 0 if it has none."""
        self.terminal: int | None = None
        self.end: dict[str, Any] | None = None
        self._listeners: list[OutputListener] = []
        self._open_streams: set[int] = set()
        self._over = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def end_within(self, seconds: float | None) -> None:
        """Kill it if it is still there by then."""
        if seconds is not None and self.end is None:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self.signal, 9)

    def open_output(self, kind: str) -> int:
        """The number of a stream for one of its outputs."""
        stream = self.served.connection.collect(lambda data: self._receive(kind, number, data))
        number = stream.number
        self._open_streams.add(number)
        return number

    def _receive(self, kind: str, number: int, data: bytes) -> None:
        if not data:
            self._open_streams.discard(number)
            if not self._open_streams and self.end is not None:
                self._finish()
        elif self._listeners:
            chunk = OutputChunk(self.served.connection, number, len(data), len(self._listeners))
            for listener in self._listeners:
                listener.put(kind, data, chunk)
        else:
            self.served.connection.grant(number, len(data))

    def handle_exit(self, code: int | None, *, is_signalled: bool) -> None:
        number = (code or 0) - 128
        if code is None:
            end = {"exitCode": -1, "exited": False, "status": "gone", "error": "the sandbox ended"}
        elif is_signalled:
            status = f"signal: {SIGNAL_NAMES.get(number, number)}"
            end = {"exitCode": -1, "exited": False, "status": status, "error": status}
        else:
            end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
            if code:
                end["error"] = f"exit status {code}"
        self.end = end
        if self._deadline is not None:
            self._deadline.cancel()
        if self._open_streams and code is not None:
            asyncio.get_running_loop().call_later(OUTPUT_GRACE_SECONDS, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if not self._over.is_set():
            self._over.set()
            for listener in self._listeners:
                listener.close()

    def listen(self) -> OutputListener:
        listener = OutputListener(self)
        self._listeners.append(listener)
        if self._over.is_set():
            listener.close()
        return listener

    def remove_listener(self, listener: OutputListener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def signal(self, number: int) -> None:
        self.served.connection.notify("signal", {"pid": self.pid, "signal": number})

    async def write(self, data: bytes, *, terminal: bool) -> None:
        number = self.terminal if terminal else self.stdin
        if not number:
            what = "no terminal" if terminal else "no open stdin"
            raise ConnectError("failed_precondition", f"process {self.pid} has {what}")
        await self.served.connection.write(number, data)

    async def close_stdin(self) -> None:
        if not self.stdin:
            raise ConnectError("failed_precondition", f"process {self.pid} has no open stdin")
        number, self.stdin = self.stdin, 0
        await self.served.connection.write(number, b"", end=True)


class OutputChunk:
    """Some output for several listeners. Its credit is granted again when the last one has taken it."""

    def __init__(self, connection: GuestConnection, number: int, size: int, listeners: int) -> None:
        self._connection, self._number, self._size, self._left = connection, number, size, listeners

    def release(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._connection.grant(self._number, self._size)


class OutputListener:
    """The output that one client has not received yet."""

    def __init__(self, process: ServedProcess) -> None:
        self._process = process
        self._unread: deque[tuple[str, bytes, OutputChunk]] = deque()
        self._has_news = asyncio.Event()
        self._closed = False

    def put(self, kind: str, data: bytes, chunk: OutputChunk) -> None:
        self._unread.append((kind, data, chunk))
        self._has_news.set()

    def close(self) -> None:
        self._closed = True
        self._has_news.set()

    async def next(self) -> tuple[str, bytes] | None:
        """The next output and its kind; None at the end."""
        while not self._unread:
            if self._closed:
                return None
            self._has_news.clear()
            await self._has_news.wait()
        kind, data, chunk = self._unread.popleft()
        chunk.release()
        return kind, data

    def leave(self) -> None:
        self._process.remove_listener(self)
        while self._unread:
            self._unread.popleft()[2].release()


class FolderWatcher:
    """Changes in a folder that no client has read yet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.events: deque[tuple[str, str, dict[str, Any] | None]] = deque(maxlen=MAX_EVENTS)
        self.has_events = asyncio.Event()


USER_ENVIRONMENT = {
    "USER": "user",
    "LOGNAME": "user",
    "SHELL": "/bin/bash",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
BASH = "/bin/bash"


class ServedSandbox:
    """Created by `SandboxRegistry`. Its `connection` leads to a nested guest with `guest_requests`."""

    def __init__(
        self,
        sandbox: Sandbox,
        transport: GuestTransport,
        *,
        tests_folder: Path | None,
        image: Image | None,
        template: str,
        metadata: dict[str, str],
        envs: dict[str, str],
    ) -> None:
        self.id = sandbox.id
        self.sandbox = sandbox
        self.template, self.metadata = template, metadata
        self.token = secrets.token_urlsafe(24)
        self.started_at = time.time()
        self.end_at = self.started_at
        self.alive = True
        self.processes: dict[int, ServedProcess] = {}
        self._by_number: dict[int, ServedProcess] = {}
        self.watchers: dict[str, FolderWatcher] = {}
        self._tests_folder = tests_folder
        """The folder of the host that is mounted at `/tests`: only root may write there. Not needed on an image."""
        self.has_ended = asyncio.Event()
        self.connection = GuestConnection(transport, self)
        self.image = image
        """Its root. None: the programs of this machine, and one user."""
        self._bash = BASH
        """The shell in which the SDK runs commands."""
        home = {"HOME": str(sandbox.home)}
        own = {**USER_ENVIRONMENT, **home} if image is None else base_environment(image.config, sandbox.home)
        self.envs = {
            **own,
            "E2B_SANDBOX": "true",
            "E2B_SANDBOX_ID": self.id,
            "E2B_TEMPLATE_ID": template,
            **envs,
        }

    @property
    def default_folder(self) -> str:
        """Where commands start."""
        return "~" if self.image is None else str(self.sandbox.workdir)

    def check_user(self, user: str) -> None:
        """Raises ConnectError for a user that there cannot be. An image has users of its own."""
        if self.image is None and user not in ("", "user"):
            raise ConnectError("invalid_argument", f"there is no user {user!r} here: everything is done as user")

    def _image_user(self, user: str) -> str:
        """Who runs a command on an image; empty for root. Raises ConnectError if this machine cannot change to it."""
        if self.image is None or not isinstance(self.sandbox, ImageSandbox):
            return ""
        user = user or self.image.config.user
        if user in OWN_USERS:
            return ""
        try:
            self.sandbox.check_user(user)
        except SandboxError as error:
            raise ConnectError("invalid_argument", error.message) from None
        return user

    def _command_words(self, config: dict[str, Any]) -> list[str]:
        words = [str(config.get("cmd") or ""), *map(str, config.get("args") or ())]
        if self.image is not None and words[0] == BASH:
            # A login shell would replace the PATH of the image.
            return [self._bash, *(word for word in words[1:3] if word != "-l"), *words[3:]]
        return words

    async def begin(self) -> None:
        home = str(self.sandbox.home)
        # Without limits: those of the sandbox around it hold.
        settings = {"limits": None, "command_oom_score": COMMAND_OOM_SCORE, "no_new_privileges": True}
        await self.connection.ask("begin", {"home": home, "folders": [home], **settings})
        if self.image is not None:
            try:
                await self.connection.ask("stat", {"path": BASH})
            except OSError:
                self._bash = str(SHELL_FOLDER / "bash")

    # -- what the guest reports -----------------------------------------------------------------------

    def handle_event(self, event: list[Any]) -> None:
        kind, *details = event
        if kind == "exit":
            number, code, is_signalled, _ = details
            process = self._by_number.pop(number, None)
            if process is not None:
                self.processes.pop(process.pid, None)
                process.handle_exit(code, is_signalled=is_signalled)
        elif kind == "changed" and details[0] in self.watchers:
            watch, name, change, entry = details
            self.watchers[watch].events.append((name, change, entry))
            self.watchers[watch].has_events.set()

    def handle_late_result(self, name: str, result: Any) -> None:
        # The client that started this command was gone before it knew of it.
        if name == "spawn":
            self.connection.notify("signal", {"pid": result["pid"], "signal": 9})

    def handle_end(self) -> None:
        self.alive = False
        self.has_ended.set()
        processes, self._by_number = self._by_number, {}
        self.processes.clear()
        for process in processes.values():
            process.handle_exit(None, is_signalled=False)
        for watcher in self.watchers.values():
            watcher.has_events.set()

    # -- commands -------------------------------------------------------------------------------------

    async def start(
        self, config: dict[str, Any], *, tag: str | None, stdin: bool, terminal: list[int] | None, user: str = ""
    ) -> tuple[ServedProcess, OutputListener]:
        """Start a command, with a listener that misses nothing of it. `user` counts on an image only."""
        image_user = self._image_user(user)
        connection, localize = self.connection, self.sandbox.localize
        process = ServedProcess(self, config, tag)
        listener = process.listen()
        envs = {**self.envs, **{str(name): str(value) for name, value in (config.get("envs") or {}).items()}}
        argv = self._command_words(config)
        cwd = self.to_inner_path(str(config.get("cwd") or self.default_folder))
        cwd = (await self.ask("stat", {"path": cwd}, subject=f"cwd {cwd}"))["path"]
        number = connection.new_number()
        if terminal is None:
            process.stdin = connection.new_number() if stdin else 0
            streams = [process.stdin, process.open_output("stdout"), process.open_output("stderr")]
        else:
            process.terminal = process.open_output("pty")
            streams = [0, process.terminal, 0]
        self._by_number[number] = process
        arguments = {
            "argv": [localize(word) for word in argv],
            "cwd": cwd,
            "env": {name: localize(value) for name, value in envs.items()},
            "streams": streams,
            "terminal": terminal,
            "user": image_user,
        }
        try:
            process.pid = (await connection.ask("spawn", arguments, number=number))["pid"]
        except BaseException as error:
            self._by_number.pop(number, None)
            if isinstance(error, OSError):
                raise ConnectError("internal", f"no process can be started: {error.strerror}") from None
            raise
        if process.end is None:
            self.processes[process.pid] = process
        return process, listener

    def select(self, selector: dict[str, Any] | None) -> ServedProcess:
        chosen = selector or {}
        for process in self.processes.values():
            if ("pid" in chosen and process.pid == int(chosen["pid"])) or (
                chosen.get("tag") and process.tag == chosen["tag"]
            ):
                return process
        wanted = " ".join(f"{name} {value}" for name, value in chosen.items()) or "nothing"
        raise ConnectError("not_found", f"process with {wanted} not found")

    # -- files ----------------------------------------------------------------------------------------

    def to_inner_path(self, path: str) -> str:
        """Where a path that a client names is in this sandbox."""
        return self.sandbox.localize(path)

    def to_client_path(self, path: str) -> str:
        """The path by which clients know a path of this sandbox."""
        home = str(self.sandbox.home)
        if self.image is None and home != str(HOME) and (path == home or path.startswith(f"{home}/")):
            return str(HOME) + path[len(home) :]
        return path

    async def ask(self, name: str, arguments: dict[str, Any], *, subject: str | None = None) -> Any:
        """Ask the guest about a file. Raises ConnectError in the words of E2B's daemon."""
        try:
            return await self.connection.ask(name, arguments, timeout=REQUEST_SECONDS)
        except OSError as error:
            raise to_connect_error(error, subject or str(arguments.get("path", ""))) from None

    async def read(self, path: str) -> tuple[int, AsyncIterator[bytes]]:
        """How long a file is, and its bytes as they come."""
        chunks: asyncio.Queue[bytes] = asyncio.Queue()
        stream = self.connection.collect(chunks.put_nowait)
        try:
            opened = await self.ask("open", {"path": self.to_inner_path(path), "into": stream.number})
        except BaseException:
            self.connection.forget(stream.number)
            raise
        return opened["size"], self._read_chunks(stream.number, chunks)

    async def _read_chunks(self, number: int, chunks: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
        is_complete = False
        try:
            while data := await chunks.get():
                yield data
                self.connection.grant(number, len(data))
            is_complete = True
        finally:
            if not is_complete:
                self.connection.drop(number)

    async def write(self, path: str, content: AsyncIterator[bytes], metadata: dict[str, str]) -> dict[str, Any]:
        """Write a file, and create its folders. Returns what `stat` returns."""
        number = self.connection.new_number()
        arguments = {"path": self.to_inner_path(path), "content": number, "metadata": metadata}
        pending = self.connection.request("create", arguments)
        try:
            async for data in content:
                if pending.done():
                    break
                await self.connection.write(number, data)
            with suppress(SandboxError):
                await self.connection.write(number, b"", end=True)
            entry: dict[str, Any] = (await pending).result
            return entry
        except OSError as error:
            if isinstance(error, ConnectionError):
                raise
            raise to_connect_error(error, path) from None
        finally:
            if not pending.done():
                self.connection.notify("drop", {"stream": number})
                pending.cancel()

    def write_as_root(self, path: str, content: bytes, mode: int) -> PurePosixPath:
        """Write below `/tests`: from the host, because inside it is read-only."""
        assert self._tests_folder is not None, "on an image, root writes like everybody else"
        place = PurePosixPath(os.path.normpath(path))
        if not place.is_relative_to(TESTS) or place == TESTS:
            raise ConnectError("invalid_argument", f"root can only write below {TESTS} here, not to {path}")
        target = self._tests_folder.joinpath(*place.relative_to(TESTS).parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        for folder in target.parents:
            if folder == self._tests_folder.parent:
                break
            folder.chmod(0o755)
        target.write_bytes(content)
        target.chmod(mode & 0o777)
        return place

    async def close(self) -> None:
        self.alive = False
        self.has_ended.set()
        await self.connection.close()


def to_connect_error(error: OSError, path: str) -> ConnectError:
    kinds: tuple[tuple[type[OSError], str, str], ...] = (
        (FileNotFoundError, "not_found", "not found"),
        (FileExistsError, "already_exists", "already exists"),
        (NotADirectoryError, "invalid_argument", "is not a directory"),
        (IsADirectoryError, "invalid_argument", str(error.strerror)),
        (PermissionError, "permission_denied", "permission denied"),
    )
    for kind, code, message in kinds:
        if isinstance(error, kind):
            return ConnectError(code, f"{path}: {message}")
    if error.errno in (28, 122):
        return ConnectError("out_of_space", f"{path}: not enough disk space available")
    return ConnectError("internal", f"{path}: {error.strerror}")
