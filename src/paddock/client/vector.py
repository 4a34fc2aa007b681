"""Many sessions from one process: one frame carries the steps of all of them.

Against Paddock the sessions share a few connections (`transports/multiplex.py`), survive drops, and are answered in
batches. On a cluster they are placed on its hosts (`cluster_placement.py`). Against another server each session gets
a client of its own. Errors are values in the result list: a session that fails does not affect the others.
"""

from __future__ import annotations

import asyncio
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Self

from paddock.client.client import Client
from paddock.client.cluster_placement import ClusterPlacement, has_no_gateway
from paddock.client.ownership import Ownership
from paddock.client.reconnect import Reconnect, Timeouts
from paddock.client.requests import action_fields, authorization, server_url
from paddock.client.transports.multiplex import (
    OPEN_BATCH,
    ClientSubSession,
    MultiplexedConnection,
    PendingBatch,
    SessionResult,
    read_result,
)
from paddock.client.transports.socket import socket_address
from paddock.errors import ClientError, ConfigError, DeadlineExceeded, InvalidMessage, PaddockError
from paddock.protocol.redact import mask_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class VectorClient:
    """A client for `sessions` sessions. Use it in `async with`, or call `close` when done."""

    def __init__(
        self,
        url: str,
        sessions: int,
        *,
        connections: int = 1,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        reconnect: Reconnect | None = None,
        queue_timeout: float | None = None,
    ) -> None:
        if sessions < 1 or connections < 1:
            raise ClientError("a vector needs at least one session and one connection")
        if queue_timeout is not None and not 0 <= queue_timeout < inf:
            hint = "give seconds from 0, or None for the server's default"
            raise ConfigError(f"queue_timeout is {queue_timeout}", hint=hint)
        self.url = server_url(url)
        self.sessions = sessions
        self.timeouts = timeouts or Timeouts()
        self._reconnect = reconnect or Reconnect()
        self._queue_timeout = queue_timeout
        self._headers = authorization(token)
        self._connections: list[MultiplexedConnection] = []
        """One list for the whole lifetime: the finalizer of a client that was never closed holds it too."""
        self._abandon = partial(_abandon_all, self._connections)
        self._ownership = Ownership()
        self._placement: ClusterPlacement | None = None
        self._sub_sessions: list[ClientSubSession] = []
        self._clients: list[Client[Any]] = []
        self._connection_count = min(connections, sessions)

    def __repr__(self) -> str:
        return f"<VectorClient {mask_url(self.url)} sessions={self.sessions}>"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __len__(self) -> int:
        return self.sessions

    async def open(self) -> None:
        """Connect and open every session. Raises if none of them could be opened, and leaves nothing open then."""
        self._ownership.check(self, self._abandon)
        try:
            await self._open_all()
        except BaseException:
            await self.close()
            raise

    async def _open_all(self) -> None:
        first = self._new_connection()
        self._connections[:] = [first]
        if not await first.open():
            await first.close()
            self._connections.clear()
            await self._open_clients()
            return
        if first.host is None or not await self._open_on_cluster(first):
            rest = [self._new_connection() for _ in range(self._connection_count - 1)]
            self._connections += rest
            await asyncio.gather(*(connection.open() for connection in rest))
            await self._open_evenly()
        errors = [session.error for session in self._sub_sessions if session.error is not None]
        if len(errors) == self.sessions:
            raise errors[0]

    async def _open_evenly(self) -> None:
        """Each connection carries the same share of the sessions."""
        count = len(self._connections)
        shares = [[str(i) for i in range(n, self.sessions, count)] for n in range(count)]
        until = self._queues_until()
        await asyncio.gather(
            *(
                connection.open_sessions(keys, until)
                for connection, keys in zip(self._connections, shares, strict=True)
            )
        )
        self._sub_sessions = [self._connections[i % count].sessions[str(i)] for i in range(self.sessions)]

    def _queues_until(self) -> float | None:
        """When, on the loop's clock, sessions that are opened from now on stop waiting for slots."""
        return None if self._queue_timeout is None else asyncio.get_running_loop().time() + self._queue_timeout

    def _new_connection(self, lease: str | None = None) -> MultiplexedConnection:
        """A connection, not opened yet, to the host that granted the lease, or to any."""
        address = socket_address(self.url, f"vector&lease={lease}" if lease else "vector")
        return MultiplexedConnection(address, self._headers, self.timeouts, self._reconnect)

    async def _open_on_cluster(self, first: MultiplexedConnection) -> bool:
        """Open the sessions on the hosts that the gateway names; False if there is no gateway."""
        assert first.host is not None
        self._placement = ClusterPlacement(self.url, self._headers, self._reconnect, self._new_connection)
        self._placement.connections[first.host] = first
        self._sub_sessions = [ClientSubSession(str(i), None) for i in range(self.sessions)]
        await self._place(range(self.sessions))
        if has_no_gateway(self._sub_sessions[0].error):
            self._placement = None
            return False
        await self._placement.drop_unused()
        self._connections[:] = self._placement.connections.values()
        return True

    async def _place(self, indices: Iterable[int]) -> None:
        """Open sessions wherever the cluster has free slots."""
        assert self._placement is not None
        try:
            opened = await self._placement.open_sessions([str(i) for i in indices], self._queue_timeout)
        finally:
            self._connections[:] = self._placement.connections.values()
        for key, outcome in opened.items():
            if isinstance(outcome, PaddockError):
                session = ClientSubSession(key, None)
                session.fail(outcome)
            else:
                session = outcome
            self._sub_sessions[int(key)] = session

    async def _reopen_failed(self) -> None:
        """Open new sessions in place of those that were lost or refused."""
        if self._placement is None:
            until = self._queues_until()
            await asyncio.gather(*(connection.reopen_failed(until) for connection in self._connections))
            self._sub_sessions = [
                session.connection.sessions[session.key]
                for session in self._sub_sessions
                if session.connection is not None
            ]
            return
        failed = {i: session for i, session in enumerate(self._sub_sessions) if session.error is not None}
        for session in failed.values():
            if session.connection is not None:
                session.connection.sessions.pop(session.key, None)
        if failed:
            await self._place(failed)

    async def reset_all(
        self, seeds: Sequence[int] | None = None, *, timeout: float | None = None, **arguments: Any
    ) -> list[SessionResult]:
        """Begin an episode in every session, each with its own seed if `seeds` are given.

        Sessions that were lost are opened anew first, and `timeout` counts from then on.
        """
        if seeds is not None and len(seeds) != self.sessions:
            raise ClientError(f"{len(seeds)} seeds for {self.sessions} sessions", hint="give one seed per session")
        self._ownership.check(self, self._abandon)
        self._check_open()
        await self._reopen_failed()
        own = [{"seed": seed} for seed in seeds] if seeds is not None else [{}] * self.sessions
        messages = {i: {"type": "reset", "data": {**arguments, **own[i]}} for i in range(self.sessions)}
        return await self._request_all(messages, timeout)

    async def reset(
        self, arguments: Mapping[int, Mapping[str, Any]], *, timeout: float | None = None
    ) -> list[SessionResult]:
        """Begin a new episode in some sessions, each with its own arguments."""
        messages = {i: {"type": "reset", "data": dict(own_arguments)} for i, own_arguments in arguments.items()}
        return await self._request_all(messages, timeout)

    async def step_all(self, actions: Sequence[Any], *, timeout: float | None = None) -> list[SessionResult]:
        """One step in every session, in the order of the sessions."""
        if len(actions) != self.sessions:
            raise ClientError(f"{len(actions)} actions for {self.sessions} sessions", hint="give one per session")
        return await self.step(dict(enumerate(actions)), timeout=timeout)

    async def step(self, actions: Mapping[int, Any], *, timeout: float | None = None) -> list[SessionResult]:
        """One step in some sessions: results come in the order of `actions`."""
        return await self._request_all({i: _step_message(action) for i, action in actions.items()}, timeout)

    async def close(self) -> None:
        """End every session."""
        if not self._ownership.release(self._abandon):
            return
        await asyncio.gather(
            *(connection.close() for connection in self._connections), *(env.close() for env in self._clients)
        )

    def _check_open(self) -> None:
        if not self._sub_sessions and not self._clients:
            raise ClientError("the client is not open", hint="use it in `async with`, or await open() first")

    async def _request_all(
        self, messages: Mapping[int, dict[str, Any] | InvalidMessage], timeout: float | None
    ) -> list[SessionResult]:
        """The results of messages, by session. An action that cannot be encoded is its own result, an error."""
        self._ownership.check(self, self._abandon)
        self._check_open()
        limit = self.timeouts.request if timeout is None else timeout
        for index in messages:
            if not 0 <= index < self.sessions:
                raise ClientError(f"there is no session {index}", hint=f"they are numbered 0 to {self.sessions - 1}")
            if not self._clients and self._sub_sessions[index].frame is not None:
                raise ClientError(f"session {index} has a request in flight", hint="await it before the next")
        if self._clients:
            return await self._request_from_clients(messages, limit)
        if not messages:
            return []
        batch = PendingBatch(len(messages))
        outgoing: dict[MultiplexedConnection, list[dict[str, Any]]] = {
            connection: [] for connection in self._connections
        }
        for place, (index, message) in enumerate(messages.items()):
            session = self._sub_sessions[index]
            if isinstance(message, InvalidMessage):
                batch.put(place, message)
            elif session.error is not None or session.connection is None:
                batch.put(place, session.error)
            else:
                outgoing[session.connection].append(session.start_request(message, batch, place))
        try:
            for connection, frames in outgoing.items():
                connection.send(frames)
            async with asyncio.timeout(limit):
                await batch.done
        except TimeoutError:
            self._cancel_requests(messages, batch, limit)
        except BaseException:
            self._cancel_requests(messages, batch, limit)
            raise
        return batch.results

    def _cancel_requests(self, indices: Iterable[int], batch: PendingBatch, limit: float | None) -> None:
        """Cancel the requests of a batch that timed out or whose caller was cancelled."""
        for index in indices:
            session = self._sub_sessions[index]
            if session.batch is batch and session.connection is not None:
                session.connection.send([{"type": "cancel", "session": session.key, "data": session.number}])
                session.finish_request(DeadlineExceeded(f"no answer within {limit} s"))

    async def _open_clients(self) -> None:
        self._clients = [
            Client(self.url, headers=self._headers, timeouts=self.timeouts, reconnect=self._reconnect)
            for _ in range(self.sessions)
        ]
        for start in range(0, self.sessions, OPEN_BATCH):
            batch = self._clients[start : start + OPEN_BATCH]
            await asyncio.gather(*(env.__aenter__() for env in batch))

    async def _request_from_clients(
        self, messages: Mapping[int, dict[str, Any] | InvalidMessage], limit: float | None
    ) -> list[SessionResult]:
        async def ask(index: int, message: dict[str, Any] | InvalidMessage) -> SessionResult:
            if isinstance(message, InvalidMessage):
                return message
            try:
                return read_result(await self._clients[index].transport.request(message, limit))
            except PaddockError as error:
                return error

        return list(await asyncio.gather(*(ask(index, message) for index, message in messages.items())))


def _abandon_all(connections: list[MultiplexedConnection]) -> bool:
    was_open = False
    for connection in connections:
        try:
            was_open |= connection.abandon()
        except RuntimeError:
            # The loop has ended, and cannot close the connection: the collector does.
            was_open = True
    return was_open


def _step_message(action: Any) -> dict[str, Any] | InvalidMessage:
    try:
        return {"type": "step", "data": action_fields(action)}
    except InvalidMessage as error:
        return error
