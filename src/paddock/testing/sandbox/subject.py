"""A sandbox backend under test, and what the checks share."""

from __future__ import annotations

import asyncio
import io
import tarfile
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.limits import MEBIBYTE, SandboxLimits
from paddock.sandbox.base import Command, Completed, Sandbox, SandboxSpec
from paddock.testing.checks import Skipped, Suite, Wrong, require

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from paddock.sandbox.images.image import Image

COMMAND_SECONDS = 20.0
IMMEDIATE_SECONDS = 5.0
"""Far more than something immediate needs, even on a busy machine."""
PORT = 7000
SPEC = SandboxSpec(
    SandboxLimits(disk_bytes=64 * MEBIBYTE),
    env={"FROM_SPEC": "yes"},
    readonly_tests={"test.sh": b"#!/bin/sh\necho tested\n", "data/expected.txt": b"42"},
)
GREET = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10) as peer:
    peer.sendall(sys.argv[2].encode())
    print(peer.recv(100).decode())
"""


class SandboxSubject:
    """A backend under test, and one open sandbox of it."""

    def __init__(
        self,
        open_sandbox: Callable[[SandboxSpec], Awaitable[Sandbox]],
        shared: Sandbox,
        image: Image | None = None,
    ) -> None:
        self.open = open_sandbox
        self.shared = shared
        self.image = image
        """One that this backend can open."""

    @asynccontextmanager
    async def another(self, spec: SandboxSpec = SPEC, **limits: float) -> AsyncIterator[Sandbox]:
        sandbox = await self.open(replace(spec, limits=replace(spec.limits, **limits)))  # type: ignore[arg-type]
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def run(self, script: str) -> Completed:
        return await run(self.shared, script)


async def run(sandbox: Sandbox, script: str, timeout: float = COMMAND_SECONDS) -> Completed:
    return await sandbox.exec(Command(script), timeout=timeout)


async def greet(sandbox: Sandbox, word: bytes) -> bytes:
    """What a process inside says to us through an exposed port. It must hear our answer."""
    loop = asyncio.get_running_loop()
    listening, port = await sandbox.expose(PORT)
    with listening:
        job = await sandbox.start(Command(["python3", "-c", GREET, str(port), word.decode()]))
        with (await accept(listening))[0] as peer:
            received = await asyncio.wait_for(loop.sock_recv(peer, 100), IMMEDIATE_SECONDS)
            await loop.sock_sendall(peer, b"welcome")
            done = await job.wait(COMMAND_SECONDS)
    require(done.stdout == b"welcome\n", f"our answer did not arrive: {done}")
    return received


async def accept(listening: socket.socket) -> tuple[socket.socket, object]:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_accept(listening), COMMAND_SECONDS)


def make_file(path: Path, text: str) -> None:
    path.write_text(text)


SANDBOX: Suite[SandboxSubject] = Suite()
"""The checks; each module of this package adds its own."""
check = SANDBOX.check


def archive_of(member: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(member)
    return buffer.getvalue()


def names_in(archive: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        return packed.getnames()


async def refuses(attempt: Awaitable[object], otherwise: str) -> None:
    try:
        await attempt
    except SandboxError:
        return
    raise Wrong(otherwise)


def require_isolation(subject: SandboxSubject) -> None:
    if not subject.shared.isolates:
        raise Skipped("this backend does not isolate")
