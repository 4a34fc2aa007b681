"""A steward in a sandbox of this machine: started as a command, it calls back through an exposed port."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.rollouts.sandbox.base import Command
from paddock.rollouts.sandbox.channel import SocketLine

if TYPE_CHECKING:
    from paddock.rollouts.sandbox.base import Sandbox

PORT = 49981
INTERPRETER = ("python3", "-I", "-S", "-c")


async def call_from(sandbox: Sandbox, program: str, *, timeout: float) -> SocketLine:
    """The line to a program from `bundle`, which runs inside until the line ends."""
    word = secrets.token_hex(16)
    listening, port = await sandbox.expose(PORT)
    with listening:
        job = await sandbox.start(Command([*INTERPRETER, program, "connect", str(port), word], cwd=sandbox.home))
        try:
            async with asyncio.timeout(timeout):
                while True:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                    reader, writer = await asyncio.open_connection(sock=connection)
                    # Where the network is the host's, anybody could have come first.
                    if await reader.readexactly(len(word)) == word.encode():
                        return SocketLine(reader, writer)
                    writer.close()
        except (TimeoutError, asyncio.IncompleteReadError):
            said = job.tail()[-500:].strip()
            raise SandboxError(f"the steward did not start inside: {said or 'it said nothing'}") from None
