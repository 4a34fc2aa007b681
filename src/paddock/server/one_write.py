"""HTTP answers in one write: uvicorn sends the head and the body of an answer each by itself."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


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


class OneWriteProtocol(HttpToolsProtocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(GatheringTransport(transport))  # type: ignore[arg-type]

    def handle_websocket_upgrade(self) -> None:
        """A WebSocket writes for itself."""
        if isinstance(self.transport, GatheringTransport):
            self.transport.flush()
            self.transport = self.transport.plain
        super().handle_websocket_upgrade()
