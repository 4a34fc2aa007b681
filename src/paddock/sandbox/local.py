"""Sandboxes whose guest is a process of this machine: descriptors are handed over, files are read directly.

A backend says how the guest is launched (`prepare`, `launch`); everything else is here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from abc import abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.processes import KILL_SECONDS, process_start_time
from paddock.sandbox.bundle import local_program
from paddock.sandbox.connection import GuestConnection
from paddock.sandbox.file_actions import FileAction
from paddock.sandbox.guest import files
from paddock.sandbox.guest.entry import HOME, Entry
from paddock.sandbox.guest.transports import close_descriptors
from paddock.sandbox.guest_sandbox import GuestSandbox, non_blocking_socket, remove_paths, sealed_file
from paddock.sandbox.socket_owners import SocketOwnerFinder
from paddock.sandbox.transports import LocalTransport
from paddock.shielded import run_shielded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import PurePosixPath

    from paddock.sandbox.base import ResultT, SandboxSpec

STDERR_BYTES = 16384
STDERR_SECONDS = 1.0
USAGE_SECONDS = 0.5
OOM_SCORE = 500
"""Where the memory of the host runs out, sandboxes are killed before other processes."""


class LocalSandbox(GuestSandbox):
    """Use `open_sandbox` to get one."""

    supports_snapshots = True

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self._process: GuestProcess | None = None
        self._home_folder: int | None = None
        self._owner_finders: list[SocketOwnerFinder] = []
        self._keeps_rights = False
        """Whether root opens files of every user inside."""
        self._folder_top: str | None = str(HOME)
        """The path inside of the open folder; None where links may lead anywhere."""

    # -- opening --------------------------------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Make what the sandbox needs on the host. Runs in a thread; failures are cleaned up by `close`."""

    @abstractmethod
    async def launch(self) -> GuestProcess:
        """Start the guest as a process of this machine, and return it with its socket. Raises SandboxError."""

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "oom_score": OOM_SCORE}

    def describe_start_failure(self, stderr: str) -> SandboxError:
        """The error for a guest that ended before it answered, from what it printed."""
        return SandboxError(f"the {self.backend} sandbox did not start: {stderr or 'without an error message'}")

    async def open(self, timeout: float) -> None:
        preparing = asyncio.ensure_future(asyncio.to_thread(self.prepare))
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(preparing)
                self._process = await self.launch()
                self._connection = GuestConnection(LocalTransport(self._process.socket), self)
                try:
                    reply = await self._connection.call("begin", self.settings(), timeout=timeout)
                except (OSError, SandboxError) as error:
                    if isinstance(error, OSError) and error.filename:
                        raise SandboxError(
                            f"the sandbox cannot have a folder {error.filename}: {error.strerror}",
                            hint="if the image has a file or a broken link there, remove it",
                        ) from error
                    raise self.describe_start_failure(await self._process.read_stderr()) from error
                self._home_folder = reply.descriptors[0]
                self.host_pid = self._process.find_guest_pid()
                self.host_start_time = process_start_time(self.host_pid)
        except TimeoutError:
            await run_shielded(self._abandon(preparing))
            raise SandboxError(f"the sandbox did not start within {timeout:g} s") from None
        except BaseException as error:
            await run_shielded(self._abandon(preparing))
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox cannot be made: {error}") from error
            raise

    async def _abandon(self, preparing: asyncio.Future[None]) -> None:
        # A thread cannot be stopped: it must have made everything before that is removed.
        await asyncio.wait([preparing])
        await self.close()

    # -- files ----------------------------------------------------------------------------------------

    async def write(self, path: str | PurePosixPath, data: bytes, *, mode: int = 0o644) -> None:
        await self._perform(FileAction("write", self._file_parts(path), mode=mode), data)

    async def read(self, path: str | PurePosixPath, *, limit: int = 64 * 1024 * 1024) -> bytes:
        return await self._perform(FileAction("read", self._file_parts(path), limit))

    async def list(self, path: str | PurePosixPath, *, limit: int = 100_000) -> list[Entry]:
        entries = await self._perform(FileAction("list", self._parts(path), limit))
        return [Entry(*fields) for fields in json.loads(entries)]

    async def pack(self, path: str | PurePosixPath, *, limit: int, exclude: Sequence[str] = ()) -> bytes:
        return await self._perform(FileAction("pack", self._parts(path), limit, tuple(exclude)))

    async def unpack(self, path: str | PurePosixPath, archive: bytes) -> None:
        await self._perform(FileAction("unpack", self._parts(path), top=self._folder_top), archive)

    async def _perform(self, action: FileAction, data: bytes = b"") -> bytes:
        return await self._with_root(lambda root: self._perform_blocking(action, root, data))

    async def with_folder(self, path: str | PurePosixPath, work: Callable[[int], ResultT]) -> ResultT:
        parts = self._parts(path)

        def enter(root: int) -> ResultT:
            with (
                files.acting_as(self._file_owner, keeps_rights=self._keeps_rights),
                files.reported_errors(parts),
                files.entered(root, self._resolve(root, parts)) as folder,
            ):
                return work(folder)

        return await self._with_root(enter)

    def _resolve(self, root: int, parts: Sequence[str]) -> Sequence[str]:
        """The parts of a path to a folder without links, where they may be followed."""
        return parts

    async def _with_root(self, work: Callable[[int], ResultT]) -> ResultT:
        """What `work` returns on a thread for a descriptor of the open folder."""
        if self._home_folder is None:
            raise SandboxError(f"sandbox {self.id} is closed")
        # A descriptor of its own, because the sandbox may be closed while the thread is at work.
        root = os.dup(self._home_folder)

        def in_thread() -> ResultT:
            try:
                return work(root)
            finally:
                os.close(root)

        return await asyncio.to_thread(in_thread)

    def _perform_blocking(self, action: FileAction, root: int, data: bytes) -> bytes:
        with files.acting_as(self._file_owner, keeps_rights=self._keeps_rights):
            return action.perform(root, data)

    # -- network --------------------------------------------------------------------------------------

    async def expose(self, port: int) -> tuple[socket.socket, int]:
        try:
            reply = await self._live_connection().call("listen", {"port": port})
        except OSError as error:
            raise SandboxError(f"port {port} cannot be listened on: {error.strerror}") from error
        return non_blocking_socket(reply.descriptors[0]), reply.result["port"]

    async def dial(self, port: int, *, timeout: float = 10.0) -> socket.socket:
        """As in `Sandbox`. Raises ConnectionRefusedError if nobody listens, TimeoutError if it takes too long."""
        reply = await self._live_connection().call("connect", {"port": port}, timeout=timeout)
        return await wait_connected(non_blocking_socket(reply.descriptors[0]), timeout)

    async def socket_owner_finder(self) -> SocketOwnerFinder | None:
        if self.host_pid is None:
            return None
        diagnosis: socket.socket | None = None
        with suppress(OSError):  # a kernel without it: the tables in /proc are slower, but complete
            reply = await self._live_connection().call("diagnose", {})
            diagnosis = socket.socket(fileno=reply.descriptors[0])
        finder = SocketOwnerFinder(
            self.host_pid,
            diagnosis,
            lambda: {job.pid for job in list(self._jobs.values())},
            self._acting_as_agent,
        )
        self._owner_finders.append(finder)
        return finder

    def _acting_as_agent(self) -> AbstractContextManager[None]:
        """The rights with which the processes of the agent's program can be looked at."""
        return files.acting_as(self._file_owner)

    # -- the end --------------------------------------------------------------------------------------

    async def kill(self) -> None:
        async with self._ending:
            if self._process is None or self._process.has_ended:
                return
            if self._connection is not None and self._connection.is_open:
                with suppress(SandboxError, OSError):
                    used = await self._connection.ask("usage", {}, timeout=USAGE_SECONDS)
                    self._cpu_seconds, self._peak_memory = used["cpu_seconds"], used["peak_memory_bytes"]
            self._end_processes()
            self._end_jobs()
            if not await self._process.wait_ended(KILL_SECONDS):
                raise SandboxError(f"sandbox {self.id} could not be killed", hint=f"look at process {self.host_pid}")

    def _end_processes(self) -> None:
        """The guest ends everything when its connection ends."""
        if self._connection is not None:
            self._connection.end()
        if self._process is not None:
            self._process.socket.close()

    async def close(self) -> None:
        self._closed = True
        try:
            await self._close_network()
            await self.kill()
        finally:
            if self._home_folder is not None:
                os.close(self._home_folder)
                self._home_folder = None
            for finder in self._owner_finders:
                finder.close()
            if self._process is not None:
                self._process.release()
            if self.host_paths:
                await asyncio.to_thread(remove_paths, self.host_paths)


@dataclass(slots=True)
class GuestProcess:
    """A started guest, perhaps behind another process that waits for it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket
    stderr: int | None
    """Where the guest, and the program that started it, write errors."""
    bwrap_info: int | None = None
    """The file in which bubblewrap writes the pid of the guest."""
    pidfd: int | None = None
    """The guest's pidfd, if everything inside ends with the guest."""

    def find_guest_pid(self) -> int:
        """The guest's pid on the host."""
        if self.bwrap_info is None:
            return self.process.pid
        pid = int(json.loads(os.pread(self.bwrap_info, 4096, 0))["child-pid"])
        self.pidfd = os.pidfd_open(pid)
        return pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    def kill(self) -> None:
        """Kill the guest if it is process 1, or bubblewrap if there is no guest yet."""
        if self.pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        elif self.bwrap_info is not None:
            kill_group(self.process)

    async def wait_ended(self, seconds: float) -> bool:
        """Whether the process ended, and with it all it waits for, within `seconds`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        pause = 0.001
        while not self.has_ended:
            if loop.time() > deadline:
                kill_group(self.process)
                return False
            await asyncio.sleep(pause)
            pause = min(0.02, pause * 1.5)
        return True

    async def read_stderr(self) -> str:
        """What was written to the standard error, once the process has ended."""
        await self.wait_ended(STDERR_SECONDS)
        if self.stderr is None:
            return ""
        os.set_blocking(self.stderr, False)
        with suppress(BlockingIOError):
            return os.read(self.stderr, STDERR_BYTES).decode("utf-8", "replace").strip()
        return ""

    def release(self) -> None:
        """Close the descriptors that belong to the process."""
        close_descriptors([one for one in (self.stderr, self.bwrap_info, self.pidfd) if one is not None])
        self.socket.close()
        self.stderr = self.bwrap_info = self.pidfd = None


async def launch_guest(
    argv: Sequence[str],
    python: str,
    *,
    descriptors: Sequence[int] = (),
    bwrap_info: int | None = None,
    **options: Any,
) -> GuestProcess:
    """Run the guest with the interpreter `python`, behind the command `argv`. The descriptors are closed here.

    The owner can be killed at any moment. Nothing that is started here waits for the owner in a way that its death
    does not end: the guest exits when its socket ends, and bubblewrap writes its information to a file in memory, not
    to a pipe that breaks. That is why bubblewrap is not told to die with its parent: if its outer process is killed
    before it has released the inner one, the inner one waits forever.
    """
    program, bundle = local_program()
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stderr, stderr_inside = os.pipe()
    inherited = [far.detach(), stderr_inside, *descriptors]
    bundle_file, owner = sealed_file("guest", bundle), os.pidfd_open(os.getpid())
    inherited += [bundle_file, owner]
    arguments = [python, "-I", "-S", "-c", program, str(bundle_file), "socket", str(inherited[0]), str(owner)]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*argv, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr_inside,
            pass_fds=[*inherited, *([] if bwrap_info is None else [bwrap_info])],
            start_new_session=True,
            **options,
        )

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return GuestProcess(await asyncio.shield(starting), near, stderr, bwrap_info)
    except BaseException as error:
        await run_shielded(_end_unwanted(starting))
        near.close()
        os.close(stderr)
        if bwrap_info is not None:
            os.close(bwrap_info)
        if isinstance(error, OSError | subprocess.SubprocessError):
            raise SandboxError(f"{[*argv, python][0]} cannot be started: {error}") from error
        raise
    finally:
        close_descriptors(inherited)


async def _end_unwanted(starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """End a process whose caller was cancelled. The thread that starts it cannot be stopped, but is quick."""
    await asyncio.wait([starting])
    if starting.exception() is None:
        process = starting.result()
        kill_group(process)
        process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Also kills bubblewrap's inner process while it waits for the outer one: both are in one group until then."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def wait_connected(connecting: socket.socket, timeout: float) -> socket.socket:
    """Wait until the socket is connected, and return it. Raises OSError or TimeoutError, and closes it then."""
    loop = asyncio.get_running_loop()
    writable = asyncio.Event()
    loop.add_writer(connecting.fileno(), writable.set)
    try:
        try:
            async with asyncio.timeout(timeout):
                await writable.wait()
        finally:
            loop.remove_writer(connecting.fileno())
        failure = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            raise OSError(failure, os.strerror(failure))
    except BaseException:
        connecting.close()
        raise
    return connecting
