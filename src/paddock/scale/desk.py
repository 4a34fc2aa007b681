"""Where rollouts on nodes report to their driver, and through which they reach a model that only the driver can.

One listener, one token, for the life of a batch. A rollout is expected by its id and let in once: a task that Ray
runs twice, or that comes too late, is sent away.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from paddock.errors import ClusterError
from paddock.scale.link import READ_BYTES, Link, LinkLost, call, greet, listening, splice, welcome

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PLAIN_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Ticket:
    """All that a task is given by Ray: where to report as what. The work itself is fetched there."""

    host: str
    port: int
    rollout_id: str
    token: str = field(repr=False)


class Desk:
    """Use it in `async with`. `model` is a URL that callers may be connected to."""

    def __init__(self, host: str, model: str | None = None) -> None:
        self._host = host
        self._port = 0
        self._token = secrets.token_urlsafe(32)
        self._model = None if model is None else place_of(model)
        self._expected: dict[str, asyncio.Future[Link]] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            self._port = await self._open.enter_async_context(listening(self._host, self._admit))
        except OSError as error:
            hint = "nodes report to the driver at this address: is it one of this machine's?"
            raise ClusterError(f"cannot listen on {self._host}: {error.strerror}", hint=hint) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def ticket(self, rollout_id: str) -> Ticket:
        return Ticket(self._host, self._port, rollout_id, self._token)

    def expect(self, rollout_id: str) -> asyncio.Future[Link]:
        """The link of a rollout, once it calls."""
        return self._expected.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    def dismiss(self, rollout_id: str) -> None:
        """Expect it no longer."""
        expected = self._expected.pop(rollout_id, None)
        if expected is not None:
            expected.cancel()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kept = False
        try:
            match await greet(reader, writer, self._token):
                case ["model"] if self._model is not None:
                    await self._connect_model(reader, writer)
                case ["rollout", rollout_id] if (expected := self._expected.pop(rollout_id, None)) is not None:
                    welcome(writer)
                    expected.set_result(Link(reader, writer))
                    kept = True
        finally:
            if not kept:
                writer.close()

    async def _connect_model(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._model is not None
        with suppress(OSError):
            model = await asyncio.open_connection(*self._model, limit=READ_BYTES)
            welcome(writer)
            await splice((reader, writer), model)


def is_loopback(url: str) -> bool:
    """Whether a URL means another place on every machine."""
    return urlsplit(url).hostname in LOOPBACK


def place_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return parts.hostname, parts.port or PLAIN_PORTS[parts.scheme]


@asynccontextmanager
async def tunnel(ticket: Ticket, url: str) -> AsyncIterator[str]:
    """The URL at which this machine reaches the driver's `url`, while it is entered."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(LinkLost):
                driver = await call(ticket.host, ticket.port, ticket.token, "model")
                await splice((reader, writer), driver)
        finally:
            writer.close()

    async with listening("127.0.0.1", connect) as port:
        yield urlsplit(url)._replace(netloc=f"127.0.0.1:{port}").geturl()
