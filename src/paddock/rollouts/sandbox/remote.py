"""A sandbox that is somewhere else, reached through a steward inside it and one line to it.

A backend says how the place is made, how the line comes about, and how all of it is taken away again. Files,
commands, ports and limits are here. The model is reached over the same line: a port inside leads to a socket of
the host, and nothing inside has a route to anywhere.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import logging
import os
import shutil
import socket
import tarfile
from contextlib import nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.rollouts.sandbox import seccomp
from paddock.rollouts.sandbox.base import HOME, LOGS, TESTS, Command, Entry, host_folder
from paddock.rollouts.sandbox.channel import Channel, Line
from paddock.rollouts.sandbox.jobs import SupervisedJob
from paddock.rollouts.sandbox.moved import Moved
from paddock.rollouts.sandbox.supervised import SupervisedSandbox, adopted, refuse_to_run
from paddock.rollouts.unhurried import unhurried

if TYPE_CHECKING:
    from pathlib import Path, PurePosixPath

    from paddock.rollouts.sandbox.base import Mount, SandboxSpec

logger = logging.getLogger(__name__)

KILL_TIMEOUT = 10.0
FILE_TIMEOUT = 120.0
BACKLOG = 128
RUN_FOLDER = HOME / ".paddock" / "bin"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class RemoteSandbox(SupervisedSandbox):
    """Use `open_sandbox` to get one."""

    isolates = True
    alone = False

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self._channel: Channel | None = None
        self._over = False
        self._exposed: dict[int, Path] = {}
        self._moved = Moved({}, keep=str(HOME / ".paddock-mounts"))
        self._chores: set[asyncio.Task[None]] = set()
        self._base_env = {
            "HOME": str(HOME),
            "USER": "user",
            "LOGNAME": "user",
            "LANG": "C.UTF-8",
            "PATH": f"{RUN_FOLDER}:{SYSTEM_PATH}" if spec.readonly_tests else SYSTEM_PATH,
            "TMPDIR": "/tmp",
        }

    # -- what a backend says --------------------------------------------------------------------------

    async def connect(self) -> Line:
        """Make the place, and start the steward in it. What was made before a failure is removed by `destroy`."""
        raise NotImplementedError

    async def furnish(self, channel: Channel) -> None:
        """Bring in what belongs inside, now that the steward is there."""

    async def destroy(self) -> None:
        """Take the place away, if there is one."""
        raise NotImplementedError

    @classmethod
    def end_leftover(cls, sandbox_id: str) -> bool:
        """Take away what a dead owner left under this id. Returns whether nothing is left. Blocks."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        limits = self.spec.limits
        filters = seccomp.program()
        for_tests = seccomp.program_for_tests() if self.spec.readonly_tests else None
        return {
            "guard": bool(self.spec.readonly_tests),
            "filters": [base64.b64encode(for_tests).decode()] if for_tests else [],
            "home": str(HOME),
            "folders": [str(HOME), str(HOME / "workdir"), str(LOGS), str(LOGS / "verifier")],
            "logs": str(LOGS),
            "user": 1000,
            "seccomp": base64.b64encode(filters or b"").decode(),
            "links": {str(HOME / "tests"): str(TESTS)} if self.spec.readonly_tests else {},
            "memory_bytes": int(limits.memory_bytes),
            "cpu_seconds": float(limits.cpu_seconds),
            "processes": int(limits.processes),
            "disk_bytes": int(limits.disk_bytes),
            "cpus": limits.cpus,
        }

    # -- making ---------------------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        for mount in self.spec.mounts:
            if not mount.source.exists():
                raise SandboxError(f"{mount.source} cannot be mounted: it does not exist")
        try:
            async with asyncio.timeout(timeout):
                self._channel = Channel(await self.connect(), self)
                await self._channel.ask("begin", self.settings(), timeout=timeout)
                await self.furnish(self._channel)
                if self.spec.readonly_tests:
                    await self.write(RUN_FOLDER / "paddock-run", refuse_to_run(self.backend), mode=0o755)
        except TimeoutError:
            await unhurried(self._give_up())
            raise SandboxError(f"the sandbox did not start within {timeout:g} s") from None
        except BaseException as error:
            await unhurried(self._give_up())
            if isinstance(error, OSError):
                raise SandboxError(f"the sandbox cannot be made: {error}") from error
            raise

    async def _give_up(self) -> None:
        """What went wrong first is what the caller hears of."""
        try:
            await self.close()
        except SandboxError as error:
            logger.warning("sandbox %s may be left: %s", self.id, error.message)

    def localize(self, text: str) -> str:
        return self._moved.localize(text)

    def localize_mounts(self, places: list[str]) -> None:
        """Note where the mounts really are."""
        targets = [str(mount.target) for mount in self.spec.mounts]
        moved = {target: place for target, place in zip(targets, places, strict=True) if target != place}
        self._moved = Moved(moved, keep=str(HOME / ".paddock-mounts"))

    # -- told by the steward --------------------------------------------------------------------------

    def happened(self, words: list[Any]) -> None:
        if words[0] == "accepted":
            self._accepted(int(words[1]), int(words[2]))
            return
        super().happened(words)
        if words[0] == "over":
            self._over = True
            self.ended()

    def _keep(self, work: Any) -> None:
        chore = asyncio.ensure_future(work)
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    # -- commands -------------------------------------------------------------------------------------

    async def start(self, command: Command) -> SupervisedJob:
        channel = self._reached()
        arguments = self._spawn_arguments(command)
        number = channel.new_number()
        stdout, stdout_inside = os.pipe()
        stderr, stderr_inside = os.pipe()
        job = SupervisedJob(stdout, stderr, self.spec.limits.output_bytes, self._send_signal, self._why_killed)
        arguments |= {"stdout": channel.join(stdout_inside), "stderr": channel.join(stderr_inside)}
        arguments["stdin"] = channel.new_number() if command.stdin else 0
        self._jobs[number] = job
        try:
            job.pid = (await channel.ask("spawn", arguments, number=number))["pid"]
        except BaseException as error:
            self._jobs.pop(number, None)
            job.drop()
            if isinstance(error, OSError):
                hint = "it may run too many processes already; raise SandboxLimits.processes"
                raise SandboxError(f"no process can be started: {error.strerror}", hint=hint) from error
            raise
        if command.stdin:
            self._keep(self._feed(channel, arguments["stdin"], command.stdin))
        return job

    async def _feed(self, channel: Channel, number: int, data: bytes) -> None:
        with suppress(SandboxError):
            await channel.write(number, data, end=True)

    def _spawn_arguments(self, command: Command) -> dict[str, Any]:
        given = super()._spawn_arguments(command)
        return given | {
            "argv": [self.localize(word) for word in given["argv"]],
            "cwd": self.localize(given["cwd"]),
            "env": {name: self.localize(value) for name, value in given["env"].items()},
        }

    def _send_signal(self, pid: int, number: int) -> None:
        if self._channel is not None:
            self._channel.tell("signal", {"pid": pid, "signal": int(number)})

    # -- files ----------------------------------------------------------------------------------------

    def _rooted(self, path: str | PurePosixPath, *, is_file: bool = False) -> dict[str, Any]:
        parts = self._file_parts(path) if is_file else self._parts(path)
        if parts[:1] == ("logs",):
            return {"root": str(LOGS), "parts": list(parts[1:])}
        return {"root": str(HOME), "parts": list(parts)}

    async def write(self, path: str | PurePosixPath, data: bytes, *, mode: int = 0o644) -> None:
        where = self._rooted(path, is_file=True)
        channel = self._readable()
        await channel.ask("write", {**where, "mode": mode, "content": await channel.post(data)}, timeout=FILE_TIMEOUT)

    async def read(self, path: str | PurePosixPath, *, limit: int = 64 * 1024 * 1024) -> bytes:
        return await self._fetch("read", self._rooted(path, is_file=True), limit)

    async def list(self, path: str | PurePosixPath, *, limit: int = 100_000) -> list[Entry]:
        found = await self._readable().ask("list", {**self._rooted(path), "limit": limit}, timeout=FILE_TIMEOUT)
        return [Entry(*entry) for entry in found]

    async def pack(self, path: str | PurePosixPath, *, limit: int) -> bytes:
        return await self._fetch("pack", self._rooted(path), limit)

    async def unpack(self, path: str | PurePosixPath, archive: bytes) -> None:
        where = self._rooted(path)
        channel = self._readable()
        await channel.ask("unpack", {**where, "content": await channel.post(archive)}, timeout=FILE_TIMEOUT)

    async def _fetch(self, name: str, where: dict[str, Any], limit: int) -> bytes:
        channel = self._readable()
        heard = channel.hear()
        try:
            await channel.ask(name, {**where, "limit": limit, "into": heard.number}, timeout=FILE_TIMEOUT)
            async with asyncio.timeout(FILE_TIMEOUT):
                return await heard.whole()
        except TimeoutError:
            raise SandboxError(f"the sandbox did not send it within {FILE_TIMEOUT:g} s") from None
        finally:
            channel.forget(heard.number)

    # -- network --------------------------------------------------------------------------------------

    async def expose(self, port: int) -> tuple[socket.socket, int]:
        """As in `Sandbox`: a socket of the host's filesystem, to which the steward's connections are led."""
        channel = self._reached()
        folder = self._own_folder()
        place = folder / f"port-{len(list(folder.iterdir()))}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(place))
            listening.listen(BACKLOG)
            listening.setblocking(False)
            inside: int = (await channel.ask("listen", {"port": port}))["port"]
        except BaseException as error:
            listening.close()
            if isinstance(error, OSError):
                raise SandboxError(f"port {port} cannot be listened on: {error.strerror}") from error
            raise
        self._exposed[inside] = place
        return listening, inside

    def _accepted(self, port: int, number: int) -> None:
        """At once, because what is said on the connection is next on the line. Here that never takes time."""
        channel = self._channel
        if channel is None:
            return
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            ours.setblocking(False)
            ours.connect(str(self._exposed[port]))
        except (OSError, KeyError):
            ours.close()
            channel.tell("drop", {"stream": number})
            return
        channel.join(ours.detach(), number=number, both=True)

    def _own_folder(self) -> Path:
        folder = host_folder(self.id)
        if folder not in self.host_paths:
            folder.mkdir(mode=0o700, exist_ok=True)
            self.host_paths = (*self.host_paths, folder)
        return folder

    async def dial(self, port: int, *, timeout: float = 10.0) -> socket.socket:
        channel = self._reached()
        ours, theirs = socket.socketpair()
        number = channel.join(theirs.detach(), both=True)
        try:
            async with asyncio.timeout(timeout):
                await channel.ask("connect", {"port": port, "stream": number}, timeout=None)
        except BaseException:
            ours.close()
            raise
        return adopted(ours.detach())

    # -- the end --------------------------------------------------------------------------------------

    async def kill(self) -> None:
        async with self._ending:
            if self._over or self._channel is None or not self._channel.open:
                return
            self._over = True
            self.ended()
            try:
                used = await self._channel.ask("end", {}, timeout=KILL_TIMEOUT)
            except (SandboxError, OSError):
                # Nothing inside answers: the place itself goes, and what was written in it as well.
                await self.destroy()
                return
            self._cpu_seconds, self._peak_memory = used["cpu_seconds"], used["peak_memory_bytes"]

    async def close(self) -> None:
        self._closed = True
        try:
            if self._channel is not None:
                await self._channel.close()
        finally:
            for chore in list(self._chores):
                chore.cancel()
            try:
                await self.destroy()
            finally:
                self._over = True
                self.ended()
                for path in self.host_paths:
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def _reached(self) -> Channel:
        """The line, as long as commands can be run over it."""
        if self._channel is not None and self._channel.open and not self._over:
            return self._channel
        if self._killed_for is not None:
            hint = f"raise the limit for {self._killed_for}"
            raise SandboxError(f"sandbox {self.id} was ended: it used too much {self._killed_for}", hint=hint)
        raise SandboxError(f"sandbox {self.id} has ended")

    def _readable(self) -> Channel:
        """The line, as long as files can be read over it."""
        if self._closed or self._channel is None or not self._channel.open:
            raise SandboxError(f"sandbox {self.id} {'is closed' if self._closed else 'has ended'}")
        return self._channel

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ended" if self._over else "alive"
        return f"<{type(self).__name__} {self.id} {state}>"


def pack_mounts(mounts: tuple[Mount, ...], file: IO[bytes], *, small: bool) -> None:
    """Write folders and files of the host as one archive: each below its position. Links stay links."""
    packing = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1) if small else nullcontext(file)
    with packing as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for position, mount in enumerate(mounts):
            archive.add(mount.source.resolve(), arcname=str(position))
    file.seek(0)
