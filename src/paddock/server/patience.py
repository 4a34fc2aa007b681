"""Long MCP calls: an answer that takes its time begins as an event stream, so that nobody gives up on a silent line.

Clients and proxies hang up on a connection that says nothing for some minutes. A caller that reads event streams gets
one after `PATIENCE` seconds, with a comment now and then and the answer as its only event. Everybody else, and every
quick call, gets plain JSON.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic
from typing import Any

WHOLE = "paddock.whole"
"""Set in the scope of a request whose answer has headers that matter: it cannot begin before they are known."""
PATIENCE = 15.0
STREAM = b"text/event-stream"


class Patient:
    """The ASGI application `app`, which answers each request with one document."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._silent: dict[Answer, float] = {}
        """When each that has said nothing yet was begun, the oldest first."""
        self._looks_on: asyncio.AbstractEventLoop | None = None
        """The loop that has a timer for `_look`."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        answer = Answer(scope, send, self._silent)
        self._silent[answer] = monotonic()
        if self._looks_on is not asyncio.get_running_loop():
            self._look_later(PATIENCE)
        try:
            await self.app(scope, receive, answer.send)
        finally:
            self._silent.pop(answer, None)
            await answer.end_comments()

    def _look_later(self, seconds: float) -> None:
        self._looks_on = asyncio.get_running_loop()
        self._looks_on.call_later(seconds, self._look)

    def _look(self) -> None:
        """One timer for all: nearly every answer comes long before it."""
        self._looks_on = None
        now = monotonic()
        for answer, began in list(self._silent.items()):
            if now - began < PATIENCE:
                self._look_later(began + PATIENCE - now)
                return
            del self._silent[answer]
            answer.begin_stream()


class Answer:
    """What goes back for one request: as it is given, or inside a stream once that has begun."""

    __slots__ = ("_comments", "_is_stream", "_pieces", "_scope", "_send", "_silent")

    def __init__(self, scope: Any, send: Any, silent: dict[Answer, float]) -> None:
        self._scope = scope
        self._send = send
        self._silent = silent
        self._comments: asyncio.Task[None] | None = None
        self._is_stream = False
        self._pieces: list[bytes] = []

    async def send(self, event: Any) -> None:
        self._silent.pop(self, None)
        await self.end_comments()
        if not self._is_stream:
            await self._send(event)
        elif event["type"] == "http.response.body":
            self._pieces.append(event.get("body", b""))
            if not event.get("more_body", False):
                # JSON without line breaks, so it is one `data` line.
                body = b"event: message\ndata: " + b"".join(self._pieces) + b"\n\n"
                await self._send({"type": "http.response.body", "body": body})

    def begin_stream(self) -> None:
        """Nothing has been said for too long: say that the answer will come, to those who understand it."""
        accepted = b",".join(value for name, value in self._scope["headers"] if name == b"accept")
        if self._scope["method"] == "POST" and STREAM in accepted and not self._scope.get(WHOLE):
            self._comments = asyncio.get_running_loop().create_task(self._comment())

    async def end_comments(self) -> None:
        if self._comments is not None and not self._comments.done():
            self._comments.cancel()
            with suppress(asyncio.CancelledError):
                await self._comments

    async def _comment(self) -> None:
        headers = [(b"content-type", STREAM), (b"cache-control", b"no-store")]
        self._is_stream = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await self._send({"type": "http.response.body", "body": b": here\n\n", "more_body": True})
            await asyncio.sleep(PATIENCE)
