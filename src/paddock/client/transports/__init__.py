"""Ways to reach an environment: WebSocket, plain HTTP, or in this process. Each is imported when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.client.reconnect import Reconnect, Timeouts


class Transport(Protocol):
    """Carries requests to one session, in order, and brings the replies back."""

    async def open(self) -> None:
        """Connect. Raises ConnectFailed."""

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        """The reply to a message. Raises a PaddockError for an error frame, a lost episode or a deadline."""
        ...

    async def fetch(self, path: str) -> Any:
        """The JSON behind a GET of the server."""

    async def close(self) -> None:
        """End the session and the connection."""


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How a transport connects to a server."""

    headers: dict[str, str]
    timeouts: Timeouts
    reconnect: Reconnect
    queue_timeout: float | None = None
    """Seconds to queue for a session; None for what the server is set to. Only over WebSocket."""
    on_queue: Callable[[int], None] | None = None
    """Called with the place in the queue. Only over WebSocket."""


def make_transport(kind: str, url: str, options: ConnectOptions) -> Transport:
    """The transport `ws` or `http` to a server. Raises ConfigError."""
    if kind == "http":
        from paddock.client.transports.http import HttpTransport

        return HttpTransport(url, options)
    if kind != "ws":
        raise ConfigError(f"no transport is called {kind!r}", hint="use ws or http")
    from paddock.client.transports.ws import WebSocketTransport

    transport = WebSocketTransport(url, options)
    if not options.reconnect.replay:
        return transport
    from paddock.client.transports.replay import ReplayTransport

    return ReplayTransport(transport)
