"""A TCP proxy that breaks connections on purpose, at the moment a test asks for."""

import asyncio
import contextlib


class Pair:
    """One client's connection and its other half."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near = near
        self.far = far
        self.shaken = False
        """Whether the WebSocket handshake is over: only what follows is tampered with."""

    def cut(self) -> None:
        self.near.transport.abort()
        self.far.transport.abort()


class Proxy:
    def __init__(self, port: int) -> None:
        self.upstream = port
        self.port = 0
        self.connections = 0
        self.cut_requests = 0
        """How many of the next requests are lost together with their connection."""
        self.cut_answers = 0
        """How many of the next answers are lost together with their connection."""
        self.swallow_answers = False
        self.deaf = False
        """Whether nothing is read of what clients send."""
        self.refuse = False
        self.refuse_after = 1_000_000
        """How many connections are taken before all others are refused."""
        self.hold_answers = 0.0
        """Seconds to gather what the server sends, to deliver it all at once."""
        self._pairs: set[Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Drop every connection now."""
        for pair in list(self._pairs):
            pair.cut()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            if self.refuse or self.connections > self.refuse_after:
                return
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
            pair = Pair(writer, far_writer)
            self._pairs.add(pair)
            try:
                await asyncio.gather(self._up(pair, reader), self._down(pair, far_reader))
            finally:
                self._pairs.discard(pair)
                pair.cut()
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _up(self, pair: Pair, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            if pair.shaken and self.cut_requests:
                self.cut_requests -= 1
                pair.cut()
                return
            pair.far.write(data)
            while self.deaf and not pair.near.is_closing():
                await asyncio.sleep(0.005)
        pair.far.close()

    async def _down(self, pair: Pair, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            if self.hold_answers:
                data += await self._gather(reader, self.hold_answers)
            if not pair.shaken and b"\r\n\r\n" in data:
                pair.shaken = True
                head, mark, data = data.partition(b"\r\n\r\n")
                if not (self.cut_answers or self.swallow_answers):
                    head, mark, data = head + mark + data, b"", b""
                pair.near.write(head + mark)
            if data and pair.shaken and self.cut_answers:
                self.cut_answers -= 1
                pair.cut()
                return
            if not self.swallow_answers:
                pair.near.write(data)
        pair.near.close()

    async def _gather(self, reader: asyncio.StreamReader, seconds: float) -> bytes:
        gathered = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while data := await reader.read(65536):
                    gathered += data
        return gathered
