"""Keep-alive for long MCP calls: a response that takes its time begins as an event stream.

Clients and proxies close a connection that is silent for some minutes. A caller that accepts event streams gets one
after `SILENT_SECONDS`, with a comment now and then and the response as its only event. Everybody else, and every
quick call, gets plain JSON. Knows nothing of MCP itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from time import monotonic
from typing import Any

from paddock.protocol.sse import KEEP_ALIVE, MEDIA_TYPE, write_event

PLAIN_RESPONSE = "paddock.whole"
"""Set in the scope of a request whose response headers matter: it cannot begin before they are known."""
SILENT_SECONDS = 15.0
EVENT_STREAM = MEDIA_TYPE.encode()


class SseKeepAlive:
    """The ASGI application `app`, which answers each request with one document."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self._silent: dict[KeptAliveResponse, float] = {}
        """When each response that has not begun yet was requested, the oldest first."""
        self._timer_loop: asyncio.AbstractEventLoop | None = None
        """The loop that has a timer for `_check`."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        response = KeptAliveResponse(scope, send, self._silent)
        self._silent[response] = monotonic()
        if self._timer_loop is not asyncio.get_running_loop():
            self._check_later(SILENT_SECONDS)
        try:
            await self.app(scope, receive, response.send)
        finally:
            self._silent.pop(response, None)
            await response.end_comments()

    def _check_later(self, seconds: float) -> None:
        self._timer_loop = asyncio.get_running_loop()
        self._timer_loop.call_later(seconds, self._check)

    def _check(self) -> None:
        """One timer for all requests: nearly every response comes long before it."""
        self._timer_loop = None
        now = monotonic()
        for response, began in list(self._silent.items()):
            if now - began < SILENT_SECONDS:
                self._check_later(began + SILENT_SECONDS - now)
                return
            del self._silent[response]
            response.begin_stream()


class KeptAliveResponse:
    """The response to one request: as the application sends it, or inside a stream once that has begun."""

    __slots__ = ("_comments", "_is_stream", "_pieces", "_scope", "_send", "_silent")

    def __init__(self, scope: Any, send: Any, silent: dict[KeptAliveResponse, float]) -> None:
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
                body = write_event(b"".join(self._pieces), "message")
                await self._send({"type": "http.response.body", "body": body})

    def begin_stream(self) -> None:
        """Nothing was sent for too long: begin a stream, if the client accepts one."""
        accepted = b",".join(value for name, value in self._scope["headers"] if name == b"accept")
        if self._scope["method"] == "POST" and EVENT_STREAM in accepted and not self._scope.get(PLAIN_RESPONSE):
            self._comments = asyncio.get_running_loop().create_task(self._comment())

    async def end_comments(self) -> None:
        if self._comments is not None and not self._comments.done():
            self._comments.cancel()
            with suppress(asyncio.CancelledError):
                await self._comments

    async def _comment(self) -> None:
        headers = [(b"content-type", EVENT_STREAM), (b"cache-control", b"no-store")]
        self._is_stream = True
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            await asyncio.sleep(SILENT_SECONDS)
