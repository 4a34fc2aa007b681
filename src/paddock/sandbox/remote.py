"""Sandboxes elsewhere: the guest inside is reached over one byte channel.

A backend says how the sandbox is created, how the channel is opened, and how everything is removed. Files, commands,
ports and limits are here. The model is reached over the same channel: the guest forwards a port inside to a socket of
the host, and nothing inside has a route to anywhere.
"""

from __future__ import annotations

import asyncio
import gzip
import logging
import socket
import tarfile
from abc import abstractmethod
from contextlib import nullcontext
from typing import IO, TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.sandbox import syscall_policy
from paddock.sandbox.base import LOGS, TESTS, USER_PROGRAMS, PathMapping, host_folder
from paddock.sandbox.connection import GuestConnection
from paddock.sandbox.guest.entry import HOME, Entry
from paddock.sandbox.guest_sandbox import GuestSandbox, failing_paddock_run, non_blocking_socket, remove_paths
from paddock.sandbox.image_root import DEFAULT_PATH
from paddock.sandbox.transports import ByteChannel, StreamTransport
from paddock.shielded import run_shielded

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path, PurePosixPath

    from paddock.sandbox.base import Mount, SandboxSpec

logger = logging.getLogger(__name__)

KILL_SECONDS = 10.0
FILE_SECONDS = 120.0
BACKLOG = 128
PADDOCK_RUN_FOLDER = HOME / ".paddock" / "bin"
MOUNTS_FOLDER = HOME / ".paddock-mounts"
USER = 1000
COMMAND_OOM_SCORE = 1000
"""The highest: out of memory, the kernel kills a command before the guest."""


class RemoteSandbox(GuestSandbox):
    """Use `open_sandbox` to get one."""

    isolates = True

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self._exposed: dict[int, Path] = {}
        """The Unix socket for each exposed port."""
        self._paths = PathMapping({}, keep=str(MOUNTS_FOLDER))
        self._base_env = {
            "HOME": str(HOME),
            "USER": "user",
            "LOGNAME": "user",
            "LANG": "C.UTF-8",
            "PATH": f"{PADDOCK_RUN_FOLDER}:{DEFAULT_PATH}"
            if spec.readonly_tests
            else f"{DEFAULT_PATH}:{USER_PROGRAMS}",
            "TMPDIR": "/tmp",
        }

    # -- what a backend defines -----------------------------------------------------------------------

    @abstractmethod
    async def connect(self) -> ByteChannel:
        """Create the sandbox and start the guest in it. What was created before a failure is removed by `destroy`."""

    async def upload_content(self, connection: GuestConnection) -> None:
        """Upload tests and mounts, now that the guest runs."""

    @abstractmethod
    async def destroy(self) -> None:
        """Remove the sandbox, if there is one."""

    @classmethod
    @abstractmethod
    def end_orphan(cls, sandbox_id: str) -> bool:
        """Remove what a dead owner left under this id. Returns whether nothing is left. Blocks."""

    def settings(self) -> dict[str, Any]:
        settings = {
            **super().settings(),
            "folders": [str(HOME), str(HOME / "workdir"), str(LOGS), str(LOGS / "verifier")],
            "logs": str(LOGS),
            "user": USER,
            "serves_files": True,
            "no_new_privileges": True,
            "command_oom_score": COMMAND_OOM_SCORE,
            "seccomp_filter": syscall_policy.sandbox_filter() or b"",
        }
        if self.spec.readonly_tests:
            filters = [program for program in (syscall_policy.verifier_filter(),) if program]
            settings["verifier"] = {"is_confined": True, "has_siblings": False, "seccomp_filters": filters}
            settings["links"] = {str(HOME / "tests"): str(TESTS)}
        return settings

    # -- opening --------------------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        for mount in self.spec.mounts:
            if not mount.source.exists():
                raise SandboxError(f"{mount.source} cannot be mounted: it does not exist")
        try:
            async with asyncio.timeout(timeout):
                self._connection = GuestConnection(StreamTransport(await self.connect()), self)
                await self._connection.ask("begin", self.settings(), timeout=timeout)
                await self.upload_content(self._connection)
                if self.spec.readonly_tests:
                    await self.write(
                        PADDOCK_RUN_FOLDER / "paddock-run", failing_paddock_run(self.backend), mode=0o755
                    )
        except TimeoutError:
            await run_shielded(self._abandon())
            raise SandboxError(f"the sandbox did not start within {timeout:g} s") from None
        except BaseException as error:
            await run_shielded(self._abandon())
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox cannot be made: {error}") from error
            raise

    async def _abandon(self) -> None:
        """Close it, but let the caller see the first error."""
        try:
            await self.close()
        except SandboxError as error:
            logger.warning("sandbox %s may be left: %s", self.id, error.message)

    def localize(self, text: str) -> str:
        return self._paths.localize(text)

    def localize_mounts(self, targets: list[str], places: list[str]) -> None:
        """Record where the mounts with these targets really are."""
        mapped = {target: place for target, place in zip(targets, places, strict=True) if target != place}
        self._paths = PathMapping(mapped, keep=str(MOUNTS_FOLDER))

    def handle_event(self, event: list[Any]) -> None:
        """Handle what the guest reports without being asked, such as an accepted connection."""
        if event[0] == "accepted":
            self._join_accepted(event[1], event[2])
        else:
            super().handle_event(event)

    # -- files ----------------------------------------------------------------------------------------

    def _location(self, path: str | PurePosixPath, *, is_file: bool = False) -> dict[str, Any]:
        parts = self._file_parts(path) if is_file else self._parts(path)
        if parts[:1] == ("logs",):
            return {"root": str(LOGS), "parts": list(parts[1:])}
        return {"root": str(HOME), "parts": list(parts)}

    async def write(self, path: str | PurePosixPath, data: bytes, *, mode: int = 0o644) -> None:
        location = self._location(path, is_file=True)
        connection = self._file_connection()
        arguments = {**location, "mode": mode, "upload": await connection.upload(data)}
        await connection.ask("write", arguments, timeout=FILE_SECONDS)

    async def read(self, path: str | PurePosixPath, *, limit: int = 64 * 1024 * 1024) -> bytes:
        return await self._fetch("read", self._location(path, is_file=True), limit)

    async def list(self, path: str | PurePosixPath, *, limit: int = 100_000) -> list[Entry]:
        arguments = {**self._location(path), "limit": limit}
        entries = await self._file_connection().ask("list", arguments, timeout=FILE_SECONDS)
        return [Entry(*entry) for entry in entries]

    async def pack(self, path: str | PurePosixPath, *, limit: int, exclude: Sequence[str] = ()) -> bytes:
        return await self._fetch("pack", {**self._location(path), "exclude": [*exclude]}, limit)

    async def unpack(self, path: str | PurePosixPath, archive: bytes) -> None:
        location = self._location(path)
        connection = self._file_connection()
        arguments = {**location, "upload": await connection.upload(archive)}
        await connection.ask("unpack", arguments, timeout=FILE_SECONDS)

    async def _fetch(self, name: str, location: dict[str, Any], limit: int) -> bytes:
        connection = self._file_connection()
        stream = connection.collect()
        try:
            await connection.ask(name, {**location, "limit": limit, "into": stream.number}, timeout=FILE_SECONDS)
            async with asyncio.timeout(FILE_SECONDS):
                return await stream.read_all()
        except TimeoutError:
            raise SandboxError(f"the sandbox did not send it within {FILE_SECONDS:g} s") from None
        finally:
            connection.forget(stream.number)

    # -- network --------------------------------------------------------------------------------------

    async def expose(self, port: int) -> tuple[socket.socket, int]:
        """As in `Sandbox`: a Unix socket of the host, to which the guest's connections are joined."""
        connection = self._live_connection()
        folder = self._own_folder()
        path = folder / f"port-{len(list(folder.iterdir()))}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            listening.listen(BACKLOG)
            listening.setblocking(False)
            inside: int = (await connection.ask("listen", {"port": port}))["port"]
        except BaseException as error:
            listening.close()
            if isinstance(error, OSError):
                raise SandboxError(f"port {port} cannot be listened on: {error.strerror}") from error
            raise
        self._exposed[inside] = path
        return listening, inside

    def _join_accepted(self, port: int, stream: int) -> None:
        """Must not wait: bytes of the connection may be next in the same buffer. A Unix socket connects at once."""
        connection = self._connection
        if connection is None:
            return
        host_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            host_socket.setblocking(False)
            host_socket.connect(str(self._exposed[port]))
        except (OSError, KeyError):
            host_socket.close()
            connection.drop(stream)
            return
        connection.join(host_socket.detach(), number=stream, is_connection=True)

    def _own_folder(self) -> Path:
        folder = host_folder(self.id)
        if folder not in self.host_paths:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.host_paths = (*self.host_paths, folder)
        return folder

    async def dial(self, port: int, *, timeout: float = 10.0) -> socket.socket:
        connection = self._live_connection()
        near, far = socket.socketpair()
        stream = connection.join(far.detach(), is_connection=True)
        try:
            async with asyncio.timeout(timeout):
                await connection.ask("connect", {"port": port, "stream": stream}, timeout=None)
        except BaseException:
            near.close()
            raise
        return non_blocking_socket(near.detach())

    # -- the end --------------------------------------------------------------------------------------

    async def kill(self) -> None:
        async with self._ending:
            if self._is_over or self._connection is None or not self._connection.is_open:
                return
            self._is_over = True
            self._end_jobs()
            try:
                used = await self._connection.ask("end", {}, timeout=KILL_SECONDS)
            except (SandboxError, OSError):
                # The guest does not answer: the sandbox itself is removed, with all its files.
                await self.destroy()
                return
            self._cpu_seconds, self._peak_memory = used["cpu_seconds"], used["peak_memory_bytes"]

    async def close(self) -> None:
        self._closed = True
        try:
            await self._close_network()
            if self._connection is not None:
                await self._connection.close()
        finally:
            for task in list(self._tasks):
                task.cancel()
            try:
                await self.destroy()
            finally:
                self._is_over = True
                self._end_jobs()
                await asyncio.to_thread(remove_paths, self.host_paths)

    def _file_connection(self) -> GuestConnection:
        """The connection, as long as files can be read over it."""
        if self._closed or self._connection is None or not self._connection.is_open:
            raise SandboxError(f"sandbox {self.id} {'is closed' if self._closed else 'has ended'}")
        return self._connection


def pack_mounts(mounts: tuple[Mount, ...], file: IO[bytes], *, compress: bool) -> None:
    """Write folders and files of the host as one archive: each below its position. Links stay links."""
    target = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) if compress else nullcontext(file)
    with target as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for position, mount in enumerate(mounts):
            archive.add(mount.source.resolve(), arcname=str(position))
    file.seek(0)
