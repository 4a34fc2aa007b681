"""The fallback without isolation: plain processes of the host in a temporary folder.

They have all rights of the user who runs Paddock: they can read its files and use its network. The limits are only
watched. The standard paths are somewhere else: `localize` maps them, and commands are rewritten to match.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.processes import SANDBOX_VARIABLE, end_marked_processes
from paddock.sandbox.base import LOGS, TESTS, USER_PROGRAMS, Command, PathMapping, host_folder
from paddock.sandbox.guest.entry import HOME
from paddock.sandbox.guest_sandbox import failing_paddock_run, write_tests
from paddock.sandbox.local import GuestProcess, LocalSandbox, launch_guest, wait_connected

if TYPE_CHECKING:
    from paddock.sandbox.base import SandboxSpec

logger = logging.getLogger(__name__)

INHERITED_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")


class ProcessSandbox(LocalSandbox):
    backend = "process"
    isolates = False

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self._folder = host_folder(sandbox_id)
        places = {str(mount.target): str(mount.source) for mount in spec.mounts}
        places |= {
            str(HOME): str(self.home),
            str(LOGS): str(self.home / "logs"),
            str(TESTS): str(self._folder / "tests"),
        }
        self._paths = PathMapping(places, keep=str(self._folder))

    @property
    def home(self) -> PurePosixPath:
        return PurePosixPath(self._folder / "home")

    def localize(self, text: str) -> str:
        return self._paths.localize(text)

    def _localized(self, content: bytes) -> bytes:
        """A text file with the standard paths in it replaced; any other file as it is."""
        try:
            return self.localize(content.decode()).encode()
        except UnicodeDecodeError:
            return content

    def prepare(self) -> None:
        logger.warning("sandbox %s does not isolate: its processes have all rights of this one", self.id)
        self._folder.mkdir(mode=0o700)
        self.host_paths = (self._folder,)
        (self._folder / "tmp").mkdir()
        if self.spec.readonly_tests:
            tests = {name: self._localized(content) for name, content in self.spec.readonly_tests.items()}
            write_tests(self._folder / "tests", tests)
            (self._folder / "bin").mkdir()
            (self._folder / "bin" / "paddock-run").write_bytes(failing_paddock_run(self.backend))
            (self._folder / "bin" / "paddock-run").chmod(0o755)
            Path(self.home).mkdir()
            Path(self.home, "tests").symlink_to(self._folder / "tests")
        self._base_env = {
            **{name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ},
            "HOME": str(self.home),
            "USER": "user",
            "LOGNAME": "user",
            "TMPDIR": str(self._folder / "tmp"),
            "PADDOCK_HOME": str(self.home),
            "PADDOCK_LOGS": str(self.home / "logs"),
            "PADDOCK_TESTS": str(self._folder / "tests"),
            SANDBOX_VARIABLE: self.id,
        }
        if self.spec.readonly_tests:
            self._base_env["PATH"] = f"{self._folder / 'bin'}:{self._base_env.get('PATH', os.defpath)}"
        else:
            self._base_env["PATH"] = f"{self._base_env.get('PATH', os.defpath)}:{self.localize(str(USER_PROGRAMS))}"

    def settings(self) -> dict[str, Any]:
        settings = {**super().settings(), "disk_check": "usage", "disk_path": str(self._folder)}
        if self.spec.readonly_tests:
            settings["verifier"] = {"is_confined": False, "has_siblings": False}
        return settings

    async def launch(self) -> GuestProcess:
        return await launch_guest((), sys.executable, env={})

    def _spawn_arguments(self, command: Command) -> dict[str, Any]:
        arguments = super()._spawn_arguments(command)
        arguments["env"][SANDBOX_VARIABLE] = self.id
        return arguments

    async def expose(self, port: int) -> tuple[socket.socket, int]:
        """The requested port if it is free on this machine, otherwise another."""
        self._live_connection()
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind(("127.0.0.1", port))
            except OSError:
                listening.bind(("127.0.0.1", 0))
            listening.listen(128)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
        return listening, listening.getsockname()[1]

    async def dial(self, port: int, *, timeout: float = 10.0) -> socket.socket:
        self._live_connection()
        connecting = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        connecting.setblocking(False)
        connecting.connect_ex(("127.0.0.1", port))
        return await wait_connected(connecting, timeout)

    async def kill(self) -> None:
        try:
            await super().kill()
        finally:
            # Normally the guest leaves no process. If it was killed itself, the environment of the others names us.
            if self._process is not None and self._process.process.returncode != 0:
                await asyncio.to_thread(end_marked_processes, self.id)
