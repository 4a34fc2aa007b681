"""The guest over a plain pipe, as a process of this machine: its connection, its streams, its end."""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import SandboxError
from paddock.limits import SandboxLimits
from paddock.sandbox.bundle import remote_program
from paddock.sandbox.connection import GuestConnection
from paddock.sandbox.transports import StreamTransport
from sandbox.places import is_gone

MEGABYTE = 1 << 20
LIMITS = asdict(SandboxLimits(memory_bytes=1 << 40, cpu_seconds=1e9, processes=1 << 20, disk_bytes=1 << 40))


class PipeChannel:
    """The input and output of a child."""

    def __init__(self, process: asyncio.subprocess.Process, *, text: bool) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.text = process, text
        self.stdin, self.stdout = process.stdin, process.stdout

    async def receive(self) -> bytes:
        if not self.text:
            return await self.stdout.read(65536)
        return base64.b64decode(await self.stdout.readline())

    async def send(self, data: bytes) -> None:
        self.stdin.write(data)
        await self.stdin.drain()

    async def close(self) -> None:
        self.stdin.close()
        await asyncio.wait_for(self.process.wait(), 10)


class Listener:
    """Collects the events of a guest."""

    def __init__(self) -> None:
        self.events: list[list[Any]] = []
        self.news = asyncio.Event()
        self.has_ended = asyncio.Event()

    def handle_event(self, event: list[Any]) -> None:
        self.events.append(event)
        self.news.set()

    def handle_end(self) -> None:
        self.has_ended.set()

    def handle_late_result(self, name: str, result: Any) -> None:
        self.events.append(["late", name, result])

    async def wait_for(self, kind: str) -> list[Any]:
        async with asyncio.timeout(10):
            while True:
                for event in self.events:
                    if event[0] == kind:
                        return event
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def started_guest(
    home: Path, *, form: str = "pipe"
) -> AsyncIterator[tuple[GuestConnection, Listener, PipeChannel]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", remote_program(), form),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MEGABYTE,
    )
    listener = Listener()
    channel = PipeChannel(process, text=form == "text")
    connection = GuestConnection(StreamTransport(channel), listener)
    logs = home / "logs"
    logs.mkdir(exist_ok=True)
    settings = {"home": str(home), "folders": [], "logs": str(logs), "limits": LIMITS, "serves_files": True}
    try:
        await connection.ask("begin", settings)
        yield connection, listener, channel
    finally:
        await connection.close()


def run(home: Path, act: Callable[..., Any], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), started_guest(home, **options) as (connection, listener, channel):
            await act(connection, listener, channel)

    asyncio.run(main())


def command(home: Path, script: str, **streams: int) -> dict[str, Any]:
    numbers = [streams.get("stdin", 0), streams["stdout"], streams["stderr"]]
    return {"argv": ["/bin/sh", "-c", script], "cwd": str(home), "env": dict(os.environ), "streams": numbers}


@pytest.mark.parametrize("form", ["pipe", "text"])
def test_every_byte_goes_both_ways(tmp_path: Path, form: str) -> None:
    data = os.urandom(3 * MEGABYTE)

    async def act(connection: GuestConnection, listener: Listener, _: Any) -> None:
        out, err, stdin = connection.collect(), connection.collect(), connection.new_number()
        arguments = command(tmp_path, "cat", stdout=out.number, stderr=err.number, stdin=stdin)
        await connection.ask("spawn", arguments)
        await connection.write(stdin, data, end=True)
        assert await out.read_all() == data
        assert (await listener.wait_for("exit"))[2] == 0

    run(tmp_path, act, form=form)


def test_nothing_is_sent_without_credit(tmp_path: Path) -> None:
    async def act(connection: GuestConnection, listener: Listener, _: Any) -> None:
        taken: list[int] = []
        out, err = connection.collect(lambda data: taken.append(len(data))), connection.collect()
        await connection.ask(
            "spawn", command(tmp_path, "head -c 5000000 /dev/zero", stdout=out.number, stderr=err.number)
        )
        await asyncio.sleep(0.3)
        assert sum(taken) == MEGABYTE
        # While one stream is full, others go on.
        small, none = connection.collect(), connection.collect()
        await connection.ask("spawn", command(tmp_path, "echo hi", stdout=small.number, stderr=none.number))
        assert await small.read_all() == b"hi\n"
        while sum(taken) < 5_000_000:
            connection.grant(out.number, MEGABYTE)
            await asyncio.sleep(0.02)

    run(tmp_path, act)


def test_a_connection_is_forwarded_and_its_halves_end_apart(tmp_path: Path) -> None:
    async def act(connection: GuestConnection, listener: Listener, _: Any) -> None:
        port = (await connection.ask("listen", {"port": 0}))["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        number = (await listener.wait_for("accepted"))[2]
        stream = connection.collect()
        assert number >= 1 << 31
        connection._streams[number] = stream  # what `join` does with a descriptor
        writer.write(b"question")
        writer.write_eof()
        assert await stream.read_all() == b"question"
        await connection.write(number, b"answer", end=True)
        assert await reader.read() == b"answer"
        writer.close()

    run(tmp_path, act)


def test_errors_come_back_as_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")

    async def act(connection: GuestConnection, listener: Listener, _: Any) -> None:
        where = {"root": str(tmp_path), "limit": 100}
        with pytest.raises(FileNotFoundError):
            await connection.ask("read", {**where, "parts": ["missing"], "into": 99})
        with pytest.raises(SandboxError, match="link"):
            await connection.ask("read", {**where, "parts": ["link"], "into": 99})
        with pytest.raises(ConnectionRefusedError):
            await connection.ask("connect", {"port": 1, "stream": 98})

    run(tmp_path, act)


def test_everything_ends_with_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with started_guest(tmp_path) as (connection, _, channel):
            out, err = connection.collect(), connection.collect()
            script = "setsid sleep 1000 & echo $!; sleep 1000"
            pid = (await connection.ask("spawn", command(tmp_path, script, stdout=out.number, stderr=err.number)))[
                "pid"
            ]
            while not out._content:
                await asyncio.sleep(0.01)
            other = int(out._content)
            channel.stdin.close()
            assert await asyncio.wait_for(channel.process.wait(), 10) == 0
            assert is_gone(pid)
            assert is_gone(other)
            with pytest.raises(SandboxError):
                await connection.ask("usage", {})

    asyncio.run(main())


def test_after_the_end_files_are_still_there_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"kept")

    async def act(connection: GuestConnection, listener: Listener, _: Any) -> None:
        await connection.ask("end", {})
        stream = connection.collect()
        await connection.ask("read", {"root": str(tmp_path), "parts": ["kept"], "limit": 9, "into": stream.number})
        assert await stream.read_all() == b"kept"
        with pytest.raises(SandboxError, match="ended"):
            await connection.ask("spawn", command(tmp_path, "true", stdout=91, stderr=92))
        with pytest.raises(SandboxError, match="ended"):
            await connection.ask("listen", {"port": 0})

    run(tmp_path, act)


def test_a_peer_that_is_no_guest_ends_the_connection() -> None:
    class Nonsense:
        async def receive(self) -> bytes:
            return b"HTTP/1.1 404 Not Found\r\n\r\n"

        async def send(self, data: bytes) -> None:
            await asyncio.sleep(0)

        async def close(self) -> None:
            return None

    async def main() -> None:
        listener = Listener()
        connection = GuestConnection(StreamTransport(Nonsense()), listener)
        with pytest.raises(SandboxError, match="ended before it answered"):
            await connection.ask("begin", {}, timeout=5)
        assert listener.has_ended.is_set()
        await connection.close()

    asyncio.run(main())


def test_a_channel_that_does_not_close_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.sandbox.transports.CLOSE_SECONDS", 0.05)
    released = asyncio.Event()

    class Stubborn:
        async def receive(self) -> bytes:
            return await asyncio.Future()

        async def send(self, data: bytes) -> None:
            return None

        async def close(self) -> None:
            while not released.is_set():  # as a library that does not heed cancellation
                with suppress(asyncio.CancelledError):
                    await released.wait()

    async def main() -> None:
        listener = Listener()
        connection = GuestConnection(StreamTransport(Stubborn()), listener)
        await asyncio.sleep(0)
        try:
            closing = asyncio.ensure_future(connection.close())
            done, _ = await asyncio.wait([closing], timeout=5)
            assert done == {closing}
            assert listener.has_ended.is_set()
        finally:
            released.set()

    asyncio.run(main())
