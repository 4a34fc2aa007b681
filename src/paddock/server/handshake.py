"""The handshake of a WebSocket: what client and server tell each other in its headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import paddock

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.server.service import Service

VERSION_HEADER = "paddock-version"
SESSION_HEADER = "session-id"
RESUME_HEADER = "session-resume"
QUEUE_HEADER = "queue-timeout"
LEASE_HEADER = "paddock-lease"
DETERMINISTIC_HEADER = "paddock-deterministic"
HOST_HEADER = "paddock-host"
SUBPROTOCOL_HEADER = "sec-websocket-protocol"
MCP = "mcp"


def handshake_headers(service: Service, token: str | None) -> dict[str, str]:
    """The headers that we add to the answer to a handshake."""
    headers = {VERSION_HEADER: paddock.__version__}
    if service.spec.deterministic:
        headers[DETERMINISTIC_HEADER] = "true"
    if service.host is not None:
        headers[HOST_HEADER] = service.host
    return {**headers, SESSION_HEADER: token} if token else headers


@dataclass(frozen=True, slots=True)
class ClientHandshake:
    """What a client sent when it connected."""

    path: str
    session_id: str | None = None
    """`?session_id=`: attach to a session made by `openenv/session/create`."""
    resume: str | None = None
    """`Session-Resume: new` asks for a session that survives a drop, `Session-Resume: TOKEN` returns."""
    queue_timeout: float | None = None
    vector: bool = False
    lease: str | None = None
    """A slot that was taken for this client before it came."""
    subprotocol: str | None = None
    """`mcp`, where a client of `/mcp` offers it and so expects it in the response."""

    @classmethod
    def read(cls, path: str, query: str, header: Callable[[str], str | None]) -> ClientHandshake:
        parameters = parse_qs(query, keep_blank_values=True)
        return cls(
            path=path,
            session_id=(parameters.get("session_id") or [""])[0] or None,
            resume=_printable(header(RESUME_HEADER)),
            queue_timeout=_seconds(header(QUEUE_HEADER)),
            vector="vector" in parameters,
            lease=header(LEASE_HEADER) or (parameters.get("lease") or [""])[0] or None,
            subprotocol=MCP if path.endswith("/mcp") and MCP in _words(header(SUBPROTOCOL_HEADER)) else None,
        )


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",")]


def _printable(text: str | None) -> str | None:
    """A header may hold any byte; a token of ours is plain ASCII, and others are only to be named in an error."""
    return None if text is None else text.encode("ascii", "replace").decode()


def _seconds(text: str | None) -> float | None:
    """A wish in seconds; what is no number is no wish."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None
