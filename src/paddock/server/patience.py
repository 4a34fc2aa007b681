"""Long MCP calls: an answer that takes its time begins as an event stream, so that nobody gives up on a silent line.

Clients and proxies hang up on a connection that says nothing for some minutes. A caller that reads event streams gets
one after `PATIENCE` seconds, with a comment now and then and the answer as its only event. Everybody else, and every
quick call, gets plain JSON.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

PATIENCE = 15.0
STREAM = b"text/event-stream"


class Patient:
    """The ASGI application `app`, which answers each request with one document."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = Answer(scope, send)
        timer = asyncio.get_running_loop().call_later(PATIENCE, answer.begin_stream)
        answer.timer = timer
        try:
            await self.app(scope, receive, answer.send)
        finally:
            timer.cancel()
            await answer.end_comments()


class Answer:
    """What goes back for one request: as it is given, or inside a stream once that has begun."""

    __slots__ = ("_comments", "_pieces", "_scope", "_send", "timer")

    def __init__(self, scope: Any, send: Any) -> None:
        self.timer: asyncio.TimerHandle
        self._scope = scope
        self._send = send
        self._comments: asyncio.Task[None] | None = None
        self._pieces: list[bytes] = []

    async def send(self, event: Any) -> None:
        self.timer.cancel()
        if self._comments is None:
            await self._send(event)
            return
        await self.end_comments()
        if event["type"] == "http.response.body":
            self._pieces.append(event.get("body", b""))
            if not event.get("more_body", False):
                # JSON without line breaks, so it is one `data` line.
                body = b"event: message\ndata: " + b"".join(self._pieces) + b"\n\n"
                await self._send({"type": "http.response.body", "body": body})

    def begin_stream(self) -> None:
        """Nothing has been said for too long."""
        accepted = b",".join(value for name, value in self._scope["headers"] if name == b"accept")
        if self._scope["method"] == "POST" and STREAM in accepted:
            self._comments = asyncio.get_running_loop().create_task(self._comment())

    async def end_comments(self) -> None:
        if self._comments is not None and not self._comments.done():
            self._comments.cancel()
            with suppress(asyncio.CancelledError):
                await self._comments

    async def _comment(self) -> None:
        headers = [(b"content-type", STREAM), (b"cache-control", b"no-store")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await self._send({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
            await asyncio.sleep(PATIENCE)
