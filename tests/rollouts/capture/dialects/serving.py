"""A capture before a replay, for tests in any dialect."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from paddock.rollouts.capture import Capture, CaptureSettings, Upstream
from paddock.rollouts.models.endpoint import Endpoint
from paddock.rollouts.trace import Call
from paddock.testing.dialects import Subject
from paddock.testing.replay import ReplayServer
from paddock.testing.speakers import SPEAKERS


@dataclass
class Served:
    model: ReplayServer
    capture: Capture
    session: aiohttp.ClientSession
    url: str
    kept: list[Call]

    def subject(self, dialect: str) -> Subject:
        return Subject(SPEAKERS[dialect], self.url, self.capture.secret, self.session)


@asynccontextmanager
async def served(script: dict[str, Any], **settings: Any) -> AsyncIterator[Served]:
    kept: list[Call] = []

    async def keep(call: Call) -> None:
        kept.append(call)

    sock = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    async with ReplayServer(script) as model, Upstream() as upstream, aiohttp.ClientSession() as session:
        changes = {"first_pause": 0.01, "longest_pause": 0.02, **settings}
        endpoint = Endpoint(model.url, model.script.model)
        capture = Capture(endpoint, upstream, CaptureSettings(**changes), on_call=keep)
        await capture.serve(sock)
        try:
            yield Served(model, capture, session, url, kept)
        finally:
            await capture.stop()
