"""Placement of a vector's sessions on the hosts of a cluster, whose gateway grants leases of free slots.

One connection leads to each host. A session goes to the host whose slot the gateway reserved for it. So the sessions
of one client are placed, and queue for a slot, in the same way as those of many clients.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.client.reconnect import Reconnector
from paddock.client.transports.http import post_json
from paddock.errors import PaddockError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.client.reconnect import Reconnect
    from paddock.client.transports.multiplex import ClientSubSession, MultiplexedConnection

LEASES_PER_REQUEST = 200
NO_GATEWAY_STATUSES = (404, 405)
ANSWER_MARGIN_SECONDS = 15.0


class ClusterPlacement:
    def __init__(
        self,
        url: str,
        headers: dict[str, str],
        reconnect: Reconnect,
        connection_for: Callable[[str], MultiplexedConnection],
    ) -> None:
        """`connection_for(lease)` makes a connection, not opened yet, to the host that granted the lease."""
        self.connections: dict[str, MultiplexedConnection] = {}
        """By host."""
        self._url = f"{url}/places"
        self._headers = headers
        self._reconnect = reconnect
        self._connection_for = connection_for

    async def open_sessions(
        self, keys: Sequence[str], queue_timeout: float | None
    ) -> dict[str, ClientSubSession | PaddockError]:
        """Open a session for each key, on hosts with free slots; a key that gets none has an error instead."""
        await self._drop_gone()
        loop, waiting = asyncio.get_running_loop(), list(keys)
        opened: dict[str, ClientSubSession | PaddockError] = {}
        started_at = loop.time()
        while waiting:
            queue_seconds = None if queue_timeout is None else max(0.0, started_at + queue_timeout - loop.time())
            try:
                leases_by_host = await self._request_leases(min(len(waiting), LEASES_PER_REQUEST), queue_seconds)
            except PaddockError as error:
                return opened | dict.fromkeys(waiting, error)
            opening = []
            for host, leases in leases_by_host.items():
                opening.append(self._open_at(host, waiting[: len(leases)], leases))
                waiting = waiting[len(leases) :]
            for sessions in await asyncio.gather(*opening):
                opened |= sessions
        return opened

    async def drop_unused(self) -> None:
        for host, connection in list(self.connections.items()):
            if not connection.sessions:
                del self.connections[host]
                await connection.close()

    async def _request_leases(self, count: int, queue_seconds: float | None) -> dict[str, list[str]]:
        """Leases by host, of at least one slot. A gateway that dies meanwhile is asked again when it is back."""
        request = {"sessions": count, **({} if queue_seconds is None else {"queue_timeout": queue_seconds})}
        # Without a limit of ours the gateway's own applies, which we cannot see.
        timeout = None if queue_seconds is None else queue_seconds + ANSWER_MARGIN_SECONDS
        reconnector = Reconnector(self._reconnect)
        answer = await reconnector.connect(lambda: post_json(self._url, self._headers, request, timeout))
        return {place["host"]: place["leases"] for place in answer["places"]}

    async def _open_at(
        self, host: str, keys: list[str], leases: list[str]
    ) -> dict[str, ClientSubSession | PaddockError]:
        try:
            if host not in self.connections:
                connection = self._connection_for(leases[0])
                await connection.open()
                self.connections[host] = connection
            await self.connections[host].wait_connected()
        except PaddockError as error:
            return dict.fromkeys(keys, error)
        sessions = await self.connections[host].open_sessions(keys, leases=leases)
        return {session.key: session for session in sessions}

    async def _drop_gone(self) -> None:
        """Close connections to hosts that no longer exist."""
        for host, connection in list(self.connections.items()):
            if connection.is_gone:
                del self.connections[host]
                await connection.close()


def has_no_gateway(error: PaddockError | None) -> bool:
    """Whether the server does not know the request for leases: it is a host by itself."""
    return error is not None and error.data.get("status") in NO_GATEWAY_STATUSES
