"""The service of a driver to which its rollouts on nodes connect: for their job, for reports, for the driver's model.

The job, with the keys of models, does not go through Ray. What the messages of a rollout mean is in `rollouts` (the
driver) and `node_rollout` (the node).
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from paddock.errors import ClusterError
from paddock.scale.node_link import (
    READ_BYTES,
    LinkLost,
    NodeLink,
    accept_caller,
    challenge_caller,
    connect_to_driver,
    listen,
    relay_streams,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PLAIN_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RolloutTicket:
    """All that a task gets through Ray: where to connect, and as what. It gets its job there."""

    host: str
    port: int
    rollout_id: str
    token: str = field(repr=False)


class RolloutService:
    """One listener and one token for the life of a batch. `model` is a URL to which rollouts may be tunnelled.

    Each rollout is expected by its id and accepted once: a task that Ray runs twice or too late is refused.
    """

    def __init__(self, host: str, model: str | None = None) -> None:
        self._host = host
        self._port = 0
        self._token = secrets.token_urlsafe(32)
        self._model = None if model is None else address_of(model)
        self._expected: dict[str, asyncio.Future[NodeLink]] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            self._port = await self._open.enter_async_context(listen(self._host, self._admit))
        except OSError as error:
            hint = "nodes connect to the driver at this address: is it an address of this machine?"
            raise ClusterError(f"cannot listen on {self._host}: {error.strerror}", hint=hint) from error
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    def ticket(self, rollout_id: str) -> RolloutTicket:
        return RolloutTicket(self._host, self._port, rollout_id, self._token)

    def expect(self, rollout_id: str) -> asyncio.Future[NodeLink]:
        """The link of a rollout, once it connects."""
        return self._expected.setdefault(rollout_id, asyncio.get_running_loop().create_future())

    def forget(self, rollout_id: str) -> None:
        """Refuse it from now on."""
        expected = self._expected.pop(rollout_id, None)
        if expected is not None:
            expected.cancel()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_expected = False
        try:
            match await challenge_caller(reader, writer, self._token):
                case ["model"] if self._model is not None:
                    await self._connect_model(reader, writer)
                case ["image", name]:
                    from paddock.scale.driver_images import send_image

                    accept_caller(writer)
                    await send_image(name, writer)
                case ["rollout", rollout_id] if (expected := self._expected.pop(rollout_id, None)) is not None:
                    accept_caller(writer)
                    expected.set_result(NodeLink(reader, writer))
                    is_expected = True
        finally:
            if not is_expected:
                writer.close()

    async def _connect_model(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._model is not None
        with suppress(OSError):
            model = await asyncio.open_connection(*self._model, limit=READ_BYTES)
            accept_caller(writer)
            await relay_streams((reader, writer), model)


def address_of(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    return parts.hostname, parts.port or PLAIN_PORTS[parts.scheme]


@asynccontextmanager
async def tunnel(ticket: RolloutTicket, url: str) -> AsyncIterator[str]:
    """A local URL that leads to the driver's `url`, while it is entered."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(LinkLost):
                driver = await connect_to_driver(ticket.host, ticket.port, ticket.token, "model")
                await relay_streams((reader, writer), driver)
        finally:
            writer.close()

    async with listen("127.0.0.1", connect) as port:
        yield urlsplit(url)._replace(netloc=f"127.0.0.1:{port}").geturl()
