"""The steward over a plain pipe, as a process of this machine: its line, its streams, its end."""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import SandboxError
from paddock.rollouts.sandbox.bundle import program
from paddock.rollouts.sandbox.channel import Channel
from rollouts.sandbox.places import is_gone

MEGABYTE = 1 << 20
LIMITS = {"memory_bytes": 1 << 40, "cpu_seconds": 1e9, "processes": 1 << 20, "disk_bytes": 1 << 40, "cpus": None}


class PipeLine:
    """A line over the input and output of a child."""

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


class Told:
    """What a steward told by itself."""

    def __init__(self) -> None:
        self.words: list[list[Any]] = []
        self.news = asyncio.Event()
        self.over = asyncio.Event()

    def happened(self, words: list[Any]) -> None:
        self.words.append(words)
        self.news.set()

    def ended(self) -> None:
        self.over.set()

    async def wait_for(self, kind: str) -> list[Any]:
        async with asyncio.timeout(10):
            while True:
                for words in self.words:
                    if words[0] == kind:
                        return words
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def steward(home: Path, *, form: str = "binary") -> AsyncIterator[tuple[Channel, Told, PipeLine]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", "-c", program(), form),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MEGABYTE,
    )
    told = Told()
    line = PipeLine(process, text=form == "text")
    channel = Channel(line, told)
    logs = home / "logs"
    logs.mkdir(exist_ok=True)
    settings = {"home": str(home), "folders": [], "logs": str(logs), "user": None, "seccomp": "", "links": {}}
    try:
        await channel.ask("begin", {**settings, **LIMITS})
        yield channel, told, line
    finally:
        await channel.close()


def run(home: Path, act: Callable[..., Any], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), steward(home, **options) as (channel, told, line):
            await act(channel, told, line)

    asyncio.run(main())


def command(home: Path, script: str, **streams: int) -> dict[str, Any]:
    given = {"cwd": str(home), "env": dict(os.environ), "last": False, "guarded": [], "stdin": 0, **streams}
    return {"argv": ["/bin/sh", "-c", script], **given}


@pytest.mark.parametrize("form", ["binary", "text"])
def test_every_byte_goes_both_ways(tmp_path: Path, form: str) -> None:
    data = os.urandom(3 * MEGABYTE)

    async def act(channel: Channel, told: Told, _: Any) -> None:
        out, err, stdin = channel.hear(), channel.hear(), channel.new_number()
        asked = command(tmp_path, "cat", stdout=out.number, stderr=err.number, stdin=stdin)
        await channel.ask("spawn", asked)
        await channel.write(stdin, data, end=True)
        assert await out.whole() == data
        assert (await told.wait_for("exit"))[2] == "0"

    run(tmp_path, act, form=form)


def test_nothing_is_sent_that_there_is_no_room_for(tmp_path: Path) -> None:
    async def act(channel: Channel, told: Told, _: Any) -> None:
        taken: list[int] = []
        out, err = channel.hear(lambda data: taken.append(len(data))), channel.hear()
        await channel.ask(
            "spawn", command(tmp_path, "head -c 5000000 /dev/zero", stdout=out.number, stderr=err.number)
        )
        await asyncio.sleep(0.3)
        assert sum(taken) == MEGABYTE
        # While one stream is full, others go on.
        small, none = channel.hear(), channel.hear()
        await channel.ask("spawn", command(tmp_path, "echo hi", stdout=small.number, stderr=none.number))
        assert await small.whole() == b"hi\n"
        while sum(taken) < 5_000_000:
            channel.grant(out.number, MEGABYTE)
            await asyncio.sleep(0.02)

    run(tmp_path, act)


def test_a_connection_is_carried_and_its_halves_end_apart(tmp_path: Path) -> None:
    async def act(channel: Channel, told: Told, _: Any) -> None:
        port = (await channel.ask("listen", {"port": 0}))["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        number = (await told.wait_for("accepted"))[2]
        heard = channel.hear()
        assert number >= 1 << 31
        channel._streams[number] = heard  # what `join` does with a descriptor
        writer.write(b"question")
        writer.write_eof()
        assert await heard.whole() == b"question"
        await channel.write(number, b"answer", end=True)
        assert await reader.read() == b"answer"
        writer.close()

    run(tmp_path, act)


def test_errors_come_back_as_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")

    async def act(channel: Channel, told: Told, _: Any) -> None:
        where = {"root": str(tmp_path), "limit": 100}
        with pytest.raises(FileNotFoundError):
            await channel.ask("read", {**where, "parts": ["missing"], "into": 99})
        with pytest.raises(SandboxError, match="link"):
            await channel.ask("read", {**where, "parts": ["link"], "into": 99})
        with pytest.raises(ConnectionRefusedError):
            await channel.ask("connect", {"port": 1, "stream": 98})

    run(tmp_path, act)


def test_everything_ends_with_the_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with steward(tmp_path) as (channel, _, line):
            out, err = channel.hear(), channel.hear()
            script = "setsid sleep 1000 & echo $!; sleep 1000"
            pid = (await channel.ask("spawn", command(tmp_path, script, stdout=out.number, stderr=err.number)))["pid"]
            while not out._kept:
                await asyncio.sleep(0.01)
            other = int(out._kept)
            line.stdin.close()
            assert await asyncio.wait_for(line.process.wait(), 10) == 0
            assert is_gone(pid)
            assert is_gone(other)
            with pytest.raises(SandboxError):
                await channel.ask("usage", {})

    asyncio.run(main())


def test_after_the_end_files_are_still_there_and_nothing_runs(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"kept")

    async def act(channel: Channel, told: Told, _: Any) -> None:
        await channel.ask("end", {})
        heard = channel.hear()
        await channel.ask("read", {"root": str(tmp_path), "parts": ["kept"], "limit": 9, "into": heard.number})
        assert await heard.whole() == b"kept"
        with pytest.raises(SandboxError, match="ended"):
            await channel.ask("spawn", command(tmp_path, "true", stdout=91, stderr=92))
        with pytest.raises(SandboxError, match="ended"):
            await channel.ask("listen", {"port": 0})

    run(tmp_path, act)


def test_who_answers_nonsense_is_not_listened_to() -> None:
    class Nonsense:
        async def receive(self) -> bytes:
            return b"HTTP/1.1 404 Not Found\r\n\r\n"

        async def send(self, data: bytes) -> None:
            await asyncio.sleep(0)

        async def close(self) -> None:
            return None

    async def main() -> None:
        told = Told()
        channel = Channel(Nonsense(), told)
        with pytest.raises(SandboxError, match="ended before it answered"):
            await channel.ask("begin", {}, timeout=5)
        assert told.over.is_set()
        await channel.close()

    asyncio.run(main())


def test_a_line_that_does_not_close_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paddock.rollouts.sandbox.channel.CLOSE_TIMEOUT", 0.05)
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
        told = Told()
        channel = Channel(Stubborn(), told)
        await asyncio.sleep(0)
        try:
            closing = asyncio.ensure_future(channel.close())
            done, _ = await asyncio.wait([closing], timeout=5)
            assert done == {closing}
            assert told.over.is_set()
        finally:
            released.set()

    asyncio.run(main())
