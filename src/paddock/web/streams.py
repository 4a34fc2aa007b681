"""Server-sent events: what goes on, told as it happens over one answer that does not end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse

from paddock.web.answers import encode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.responses import Response

STILL_HERE = b": still here\n\n"
"""Means nothing, and keeps a quiet connection from being taken for a dead one."""


def stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, headers={"cache-control": "no-store"}, media_type="text/event-stream")


def event(name: str, document: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode(document) + b"\n\n"
