"""An answer to the agent, written to an aiohttp request. The exchange sees it as `Reply`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from paddock.rollouts.capture.exchange import AgentGone

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.rollouts.capture.dialects.base import Writer


class HttpReply:
    """One response. A streaming agent that hears nothing for `keep_alive` seconds gets something empty.

    Nothing is sent before `ready` is done: once a caller has its answer, it may hang up and be gone.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        writer: Writer,
        keep_alive: float | None,
        log: Callable[[str], None],
        ready: asyncio.Future[None] | None = None,
    ) -> None:
        self.begun = False
        self.response: web.StreamResponse | None = None
        self._request = request
        self._writer = writer
        self._log = log
        self._ready = ready
        self._keep_alive = keep_alive
        self._loop = asyncio.get_running_loop()
        self._writing = asyncio.Lock()
        self._comment: asyncio.Task[None] | None = None
        self._last = self._loop.time()
        self._timer = None if keep_alive is None else self._loop.call_later(keep_alive, self._tick)

    async def send(self, events: bytes) -> None:
        await self._wait_ready()
        try:
            async with self._writing:
                if self.response is None:
                    self.response = web.StreamResponse(headers=self._headers())
                    self.begun = True
                    await self.response.prepare(self._request)
                await self.response.write(events)
        except OSError as error:
            raise AgentGone from error
        self._last = self._loop.time()

    async def _wait_ready(self) -> None:
        if self._ready is not None:
            await asyncio.shield(self._ready)
            self._ready = None

    def _headers(self) -> dict[str, str]:
        return {"Content-Type": f"{self._writer.content_type}; charset=utf-8", "Cache-Control": "no-cache"}

    async def answer(self, status: int, document: bytes) -> None:
        self.close()
        await self._wait_ready()
        try:
            async with self._writing:
                self.response = web.Response(body=document, status=status, content_type="application/json")
                self.begun = True
                await self.response.prepare(self._request)
                await self.response.write_eof()
        except OSError as error:
            raise AgentGone from error

    async def end(self) -> None:
        self.close()
        if self.response is not None:
            try:
                await self.response.write_eof()
            except OSError as error:
                raise AgentGone from error

    def close(self) -> None:
        """No more comments."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._comment is not None:
            self._comment.cancel()
            self._comment = None
        self._keep_alive = None

    def _tick(self) -> None:
        if self._keep_alive is None:
            return
        quiet = self._loop.time() - self._last
        if quiet >= self._keep_alive * 0.9 and (self._comment is None or self._comment.done()):
            self._comment = self._loop.create_task(self._send_comment())
            quiet = 0.0
        self._timer = self._loop.call_later(self._keep_alive - quiet, self._tick)

    async def _send_comment(self) -> None:
        try:
            await self.send(self._writer.keep_alive())
        except AgentGone:
            self._log("the agent hung up while it waited")
