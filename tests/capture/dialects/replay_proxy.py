"""A capture before a replay, for tests in any dialect."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from paddock.capture.proxy import Capture
from paddock.capture.settings import CaptureSettings
from paddock.capture.trace import Call
from paddock.capture.upstream import Upstream
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.testing.dialect_clients import CLIENTS
from paddock.testing.dialects import DialectSubject


@dataclass
class ReplayProxy:
    model: ReplayServer
    capture: Capture
    session: aiohttp.ClientSession
    url: str
    recorded: list[Call]

    def subject(self, dialect: str) -> DialectSubject:
        return DialectSubject(CLIENTS[dialect], self.url, self.capture.secret, self.session)


@asynccontextmanager
async def replay_proxy(script: dict[str, Any], **settings: Any) -> AsyncIterator[ReplayProxy]:
    recorded: list[Call] = []

    async def keep(call: Call) -> None:
        recorded.append(call)

    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with ReplayServer(script) as model, Upstream() as upstream, aiohttp.ClientSession() as session:
        changes = {"first_pause": 0.01, "longest_pause": 0.02, **settings}
        endpoint = Endpoint(model.url, model.script.model)
        capture = Capture(endpoint, upstream, CaptureSettings(**changes), on_call=keep)
        await capture.serve(sock)
        try:
            yield ReplayProxy(model, capture, session, url, recorded)
        finally:
            await capture.stop()
