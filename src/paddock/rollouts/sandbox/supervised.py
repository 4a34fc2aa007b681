"""A sandbox whose processes are started by a supervisor, whatever keeps them apart from the host.

A backend says how the supervisor is launched; everything else is here.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import socket
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from paddock.errors import SandboxError
from paddock.rollouts.processes import process_start_time
from paddock.rollouts.sandbox import files
from paddock.rollouts.sandbox.base import HOME, LOGS, Command, Completed, Entry, Sandbox, SandboxSpec
from paddock.rollouts.sandbox.callers import CallerFinder
from paddock.rollouts.sandbox.jobs import SupervisedJob
from paddock.rollouts.sandbox.launch import Launched, program_part, wait_gone
from paddock.rollouts.sandbox.wire import Control, close_all
from paddock.rollouts.unhurried import unhurried

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

ResultT = TypeVar("ResultT")

USAGE_TIMEOUT = 0.5
KILL_DEADLINE = 5.0

_libc = ctypes.CDLL(None, use_errno=True)
logger = logging.getLogger(__name__)


class SupervisedSandbox(Sandbox):
    """Use `open_sandbox` to get one."""

    alone: ClassVar[bool]
    """Whether the supervisor is process 1 of a namespace of its own."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.host_pid: int | None = None
        self.host_start_time: int | None = None
        self.host_paths: tuple[Path, ...] = ()
        self._base_env: dict[str, str] = {}
        self._file_owner: int | None = None
        """The user on the host that owns the files inside, if we are root and act for it."""
        self._launched: Launched | None = None
        self._control: Control | None = None
        self._home_folder: int | None = None
        self._jobs: dict[int, SupervisedJob] = {}
        self._caller_finders: list[CallerFinder] = []
        self._killed_for: str | None = None
        self._cpu_seconds: float | None = None
        self._peak_memory: int | None = None
        self._ending = asyncio.Lock()
        self._closed = False

    # -- making ---------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make what the sandbox needs on the host. Runs in a thread; failures are cleaned up by `close`."""
        raise NotImplementedError

    async def launch(self) -> Launched:
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What the supervisor has to know."""
        limits = self.spec.limits
        home = str(self.home)
        return {
            "guard": program_part("guard") if self.spec.readonly_tests else None,
            "alone": self.alone,
            "home": home,
            "folders": [home, f"{home}/workdir", f"{home}/logs/verifier"],
            "memory_bytes": int(limits.memory_bytes),
            "cpu_seconds": float(limits.cpu_seconds),
            "processes": int(limits.processes),
            "disk_bytes": int(limits.disk_bytes),
            "cpus": chosen_processors(limits.cpus, self.id),
        }

    async def open(self, timeout: float) -> None:
        """Start it. Nothing is left behind when this fails or is cancelled."""
        preparing = asyncio.ensure_future(asyncio.to_thread(self.prepare))
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(preparing)
                self._launched = await self.launch()
                self._control = Control(self._launched.connection, self)
                try:
                    _, given = await self._control.ask("begin", self.settings(), timeout=timeout)
                except (OSError, SandboxError) as error:
                    raise self._stillborn(await self._launched.last_words()) from error
                self._home_folder = given[0]
                self.host_pid = self._launched.first_pid()
                self.host_start_time = process_start_time(self.host_pid)
        except TimeoutError:
            await unhurried(self._abandon(preparing))
            raise SandboxError(f"the sandbox did not start within {timeout:g} s") from None
        except BaseException as error:
            await unhurried(self._abandon(preparing))
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox cannot be made: {error}") from error
            raise

    async def _abandon(self, preparing: asyncio.Future[None]) -> None:
        # A thread cannot be stopped: what it makes must be there before it is removed.
        await asyncio.wait([preparing])
        await self.close()

    def _stillborn(self, said: str) -> SandboxError:
        return SandboxError(f"the {self.backend} sandbox did not start: {said or 'it said nothing'}")

    # -- told by the supervisor -----------------------------------------------------------------------

    def happened(self, words: list[str]) -> None:
        if words[0] == "exit":
            job = self._jobs.pop(int(words[1]), None)
            if job is not None:
                _, _, doubt = " ".join(words[3:]).partition("tampered ")
                job.ended(int(words[2]), tampered=doubt or None)
        elif words[0] == "unfenced":
            reason = " ".join(words[1:])
            logger.warning("sandbox %s: the reward folder is no mount point, paddock-run fails: %s", self.id, reason)
        elif words[0] == "over":
            self._killed_for = words[1]
            self._cpu_seconds, self._peak_memory = float(words[2]), int(words[3])

    def ended(self) -> None:
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.ended(None)

    def came_late(self, name: str, words: list[str]) -> None:
        # Whoever asked for it was cancelled: nobody would ever end this command.
        if name == "spawn":
            self._send_signal(int(words[0]), signal.SIGKILL)

    # -- commands -------------------------------------------------------------------------------------

    async def start(self, command: Command) -> SupervisedJob:
        control = self._living()
        arguments = self._spawn_arguments(command)
        number = control.new_number()
        given: list[int] = [] if not command.stdin else [sealed("stdin", command.stdin)]
        try:
            stdout, stdout_inside = os.pipe()
            given.append(stdout_inside)
            stderr, stderr_inside = os.pipe()
            given.append(stderr_inside)
            if self._file_owner is not None:
                # So that what runs inside can open /dev/stdout and /dev/stderr.
                os.fchown(stdout_inside, self._file_owner, self._file_owner)
                os.fchown(stderr_inside, self._file_owner, self._file_owner)
            job = SupervisedJob(stdout, stderr, self.spec.limits.output_bytes, self._send_signal, self._why_killed)
            self._jobs[number] = job
            try:
                words, _ = await control.ask("spawn", arguments, given, number=number)
                job.pid = int(words[0])
            except BaseException as error:
                self._jobs.pop(number, None)
                job.drop()
                if isinstance(error, OSError):
                    hint = "it may run too many processes already; raise SandboxLimits.processes"
                    raise SandboxError(f"no process can be started: {error.strerror}", hint=hint) from error
                raise
        finally:
            close_all(given)
        return job

    def _spawn_arguments(self, command: Command) -> dict[str, Any]:
        env = {**self._base_env, **self.spec.env, **command.env}
        words = command.words
        for text in [*words, *env, *env.values()]:
            if "\0" in text:
                raise SandboxError("a command and its environment cannot hold a zero byte")
        guarded = [str(path) for path in command.guarded]
        return {"argv": words, "cwd": str(command.cwd), "env": env, "last": command.last, "guarded": guarded}

    async def exec(self, command: Command, *, timeout: float) -> Completed:
        job = await self.start(command)
        try:
            return await job.wait(timeout)
        except BaseException:
            await job.kill()
            raise

    def _send_signal(self, pid: int, number: int) -> None:
        if self._control is not None:
            self._control.tell("signal", {"pid": pid, "signal": int(number)})

    def _why_killed(self) -> str | None:
        return self._killed_for

    # -- files ----------------------------------------------------------------------------------------

    async def write(self, path: str | PurePosixPath, data: bytes, *, mode: int = 0o644) -> None:
        parts = self._file_parts(path)
        await self._with_home(lambda root: files.write_file(root, parts, data, mode))

    async def read(self, path: str | PurePosixPath, *, limit: int = 64 * 1024 * 1024) -> bytes:
        parts = self._file_parts(path)
        return await self._with_home(lambda root: files.read_file(root, parts, limit))

    async def list(self, path: str | PurePosixPath, *, limit: int = 100_000) -> list[Entry]:
        parts = self._parts(path)
        return await self._with_home(lambda root: files.list_folder(root, parts, limit))

    async def pack(self, path: str | PurePosixPath, *, limit: int) -> bytes:
        parts = self._parts(path)
        return await self._with_home(lambda root: files.pack_folder(root, parts, limit))

    async def unpack(self, path: str | PurePosixPath, archive: bytes) -> None:
        parts = self._parts(path)
        await self._with_home(lambda root: files.unpack_folder(root, parts, archive))

    def _parts(self, path: str | PurePosixPath) -> tuple[str, ...]:
        """Below the home. A relative path starts there."""
        given = PurePosixPath(path)
        if ".." in given.parts:
            raise SandboxError(f"{path} leads upwards", hint="give a path without ..")
        for top, below in ((self.home, ()), (HOME, ()), (LOGS, ("logs",))):
            if given.is_relative_to(top):
                return (*below, *given.relative_to(top).parts)
        if given.is_absolute():
            raise SandboxError(f"{path} is not below the home or the logs", hint=f"they are {HOME} and {LOGS}")
        return given.parts

    def _file_parts(self, path: str | PurePosixPath) -> tuple[str, ...]:
        parts = self._parts(path)
        if not parts:
            raise SandboxError(f"{path} is a folder")
        return parts

    async def _with_home(self, act: Callable[[int], ResultT]) -> ResultT:
        if self._home_folder is None:
            raise SandboxError(f"sandbox {self.id} is closed")
        # A descriptor of its own, because the sandbox may be closed while the thread is at work.
        root = os.dup(self._home_folder)

        def in_thread() -> ResultT:
            try:
                with acting_as(self._file_owner):
                    return act(root)
            finally:
                os.close(root)

        return await asyncio.to_thread(in_thread)

    # -- network --------------------------------------------------------------------------------------

    async def expose(self, port: int) -> tuple[socket.socket, int]:
        try:
            words, given = await self._living().ask("listen", {"port": port})
        except OSError as error:
            raise SandboxError(f"port {port} cannot be listened on: {error.strerror}") from error
        return adopted(given[0]), int(words[0])

    async def caller_finder(self) -> CallerFinder | None:
        if self.host_pid is None:
            return None
        given: list[int] = []
        with suppress(OSError):  # a kernel without it: the tables in /proc tell the same, at a price
            _, given = await self._living().ask("diagnose", {})
        finder = CallerFinder(
            self.host_pid,
            socket.socket(fileno=given[0]) if given else None,
            lambda: {job.pid for job in list(self._jobs.values())},
            lambda: acting_as(self._file_owner),
        )
        self._caller_finders.append(finder)
        return finder

    async def dial(self, port: int, *, timeout: float = 10.0) -> socket.socket:
        """As in `Sandbox`. Raises ConnectionRefusedError if nobody listens, TimeoutError if it takes too long."""
        _, given = await self._living().ask("connect", {"port": port}, timeout=timeout)
        connecting = adopted(given[0])
        try:
            async with asyncio.timeout(timeout):
                await connected(connecting)
        except BaseException:
            connecting.close()
            raise
        return connecting

    # -- the end --------------------------------------------------------------------------------------

    async def kill(self) -> None:
        async with self._ending:
            if self._launched is None or self._launched.gone:
                return
            if self._control is not None and self._control.open:
                with suppress(SandboxError, OSError):
                    words, _ = await self._control.ask("usage", {}, timeout=USAGE_TIMEOUT)
                    self._cpu_seconds, self._peak_memory = float(words[0]), int(words[1])
            self._end_processes()
            self.ended()
            if not await wait_gone(self._launched, KILL_DEADLINE):
                raise SandboxError(f"sandbox {self.id} could not be killed", hint=f"look at process {self.host_pid}")

    def _end_processes(self) -> None:
        """Without the socket the supervisor ends by itself; it is killed as well where that ends all the others."""
        if self._control is not None:
            self._control.close()
        if self._launched is not None:
            self._launched.connection.close()

    async def close(self) -> None:
        self._closed = True
        try:
            await self.kill()
        finally:
            if self._home_folder is not None:
                os.close(self._home_folder)
                self._home_folder = None
            for finder in self._caller_finders:
                finder.close()
            if self._launched is not None:
                self._launched.release()
            if self.host_paths:
                await asyncio.to_thread(remove_paths, self.host_paths)

    def usage(self) -> dict[str, Any]:
        return {
            "cpu_seconds": self._cpu_seconds,
            "peak_memory_bytes": self._peak_memory,
            "killed_for": self._killed_for,
        }

    def _living(self) -> Control:
        if self._control is not None and self._control.open:
            return self._control
        if self._killed_for is not None:
            hint = f"raise the limit for {self._killed_for}"
            raise SandboxError(f"sandbox {self.id} was ended: it used too much {self._killed_for}", hint=hint)
        raise SandboxError(f"sandbox {self.id} has ended")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "alive" if self._control and self._control.open else "ended"
        return f"<{type(self).__name__} {self.id} {state}, process {self.host_pid}>"


def chosen_processors(count: int | None, sandbox_id: str) -> list[int] | None:
    """Which processors to use: another choice for another sandbox, so that they do not crowd on the first."""
    available = sorted(os.sched_getaffinity(0))
    if count is None or count >= len(available):
        return None
    first = sum(sandbox_id.encode()) % len(available)
    return [available[(first + place) % len(available)] for place in range(count)]


def sealed(name: str, data: bytes) -> int:
    """A descriptor of an anonymous file with this content, which nobody can change."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        files.write_all(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def adopted(descriptor: int) -> socket.socket:
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    return connection


async def connected(connecting: socket.socket) -> None:
    """Wait until a socket that is on its way has arrived. Raises what became of it instead."""
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(connecting.fileno(), writable.set)
    try:
        await writable.wait()
    finally:
        loop.remove_writer(connecting.fileno())
    failure = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failure:
        raise OSError(failure, os.strerror(failure))


@contextmanager
def acting_as(user: int | None) -> Iterator[None]:
    """In this thread alone, touch files with the rights of `user`, so that they belong to it."""
    if user is None:
        yield
        return
    _libc.setfsgid(user)
    _libc.setfsuid(user)
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())


def write_tests(place: Path, tests: Mapping[str, bytes]) -> None:
    """The files of a verifier, for reading only; `test.sh` can be run."""
    place.mkdir()
    for name, content in tests.items():
        parts = files.inner_parts(name)
        if not parts:
            raise SandboxError(f"{name!r} cannot be the name of a test file")
        path = place.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if path.name == "test.sh" else 0o644)
    for folder, _, _ in os.walk(place):
        os.chmod(folder, 0o755)


def refuse_to_run(backend: str) -> bytes:
    """The program `paddock-run` where no command can have a sandbox of its own: it never runs one without."""
    reason = f"the {backend} sandbox cannot give a command a sandbox of its own; use --sandbox bwrap"
    return f"#!/bin/sh\necho 'paddock-run: {reason}' >&2\nexit 125\n".encode()


def remove_paths(paths: tuple[Path, ...]) -> None:
    for path in paths:
        for folder, _, _ in os.walk(path):
            with suppress(OSError):
                os.chmod(folder, 0o700)
        shutil.rmtree(path, ignore_errors=True)
