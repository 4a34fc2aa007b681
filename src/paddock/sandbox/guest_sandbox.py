"""A sandbox with a guest inside: commands, events and the state that all backends share.

`LocalSandbox` adds what a guest on this machine makes possible, `RemoteSandbox` what one elsewhere needs.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
from abc import abstractmethod
from contextlib import suppress
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.sandbox.base import LOGS, Command, Completed, Sandbox, SandboxSpec
from paddock.sandbox.guest import files
from paddock.sandbox.guest.entry import HOME
from paddock.sandbox.guest.transports import close_descriptors
from paddock.sandbox.jobs import CommandJob
from paddock.sandbox.network.sandbox_network import SandboxNetwork
from paddock.sandbox.network.tool_settings import JAVA_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from pathlib import Path

    from paddock.sandbox.connection import GuestConnection
    from paddock.sandbox.images.provider import ImageProvider
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.sandbox.network.policy import NetworkPolicy

logger = logging.getLogger(__name__)

PROCESSES_SECONDS = 60.0
TOO_MANY_HINT = "it may run too many processes already; raise SandboxLimits.processes"


class GuestSandbox(Sandbox):
    """Use `open_sandbox` to get one."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        self.id = sandbox_id
        self.spec = spec
        self.host_pid: int | None = None
        self.host_start_time: int | None = None
        self.host_paths: tuple[Path, ...] = ()
        self._base_env: dict[str, str] = {}
        self._file_owner: int | None = None
        """The user on the host that owns the files inside, if we are root and act for it."""
        self._connection: GuestConnection | None = None
        self._jobs: dict[int, CommandJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._killed_for: str | None = None
        self._cpu_seconds: float | None = None
        self._peak_memory: int | None = None
        self._ending = asyncio.Lock()
        self._is_over = False
        """Whether no command can run any more."""
        self._closed = False
        self._network: SandboxNetwork | None = None
        self._on_connection: Callable[[ConnectionRecord], None] | None = None

    @classmethod
    def class_for(cls, spec: SandboxSpec) -> type[GuestSandbox]:
        """The class that opens such a sandbox. Raises SandboxError if this backend cannot."""
        if spec.image is not None:
            raise SandboxError(f"the {cls.backend} backend cannot open images", hint="use the bwrap backend")
        return cls

    @classmethod
    def image_provider(cls) -> ImageProvider:
        """Where its images come from. Raises SandboxError if it cannot open any."""
        raise SandboxError(f"the {cls.backend} backend cannot open images", hint="use the bwrap backend")

    @abstractmethod
    async def open(self, timeout: float) -> None:
        """Start it. Nothing is left behind when this fails or is cancelled."""

    def settings(self) -> dict[str, Any]:
        """What the guest has to know: the arguments of its request `begin`."""
        home = str(self.home)
        return {
            "home": home,
            "folders": [home, f"{home}/workdir", f"{home}/logs/verifier"],
            "limits": asdict(self.spec.limits),
            # Different for each sandbox, so that those with few processors do not all use the first ones.
            "first_processor": sum(self.id.encode()),
        }

    # -- what the guest reports -----------------------------------------------------------------------

    def handle_event(self, event: list[Any]) -> None:
        kind, *details = event
        if kind == "exit":
            number, code, _, tampered = details
            job = self._jobs.pop(number, None)
            if job is not None:
                job.end(code, tampered=tampered or None)
        elif kind == "mounts_failed":
            logger.warning(
                "sandbox %s: the reward folder is no mount point, paddock-run fails: %s", self.id, details[0]
            )
        elif kind == "limit":
            self._killed_for, self._cpu_seconds, self._peak_memory = details
            self._is_over = True
            self._end_jobs()

    def handle_end(self) -> None:
        self._end_jobs()

    def handle_late_result(self, name: str, result: Any) -> None:
        # Whoever started this command was cancelled: nobody would ever end it.
        if name == "spawn":
            self._send_signal(result["pid"], signal.SIGKILL)

    def _end_jobs(self) -> None:
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.end(None)
        if self._network is not None:
            self._network.proxy.end()

    # -- commands -------------------------------------------------------------------------------------

    async def start(self, command: Command) -> CommandJob:
        connection = self._live_connection()
        arguments = self._spawn_arguments(command)
        number = connection.new_number()
        passed: list[int] = []
        try:
            if command.stdin and connection.passes_descriptors:
                passed.append(sealed_file("stdin", command.stdin))
            (stdout, stdout_inside), (stderr, stderr_inside) = os.pipe(), os.pipe()
            job = CommandJob(
                stdout, stderr, self.spec.limits.output_bytes, self._send_signal, lambda: self._killed_for
            )
            if connection.passes_descriptors:
                passed += [stdout_inside, stderr_inside]
                if self._file_owner is not None:
                    # So that commands can open /dev/stdout and /dev/stderr.
                    os.fchown(stdout_inside, self._file_owner, self._file_owner)
                    os.fchown(stderr_inside, self._file_owner, self._file_owner)
            else:
                stdin = connection.new_number() if command.stdin else 0
                arguments["streams"] = [stdin, connection.join(stdout_inside), connection.join(stderr_inside)]
            self._jobs[number] = job
            try:
                job.pid = (await connection.ask("spawn", arguments, passed, number=number))["pid"]
            except BaseException as error:
                self._jobs.pop(number, None)
                job.discard()
                if isinstance(error, OSError):
                    raise SandboxError(f"no process can be started: {error.strerror}", hint=TOO_MANY_HINT) from error
                raise
        finally:
            close_descriptors(passed)
        if command.stdin and not connection.passes_descriptors:
            self._run_in_background(self._feed(connection, arguments["streams"][0], command.stdin))
        return job

    async def _feed(self, connection: GuestConnection, stream: int, data: bytes) -> None:
        with suppress(SandboxError):
            await connection.write(stream, data, end=True)

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _spawn_arguments(self, command: Command) -> dict[str, Any]:
        network = {} if self._network is None else self._network.env
        env = {**self._base_env, **network, **self.spec.env, **command.env}
        argv = command.words
        for text in [*argv, *env, *env.values()]:
            if "\0" in text:
                raise SandboxError("a command and its environment cannot hold a zero byte")
        if command.user and self.spec.image is None:
            raise SandboxError("a command has a user of its own only in a sandbox on an image", hint="leave out user")
        return {
            "argv": [self.localize(word) for word in argv],
            "cwd": self.localize(str(command.cwd)),
            "env": {name: self.localize(value) for name, value in env.items()},
            "last": command.last,
            "guarded": [self.localize(str(path)) for path in command.guarded],
        }

    async def exec(self, command: Command, *, timeout: float) -> Completed:
        job = await self.start(command)
        try:
            return await job.wait(timeout)
        except BaseException:
            await job.kill()
            raise

    async def list_processes(self) -> Sequence[str]:
        processes: Sequence[str] = await self._live_connection().ask("processes", {}, timeout=PROCESSES_SECONDS)
        return processes

    def _send_signal(self, pid: int, number: int) -> None:
        if self._connection is not None:
            self._connection.notify("signal", {"pid": pid, "signal": int(number)})

    # -- network --------------------------------------------------------------------------------------

    async def set_network(self, policy: NetworkPolicy, *, phase: str = "") -> None:
        if self._network is not None:
            self._network.proxy.switch(policy, phase)
        elif policy.mode != "no-network":
            has_certificates = self.spec.network.mode != "no-network"
            network = await SandboxNetwork.start(self, policy, phase, has_certificates=has_certificates)
            if self.spec.image is None:
                # The system's Python is read-only here, so that pip installs for the user. Debian's pip refuses to.
                network.env["PIP_BREAK_SYSTEM_PACKAGES"] = "1"
            for name in set(JAVA_OPTIONS) & set(self._base_env):
                network.env[name] += f" {self._base_env[name]}"
            network.proxy.log.on_end = self._on_connection
            self._network = network

    @property
    def connections(self) -> tuple[ConnectionRecord, ...]:
        return () if self._network is None else self._network.proxy.connections

    def on_connection(self, report: Callable[[ConnectionRecord], None]) -> None:
        self._on_connection = report
        if self._network is not None:
            self._network.proxy.log.on_end = report

    async def _close_network(self) -> None:
        if self._network is not None:
            await self._network.proxy.close()

    # -- paths ----------------------------------------------------------------------------------------

    def _parts(self, path: str | PurePosixPath) -> tuple[str, ...]:
        """The parts of a path below the home. A relative path starts there."""
        parsed = PurePosixPath(path)
        if ".." in parsed.parts:
            raise SandboxError(f"{path} leads upwards", hint="give a path without ..")
        for top, below in ((self.home, ()), (HOME, ()), (LOGS, ("logs",))):
            if parsed.is_relative_to(top):
                return (*below, *parsed.relative_to(top).parts)
        if parsed.is_absolute():
            raise SandboxError(f"{path} is not below the home or the logs", hint=f"they are {HOME} and {LOGS}")
        return parsed.parts

    def _file_parts(self, path: str | PurePosixPath) -> tuple[str, ...]:
        parts = self._parts(path)
        if not parts:
            raise SandboxError(f"{path} is a folder")
        return parts

    # -- state ----------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        return {
            "cpu_seconds": self._cpu_seconds,
            "peak_memory_bytes": self._peak_memory,
            "killed_for": self._killed_for,
        }

    def _live_connection(self) -> GuestConnection:
        """The connection, as long as commands can be run over it."""
        if self._connection is not None and self._connection.is_open and not self._is_over:
            return self._connection
        if self._killed_for is not None:
            hint = f"raise the limit for {self._killed_for}"
            raise SandboxError(f"sandbox {self.id} was ended: it used too much {self._killed_for}", hint=hint)
        raise SandboxError(f"sandbox {self.id} has ended")

    def __repr__(self) -> str:
        is_alive = self._connection is not None and self._connection.is_open and not self._is_over
        state = "closed" if self._closed else "alive" if is_alive else "ended"
        return f"<{type(self).__name__} {self.id} {state}, process {self.host_pid}>"


def sealed_file(name: str, data: bytes) -> int:
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


def non_blocking_socket(descriptor: int) -> socket.socket:
    connection = socket.socket(fileno=descriptor)
    connection.setblocking(False)
    return connection


def write_tests(folder: Path, tests: Mapping[str, bytes]) -> None:
    """The files of a verifier, read-only; `test.sh` is executable."""
    folder.mkdir()
    for name, content in tests.items():
        parts = files.inner_parts(name)
        if not parts:
            raise SandboxError(f"{name!r} cannot be the name of a test file")
        path = folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if path.name == "test.sh" else 0o644)
    for path_text, _, _ in os.walk(folder):
        os.chmod(path_text, 0o755)


def failing_paddock_run(backend: str) -> bytes:
    """The program `paddock-run` where a command cannot get a sandbox of its own: it never runs one without."""
    reason = f"the {backend} sandbox cannot give a command a sandbox of its own; use --sandbox bwrap"
    return f"#!/bin/sh\necho 'paddock-run: {reason}' >&2\nexit 125\n".encode()


def remove_paths(paths: tuple[Path, ...]) -> None:
    """Remove trees, also folders without any rights, such as those that an overlay makes in its work folder."""
    for path in paths:
        # A folder is listed only after its parent was yielded.
        for folder, subfolders, _ in os.walk(path):
            for each in (folder, *(os.path.join(folder, name) for name in subfolders)):
                with suppress(OSError):
                    if not os.path.islink(each):
                        os.chmod(each, 0o700)
        shutil.rmtree(path, ignore_errors=True)
