"""Ports inside, and servers inside, as the host reaches them."""

from __future__ import annotations

import asyncio

from paddock.sandbox.base import Command
from paddock.testing.checks import Wrong, require
from paddock.testing.sandbox.commands import it_runs_a_command
from paddock.testing.sandbox.subject import (
    COMMAND_SECONDS,
    IMMEDIATE_SECONDS,
    SandboxSubject,
    check,
    greet,
)

SERVE = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    peer, _ = server.accept()
    peer.sendall(peer.recv(100).upper())
"""


@check("listen inside and hand the socket out", needs=[it_runs_a_command])
async def the_host_can_be_reached_through_an_exposed_port(subject: SandboxSubject) -> None:
    require(await greet(subject.shared, b"hello") == b"hello", "another greeting came")


@check("a port belongs to one sandbox", needs=[the_host_can_be_reached_through_an_exposed_port])
async def two_sandboxes_use_the_same_port(subject: SandboxSubject) -> None:
    async with subject.another() as other:
        received = await asyncio.gather(greet(subject.shared, b"one"), greet(other, b"two"))
    require(list(received) == [b"one", b"two"], f"got {received}")


@check("connect inside and hand the socket out", needs=[it_runs_a_command])
async def a_server_inside_can_be_dialled(subject: SandboxSubject) -> None:
    job = await subject.shared.start(Command(["python3", "-c", SERVE]))
    port = int(await asyncio.wait_for(anext(job.lines()), COMMAND_SECONDS))
    loop = asyncio.get_running_loop()
    with await subject.shared.dial(port) as peer:
        await loop.sock_sendall(peer, b"abc")
        require(await asyncio.wait_for(loop.sock_recv(peer, 100), IMMEDIATE_SECONDS) == b"ABC", "another answer came")
    await job.wait(IMMEDIATE_SECONDS)
    try:
        (await subject.shared.dial(port)).close()
    except ConnectionRefusedError:
        return
    raise Wrong("a port where nobody listens was connected")
