"""A second guest in a local sandbox, for an owner that needs streams: a command that calls back over a port."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.sandbox.base import Command
from paddock.sandbox.transports import AsyncioChannel, StreamTransport

if TYPE_CHECKING:
    from paddock.sandbox.base import Sandbox

PORT = 49981
PYTHON_OPTIONS = ("-I", "-S", "-c")


async def start_nested_guest(sandbox: Sandbox, program: str, *, timeout: float) -> StreamTransport:
    """The transport to a program from `bundle`, which runs inside until its connection ends."""
    secret = secrets.token_hex(16)
    listening, port = await sandbox.expose(PORT)
    with listening:
        argv = [sandbox.runtime_python or "python3", *PYTHON_OPTIONS, program, "connect", str(port), secret]
        job = await sandbox.start(Command(argv, cwd=sandbox.home, user="root" if sandbox.runtime_python else ""))
        try:
            async with asyncio.timeout(timeout):
                while True:
                    connection, _ = await asyncio.get_running_loop().sock_accept(listening)
                    reader, writer = await asyncio.open_connection(sock=connection)
                    # Where the network is the host's, another process could have connected first.
                    if await reader.readexactly(len(secret)) == secret.encode():
                        return StreamTransport(AsyncioChannel(reader, writer))
                    writer.close()
        except (TimeoutError, asyncio.IncompleteReadError):
            output = job.tail()[-500:].strip()
            raise SandboxError(f"the guest did not start inside: {output or 'without an error message'}") from None
