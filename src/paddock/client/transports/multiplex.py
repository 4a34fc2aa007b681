"""One WebSocket connection that carries many sessions.

Each sub-session has at most one request in flight. After a drop, all of them are resumed on a new connection. Knows
the frames of `/ws?vector`, and nothing about who steps which session.
"""

from __future__ import annotations

import asyncio
import secrets
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import orjson

from paddock.client.reconnect import Reconnector, episode_lost
from paddock.client.replies import step_result
from paddock.client.requests import encode_request
from paddock.client.transports.socket import WebSocketConnection, open_socket
from paddock.errors import (
    CapacityReached,
    ClientError,
    ConnectFailed,
    EnvironmentFailure,
    EpisodeLost,
    InvalidMessage,
    PaddockError,
    SessionClosed,
    SessionNotFound,
    from_wire,
)
from paddock.protocol.codec import encode
from paddock.types import StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.client.reconnect import Reconnect, Timeouts

SessionResult = StepResult[Any] | PaddockError
OPEN_BATCH = 200
MESSAGES_PER_FRAME = 200
LOST_HINT = "reset_all() opens a new session"


class PendingBatch:
    """The replies that one call waits for."""

    __slots__ = ("done", "missing", "results")

    def __init__(self, count: int) -> None:
        self.results: list[Any] = [None] * count
        self.missing = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, place: int, result: Any) -> None:
        if self.results[place] is None:
            self.results[place] = result
            self.missing -= 1
            if self.missing == 0 and not self.done.done():
                self.done.set_result(None)


class ClientSubSession:
    """One session on a shared connection, with at most one request in flight."""

    __slots__ = (
        "_queues_until", "batch", "connection", "error", "frame", "key",
        "lease", "number", "opened", "place", "token",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        connection: MultiplexedConnection | None,
        lease: str | None = None,
        queues_until: float | None = None,
        token: str | None = None,
    ) -> None:
        self.key = key
        self.connection = connection
        """None if no connection carries it."""
        self.lease = lease
        self.token = token
        """Chosen by us, if the server accepts that: so we have it even if the reply to `open` is lost."""
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues_until = queues_until
        """When, on the loop's clock, it stops waiting for a slot; None if the server decides."""
        self.error: PaddockError | None = None
        """Why it was refused or lost."""
        self.number = 0
        self.frame: dict[str, Any] | None = None
        """The request in flight."""
        self.batch: PendingBatch | None = None
        self.place = 0

    def open_message(self) -> dict[str, Any]:
        """The message that opens the session, or resumes it."""
        if self.opened.done():
            fields: dict[str, Any] = {"resume": self.token}
        else:
            fields = {"token": self.token, "lease": self.lease}
            if self._queues_until is not None:
                fields["queue_timeout"] = max(0.0, self._queues_until - asyncio.get_running_loop().time())
        present = {name: value for name, value in fields.items() if value is not None}
        return {"type": "open", "session": self.key, **present}

    def start_request(self, message: dict[str, Any], batch: PendingBatch, place: int) -> dict[str, Any]:
        """The frame for a message whose reply belongs at `place` of the batch."""
        self.number += 1
        self.batch, self.place = batch, place
        self.frame = {**message, "id": self.number, "ack": self.number - 1, "session": self.key}
        return self.frame

    def finish_request(self, result: Any) -> None:
        batch, self.batch, self.frame = self.batch, None, None
        if batch is not None:
            batch.put(self.place, result)

    def fail(self, error: PaddockError) -> None:
        """The session is lost, and with it the episode."""
        self.error, self.token = error, None
        if not self.opened.done():
            self.opened.set_result(None)
        self.finish_request(error)


class MultiplexedConnection:
    """One connection and its sub-sessions, which survive a drop."""

    def __init__(self, url: str, headers: dict[str, str], timeouts: Timeouts, reconnect: Reconnect) -> None:
        self._address = url
        self._headers = headers
        self._timeouts = timeouts
        self._reconnect = reconnect
        self._reconnector = Reconnector(reconnect)
        self._socket: WebSocketConnection | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._closed = False
        self._token_prefix: str | None = None
        """What tokens that we choose begin with; None if the server chooses them."""
        self.sessions: dict[str, ClientSubSession] = {}
        """By key."""
        self.host: str | None = None
        """Which host of a cluster answers, if it is one."""
        self.refusal: PaddockError | None = None
        """Why no host accepts this connection: its host is gone, or there is none."""
        self.reconnects = 0

    async def open(self) -> bool:
        """Connect; False if the server does not support vectors."""
        # The token of any sub-session leads back to the process that keeps them all.
        token = next((session.token for session in self.sessions.values() if session.token is not None), None)
        headers = {**self._headers, **({"Session-Resume": token} if token else {})}
        self.refusal = None
        socket = await open_socket(self._address, headers, self._on_message, self._on_lost, self._timeouts.connect)
        if self._closed:
            # It was closed while we connected, because another connection of the same client failed.
            socket.close()
            raise ClientError("the client was closed")
        self._socket = socket
        self.host = socket.headers.get("Paddock-Host")
        self._token_prefix = socket.headers.get("Session-Id")
        if socket.is_lost:
            self._socket = None
            raise self.refusal or ConnectFailed("the server hung up at once", hint="is it shutting down?")
        return "Paddock-Version" in socket.headers

    @property
    def is_gone(self) -> bool:
        """Whether the connection is lost and will not be restored by itself."""
        return self._socket is None and (self._reconnecting is None or self._reconnecting.done())

    async def wait_connected(self) -> None:
        """Wait for a reconnect, if the connection dropped. Raises ConnectFailed, or why it is refused."""
        if self._socket is None and self._reconnecting is not None:
            await self._reconnecting
        if self._socket is None:
            await self.open()

    async def open_sessions(
        self, keys: Sequence[str], queues_until: float | None = None, leases: Sequence[str] = ()
    ) -> list[ClientSubSession]:
        """Open a session for each key, in the slot of its lease if it has one. A refused one carries its error.

        `queues_until` is one deadline for all of them, however many batches they are opened in. Without one the
        server's own applies, and after its first refusal the sessions behind do not wait for it again.
        """
        pairs, opened = list(zip_longest(keys, leases)), []
        for start in range(0, len(pairs), OPEN_BATCH):
            batch = [
                ClientSubSession(key, self, lease, queues_until, self._new_token())
                for key, lease in pairs[start : start + OPEN_BATCH]
            ]
            opened += batch
            self.sessions |= {session.key: session for session in batch}
            self.send([session.open_message() for session in batch])
            if self.refusal is not None:
                self._fail_all(self.refusal)
            await asyncio.gather(*(session.opened for session in batch))
            if queues_until is None and any(isinstance(session.error, CapacityReached) for session in batch):
                queues_until = asyncio.get_running_loop().time()
        return opened

    async def reopen_failed(self, queues_until: float | None) -> None:
        """Open new sessions in place of those that were lost or refused."""
        keys = [key for key, session in self.sessions.items() if session.error is not None]
        if keys:
            await self.wait_connected()
            await self.open_sessions(keys, queues_until)

    def send(self, messages: list[dict[str, Any]]) -> None:
        """In frames of a size that lets the server begin while the rest is still being encoded."""
        if self._socket is not None and not self._socket.is_lost:
            for start in range(0, len(messages), MESSAGES_PER_FRAME):
                if frame := self._encode(messages[start : start + MESSAGES_PER_FRAME]):
                    self._socket.send(frame)

    def drop(self) -> None:
        """Cut the connection as a broken network would, to see what happens then."""
        if self._socket is not None:
            self._socket.abort()

    async def close(self) -> None:
        socket = self._detach_socket()
        if socket is not None:
            await socket.close_and_wait()
        for session in self.sessions.values():
            session.fail(ClientError("the client was closed"))

    def abandon(self) -> bool:
        """Close without waiting, because the client was garbage-collected. False if there was nothing to close."""
        was_open = not self._closed and (self._socket is not None or self._reconnecting is not None)
        socket = self._detach_socket()
        if socket is not None:
            socket.close()
        return was_open

    def _detach_socket(self) -> WebSocketConnection | None:
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        socket, self._socket = self._socket, None
        return None if socket is None or socket.is_lost else socket

    def _new_token(self) -> str | None:
        return None if self._token_prefix is None else f"{self._token_prefix}-{secrets.token_hex(16)}"

    def _encode(self, messages: list[dict[str, Any]]) -> bytes:
        """A frame of messages. One that JSON cannot express is left out, and its session gets the error."""
        try:
            frame = encode(messages)
        except EnvironmentFailure:
            frame = b""
        # A null may stand for a number that JSON cannot express: then each message is checked by itself.
        if not frame or b"null" in frame:
            parts = [part for message in messages if (part := self._encode_one(message))]
            frame = b"[" + b",".join(parts) + b"]" if parts else b""
        return frame

    def _encode_one(self, message: dict[str, Any]) -> bytes:
        try:
            return encode_request(message, message["type"])
        except InvalidMessage as error:
            self.sessions[message["session"]].finish_request(error)
            return b""

    def _on_message(self, raw: bytes) -> None:
        replies = orjson.loads(raw)
        if isinstance(replies, dict):
            # Not of one session: the gateway of a cluster refuses the connection itself.
            if replies.get("type") == "error":
                self._fail_all(from_wire(replies["data"]))
            return
        for reply in replies:
            session = self.sessions.get(reply.get("session"))
            if session is None:
                continue
            if reply["type"] == "opened":
                self._on_opened(session, reply["data"])
            elif reply.get("id") == session.number:
                self._reconnector.record_answer()
                session.finish_request(read_result(reply))
            elif reply["type"] == "error" and "id" not in reply:
                self._fail_session(session, from_wire(reply["data"]))

    def _on_opened(self, session: ClientSubSession, data: dict[str, Any]) -> None:
        session.token = data["token"]
        session.error = None
        if not session.opened.done():
            session.opened.set_result(None)
        elif session.frame is not None:
            self.send([session.frame])

    def _fail_all(self, error: PaddockError) -> None:
        """The server refuses the connection: all its sessions are lost, and reconnecting would not help."""
        self.refusal = error
        for session in self.sessions.values():
            if session.error is None:
                self._fail_session(session, error)

    def _fail_session(self, session: ClientSubSession, error: PaddockError) -> None:
        if isinstance(error, (SessionNotFound, SessionClosed)) and session.opened.done():
            error = episode_lost(error.message, session.token, LOST_HINT)
        session.fail(error)

    def _on_lost(self, socket: WebSocketConnection) -> None:
        if socket is not self._socket or self._closed:
            return
        self._socket = None
        if self.refusal is not None:
            return
        why = f"the connection dropped ({socket.code} {socket.reason}".rstrip() + ")"
        lost = episode_lost(why, hint=LOST_HINT)
        if self._reconnect.within <= 0:
            self._lose_all(lost)
        else:
            self._reconnecting = asyncio.get_running_loop().create_task(self._resume(lost))

    def _lose_all(self, lost: EpisodeLost) -> None:
        for session in self.sessions.values():
            session.fail(lost)

    async def _resume(self, lost: EpisodeLost) -> None:
        """Reconnect and resume all sessions, or lose them all."""
        try:
            await self._reconnector.connect(self.open)
        except ConnectFailed:
            self._lose_all(lost)
            return
        except PaddockError:
            return
        self.reconnects += 1
        resumable = [
            session for session in self.sessions.values() if session.token is not None or not session.opened.done()
        ]
        self.send([session.open_message() for session in resumable])


def read_result(reply: dict[str, Any]) -> SessionResult:
    """The step result or the error in a reply."""
    return from_wire(reply["data"]) if reply["type"] == "error" else step_result(reply["data"])
