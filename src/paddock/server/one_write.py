"""uvicorn's HTTP protocol with bounds: answers leave in one write, and pipelined requests are parsed one by one.

uvicorn sends the head and the body of an answer each by itself, and parses all that it has read, however many
requests that are. Here no further request is parsed while one waits for its turn.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PIECE = 4096
"""So many bytes are parsed at once: no more requests than these hold can wait for their turn on one connection."""


class GatheringTransport:
    """A transport that keeps what is written until the loop's next turn, and then writes it all at once."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.plain = transport
        self._parts: list[bytes] = []
        self.kept = 0
        """How many bytes are kept."""

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self.flush)
        self._parts.append(data)
        self.kept += len(data)

    def flush(self) -> None:
        parts, self._parts, self.kept = self._parts, [], 0
        if parts and not self.plain.is_closing():
            self.plain.write(b"".join(parts))

    def is_closing(self) -> bool:
        return self.plain.is_closing()

    def close(self) -> None:
        self.flush()
        self.plain.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


class PipelineFlow(FlowControl):
    """Does not read on while requests that were parsed wait for their turn."""

    def __init__(self, protocol: OneWriteProtocol, transport: Any) -> None:
        super().__init__(transport)
        self._protocol = protocol

    def resume_reading(self) -> None:
        if not self._protocol.pipeline and not self._protocol.unparsed:
            super().resume_reading()


class OneWriteProtocol(HttpToolsProtocol):
    unparsed = b""
    """What was read and waits until the requests before it are answered."""
    _is_parsing = False
    is_upgraded = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(GatheringTransport(transport))  # type: ignore[arg-type]
        self.flow = PipelineFlow(self, self.transport)

    def data_received(self, data: bytes) -> None:
        if len(data) <= PIECE and not self.unparsed and not self.pipeline:
            super().data_received(data)
        else:
            self.unparsed += data
            self._parse()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.unparsed and not self._is_parsing:
            self.loop.call_soon(self._parse)

    def handle_websocket_upgrade(self) -> None:
        """A WebSocket writes for itself."""
        self.is_upgraded = True
        if isinstance(self.transport, GatheringTransport):
            self.transport.flush()
            self.transport = self.transport.plain
        super().handle_websocket_upgrade()

    def _parse(self) -> None:
        """Parse what was read until a request has to wait for its turn."""
        if self._is_parsing or self.parser is None or self.transport.is_closing():
            return
        data, at = self.unparsed, 0
        self._is_parsing = True
        try:
            while at < len(data) and not (self.pipeline or self.is_upgraded or self.transport.is_closing()):
                super().data_received(data[at : at + PIECE])
                at += PIECE
        finally:
            self._is_parsing = False
        self.unparsed = b"" if self.is_upgraded else data[at:]
        if self.is_upgraded:
            return
        if self.unparsed:
            self.flow.pause_reading()
        elif self.cycle is None or self.cycle.response_complete:
            self.flow.resume_reading()
