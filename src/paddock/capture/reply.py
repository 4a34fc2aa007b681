"""The HTTP response to the agent. The exchange knows only the interface `Reply`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.dialects.base import ReplyWriter
    from paddock.capture.errors import ErrorReply


class AgentDisconnected(Exception):
    """The agent closed its connection."""


class Reply(Protocol):
    """Where the response to an agent is written. Every method raises AgentDisconnected."""

    has_started: bool
    """Whether the agent has received anything, even a comment: the status can no longer be chosen."""

    async def send_events(self, events: bytes) -> None:
        """Write whole events of a stream."""

    async def send_document(self, status: int, document: bytes) -> None:
        """Write a response that is no stream."""

    async def finish(self) -> None:
        """End the stream."""


async def send_error(
    reply: Reply, writer: ReplyWriter, error: ErrorReply, error_body: Callable[[ErrorReply], bytes]
) -> None:
    """Send an error as a status, or in the stream if one has begun or the agent understands it only there."""
    if reply.has_started or writer.writes_error_in_stream(error):
        await reply.send_events(writer.write_error(error))
        await reply.finish()
    else:
        await reply.send_document(error.status, error_body(error))


class HttpReply:
    """One response. A stream that is silent for `keep_alive` seconds gets a keep-alive.

    Nothing is sent before `ready` is done: an agent that has its response may disconnect.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        writer: ReplyWriter,
        keep_alive: float | None,
        log: Callable[[str], None],
        ready: asyncio.Future[None] | None = None,
    ) -> None:
        self.has_started = False
        self.response: web.StreamResponse | None = None
        self._request = request
        self._writer = writer
        self._log = log
        self._ready = ready
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._keep_alive_task: asyncio.Task[None] | None = None
        self._last_sent = self._loop.time()
        self._timer = None if keep_alive is None else self._loop.call_later(keep_alive, self._check_silence)

    async def send_events(self, events: bytes) -> None:
        await self._wait_ready()
        try:
            async with self._lock:
                if self.response is None:
                    content_type = f"{self._writer.content_type}; charset=utf-8"
                    self.response = web.StreamResponse(
                        headers={"Content-Type": content_type, "Cache-Control": "no-cache"}
                    )
                    self.has_started = True
                    await self.response.prepare(self._request)
                await self.response.write(events)
        except OSError as error:
            raise AgentDisconnected from error
        self._last_sent = self._loop.time()

    async def _wait_ready(self) -> None:
        if self._ready is not None:
            await asyncio.shield(self._ready)
            self._ready = None

    async def send_document(self, status: int, document: bytes) -> None:
        self.close()
        await self._wait_ready()
        try:
            async with self._lock:
                self.response = web.Response(body=document, status=status, content_type="application/json")
                self.has_started = True
                await self.response.prepare(self._request)
                await self.response.write_eof()
        except OSError as error:
            raise AgentDisconnected from error

    async def finish(self) -> None:
        self.close()
        if self.response is not None:
            try:
                await self.response.write_eof()
            except OSError as error:
                raise AgentDisconnected from error

    def close(self) -> None:
        """Send no more keep-alives."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._keep_alive_task is not None:
            self._keep_alive_task.cancel()
            self._keep_alive_task = None
        self._keep_alive = None

    def _check_silence(self) -> None:
        if self._keep_alive is None:
            return
        silence = self._loop.time() - self._last_sent
        if silence >= self._keep_alive * 0.9 and (self._keep_alive_task is None or self._keep_alive_task.done()):
            self._keep_alive_task = self._loop.create_task(self._send_keep_alive())
            silence = 0.0
        self._timer = self._loop.call_later(self._keep_alive - silence, self._check_silence)

    async def _send_keep_alive(self) -> None:
        try:
            await self.send_events(self._writer.write_keep_alive())
        except AgentDisconnected:
            self._log("the agent disconnected while it waited")
