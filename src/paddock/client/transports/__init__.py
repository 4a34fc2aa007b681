"""Ways to reach an environment: WebSocket, plain HTTP, or no wire at all."""

from __future__ import annotations

from typing import Any, Protocol


class Transport(Protocol):
    """Carries one request at a time order-preserved to one session and brings its answer back."""

    async def open(self) -> None:
        """Connect. Raises ConnectFailed."""

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        """The reply to a message. Raises a PaddockError for an error frame, a lost episode or a deadline."""
        ...

    async def fetch(self, path: str) -> Any:
        """The JSON behind a GET of the server."""

    async def close(self) -> None: ...
