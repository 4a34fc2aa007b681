"""The fallback without isolation: plain processes of the host in a temporary folder.

They have all rights of whoever runs Paddock: they can read its files and use its network. The limits are only
watched, and the standard paths are somewhere else: `localize` says where, and commands are rewritten to match.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.rollouts.sandbox.base import HOME, LOGS, TESTS, Command, host_folder
from paddock.rollouts.sandbox.launch import Launched, launch, program_text
from paddock.rollouts.sandbox.leftovers import MARK, end_marked
from paddock.rollouts.sandbox.moved import Moved
from paddock.rollouts.sandbox.supervised import SupervisedSandbox, connected, refuse_to_run, write_tests

if TYPE_CHECKING:
    from paddock.rollouts.sandbox.base import SandboxSpec

logger = logging.getLogger(__name__)

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")


class ProcessSandbox(SupervisedSandbox):
    backend = "process"
    isolates = False
    alone = False

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self._place = host_folder(sandbox_id)
        moved = {str(mount.target): str(mount.source) for mount in spec.mounts}
        moved |= {
            str(HOME): str(self.home),
            str(LOGS): str(self.home / "logs"),
            str(TESTS): str(self._place / "tests"),
        }
        self._moved = Moved(moved, keep=str(self._place))

    @property
    def home(self) -> PurePosixPath:
        return PurePosixPath(self._place / "home")

    def localize(self, text: str) -> str:
        return self._moved.localize(text)

    def _localized(self, content: bytes) -> bytes:
        """A file whose text names the standard paths, so that it finds what it names; anything else as it is."""
        try:
            return self.localize(content.decode()).encode()
        except UnicodeDecodeError:
            return content

    def prepare(self) -> None:
        logger.warning("sandbox %s does not isolate: its processes have all rights of this one", self.id)
        self._place.mkdir(mode=0o700)
        self.host_paths = (self._place,)
        (self._place / "tmp").mkdir()
        if self.spec.readonly_tests:
            tests = {name: self._localized(content) for name, content in self.spec.readonly_tests.items()}
            write_tests(self._place / "tests", tests)
            (self._place / "bin").mkdir()
            (self._place / "bin" / "paddock-run").write_bytes(refuse_to_run(self.backend))
            (self._place / "bin" / "paddock-run").chmod(0o755)
            Path(self.home).mkdir()
            Path(self.home, "tests").symlink_to(self._place / "tests")
        self._base_env = {
            **{name: os.environ[name] for name in PASSED_ON if name in os.environ},
            "HOME": str(self.home),
            "USER": "user",
            "LOGNAME": "user",
            "TMPDIR": str(self._place / "tmp"),
            "PADDOCK_HOME": str(self.home),
            "PADDOCK_LOGS": str(self.home / "logs"),
            "PADDOCK_TESTS": str(self._place / "tests"),
            MARK: self.id,
        }
        if self.spec.readonly_tests:
            self._base_env["PATH"] = f"{self._place / 'bin'}:{self._base_env.get('PATH', os.defpath)}"

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "place": str(self._place)}

    async def launch(self) -> Launched:
        argv = [sys.executable, "-I", "-S", "-c", program_text("supervisor")]
        return await launch(argv, descriptors=(), information=None, env={})

    def _spawn_arguments(self, command: Command) -> dict[str, Any]:
        given = super()._spawn_arguments(command)
        return given | {
            "argv": [self.localize(word) for word in given["argv"]],
            "cwd": self.localize(given["cwd"]),
            "guarded": [self.localize(path) for path in given["guarded"]],
            "env": {name: self.localize(value) for name, value in given["env"].items()} | {MARK: self.id},
        }

    async def expose(self, port: int) -> tuple[socket.socket, int]:
        """The port asked for if nobody on this machine has it, otherwise another."""
        self._living()
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
        self._living()
        connecting = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            connecting.connect_ex(("127.0.0.1", port))
            async with asyncio.timeout(timeout):
                await connected(connecting)
        except BaseException:
            connecting.close()
            raise
        return connecting

    async def kill(self) -> None:
        try:
            await super().kill()
        finally:
            # Normally the supervisor leaves nobody. If it was killed itself, what it started still bears our mark.
            if self._launched is not None and self._launched.process.returncode != 0:
                await asyncio.to_thread(end_marked, self.id)
