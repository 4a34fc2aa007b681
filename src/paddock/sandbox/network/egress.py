"""The egress proxy: the only way out of a sandbox. It runs on the host, on a socket that listens inside.

It serves `CONNECT` for any TCP port and absolute `http://` requests. `access` decides about each connection,
`connections` records it, `proxy_client` speaks HTTP with the program inside.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.sandbox.network.access import (
    BAD_GATEWAY,
    GATEWAY_TIMEOUT,
    UNAVAILABLE,
    AccessRules,
    ConnectionRefusal,
)
from paddock.sandbox.network.connections import ConnectionLog, ConnectionRecord, LiveConnection
from paddock.sandbox.network.proxy_client import ProxyClient
from paddock.sandbox.network.relay import PIECE_BYTES, flush, relay
from paddock.sandbox.network.upstream_proxy import UpstreamProxy, find_upstream_proxy

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable

    from paddock.sandbox.network.access import Resolve
    from paddock.sandbox.network.policy import NetworkPolicy
    from paddock.sandbox.network.registries import Registries

logger = logging.getLogger(__name__)

MOST_TRIED_ADDRESSES = 4
SPARE_CONNECTIONS = 32
MOST_SHOWN_REFUSALS = 20
CLOSE_SECONDS = 5.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True)
class EgressLimits:
    """What one sandbox may use of its proxy. Times are in seconds."""

    connections: int = 256
    """Open connections at a time. More are refused with the reason, and those beyond another `SPARE_CONNECTIONS` are
    cut unheard: each uses a descriptor of this process."""
    head_seconds: float = 30.0
    """For a program inside to send the head of a request."""
    connect_seconds: float = 15.0
    """For each address that is tried."""
    idle_seconds: float = 600.0
    """A connection on which nothing is sent for so long is closed."""


@dataclass(frozen=True, slots=True)
class OutboundConnection:
    """A connection that was allowed, and is open."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    live: LiveConnection
    proxy: UpstreamProxy | None = None
    """The proxy at its other end. None: the host itself."""


class EgressProxy:
    """Serves one sandbox from `serve` to `close`. Use it from one event loop only."""

    def __init__(
        self,
        policy: NetworkPolicy,
        *,
        phase: str = "",
        limits: EgressLimits | None = None,
        registries: Registries | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self.phase = phase
        self.limits = limits or EgressLimits()
        self.log = ConnectionLog()
        self._registries, self._resolve = registries, resolve
        self._rules = self._make_rules(policy)
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_ended = False

    @property
    def policy(self) -> NetworkPolicy:
        return self._rules.policy

    @property
    def connections(self) -> tuple[ConnectionRecord, ...]:
        return self.log.records

    def recent_refusals(self) -> list[ConnectionRecord]:
        """The last ones of this phase, one for each host and port."""
        refused = [record for record in self.connections if not record.allowed and record.phase == self.phase]
        return [*{(record.host, record.port): record for record in refused}.values()][-MOST_SHOWN_REFUSALS:]

    def _make_rules(self, policy: NetworkPolicy) -> AccessRules:
        return AccessRules(policy, registries=self._registries, resolve=self._resolve)

    # -- start, change and end ------------------------------------------------------------------------

    async def serve(self, listener: socket.socket) -> None:
        """Serve on a listening socket, which is closed at the end."""
        await self._listen(listener, lambda reader, writer: ProxyClient(self, reader, writer).run())

    async def serve_port(self, listener: socket.socket, host: str, port: int) -> None:
        """Forward every connection to one address of the host's network, if the policy allows that."""
        await self._listen(listener, lambda reader, writer: self._forward((reader, writer), host, port))

    async def _listen(
        self,
        listener: socket.socket,
        act: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    ) -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            if self._has_ended or len(self._tasks) >= self.limits.connections + SPARE_CONNECTIONS:
                writer.transport.abort()
                return
            self._tasks.add(task)
            try:
                await act(reader, writer)
                await flush(writer, self.limits.idle_seconds)
            except (OSError, TimeoutError):
                pass  # the program inside, or the host that it talks to, is gone
            except asyncio.CancelledError:
                pass  # by `end` or `switch`; the stream library would log it as an error
            except Exception:
                logger.exception("a connection of a sandbox broke")
            finally:
                self._tasks.discard(task)
                writer.transport.abort()

        self._servers.append(await asyncio.start_server(handle, sock=listener, limit=PIECE_BYTES))

    def switch(self, policy: NetworkPolicy, phase: str) -> None:
        """Another phase begins. Connections that were opened under another policy are cut."""
        if policy != self.policy:
            self._rules = self._make_rules(policy)
            self._cut()
        self.phase = phase

    def end(self) -> None:
        """Close the listener and cut every connection, at once."""
        self._has_ended = True
        for server in self._servers:
            server.close()
        self._cut()

    async def close(self) -> None:
        """As `end`, and wait until each connection has its record."""
        self.end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        self.log.close()

    def _cut(self) -> None:
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    # -- connections ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def connect(self, host: str, port: int, *, scheme: str) -> AsyncIterator[OutboundConnection]:
        """Open a connection and record it, from the decision to its end. Raises ConnectionRefusal."""
        live = self.log.open(host, port, self.phase)
        writer: asyncio.StreamWriter | None = None
        try:
            if len(self._tasks) > self.limits.connections:
                reason = f"the sandbox has more than {self.limits.connections} open connections"
                raise ConnectionRefusal(reason, status=UNAVAILABLE)
            outbound = await self._open(live, scheme)
            writer = outbound.writer
            yield outbound
            await flush(writer, self.limits.idle_seconds)
        except ConnectionRefusal as refusal:
            live.allowed = refusal.is_failure
            live.reason = refusal.reason
            raise
        finally:
            if writer is not None:
                writer.transport.abort()
            self.log.end(live)

    async def _open(self, live: LiveConnection, scheme: str) -> OutboundConnection:
        proxy = find_upstream_proxy(scheme, live.host)
        addresses = await self._rules.admit(live.host, live.port, must_resolve=proxy is None)
        if proxy is not None:
            reader, writer = await self._connect_to(proxy.host, proxy.port)
            return OutboundConnection(reader, writer, live, proxy)
        failure = ConnectionRefusal("no address")
        for address in addresses[:MOST_TRIED_ADDRESSES]:
            try:
                reader, writer = await self._connect_to(str(address), live.port)
            except ConnectionRefusal as refusal:
                failure = refusal
                continue
            live.address = str(address)
            return OutboundConnection(reader, writer, live)
        raise failure

    async def _connect_to(self, host: str, port: int) -> Streams:
        seconds = self.limits.connect_seconds
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.open_connection(host, port, limit=PIECE_BYTES)
        except TimeoutError:
            reason = f"{host} port {port} did not answer within {seconds:g} s"
            raise ConnectionRefusal(reason, status=GATEWAY_TIMEOUT) from None
        except (OSError, OverflowError) as error:
            text = getattr(error, "strerror", None) or error
            reason = f"{host} port {port} cannot be reached: {text}"
            raise ConnectionRefusal(reason, status=BAD_GATEWAY) from None

    async def _forward(self, client: Streams, host: str, port: int) -> None:
        with suppress(ConnectionRefusal):  # this protocol has no place for the reason: the record has it
            async with self.connect(host, port, scheme="") as outbound:
                await relay(client, outbound, self.limits.idle_seconds)
