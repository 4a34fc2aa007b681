"""A session over WebSocket that survives dropped connections.

Against Paddock every request is numbered. After a drop the transport resumes the same session and repeats the
requests without a reply; the server executes each number once, and repeats its reply. Against OpenEnv's own server,
which has neither numbers nor resumption, a drop raises EpisodeLost.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from paddock.client.reconnect import Reconnector, episode_lost, no_answer
from paddock.client.requests import encode_request, server_url
from paddock.client.transports.http import NOTICE_SECONDS, close_session, get_json
from paddock.client.transports.pending import PendingRequests
from paddock.client.transports.socket import WebSocketConnection, open_socket, socket_address
from paddock.errors import (
    ClientError,
    ConnectFailed,
    PaddockError,
    SessionClosed,
    SessionNotFound,
    from_wire,
)

if TYPE_CHECKING:
    from paddock.client.transports import ConnectOptions

CLOSE_MESSAGE_TOO_BIG = 1009
LEAST_SECONDS = 0.001
"""A request that is sent has a deadline above 0, however long it took to connect."""
logger = logging.getLogger("paddock.client")


class WebSocketTransport:
    """The transport `ws`: one session, one WebSocket connection at a time."""

    def __init__(self, url: str, options: ConnectOptions) -> None:
        self.base = server_url(url)
        self.timeouts = options.timeouts
        self.reconnects = 0
        self.deterministic = False
        """Whether the environment declares that the same actions lead to the same observations."""
        self._headers = options.headers
        self._reconnect = options.reconnect
        self._reconnector = Reconnector(options.reconnect)
        self._queue_timeout = options.queue_timeout
        self._on_queue = options.on_queue
        self._loop: asyncio.AbstractEventLoop
        """The loop that the connection was opened on."""
        self._opening = asyncio.Lock()
        self._attempt = 0
        self._socket: WebSocketConnection | None = None
        self._token: str | None = None
        self._pending = PendingRequests(self._send_frame)
        self._reconnecting: asyncio.Task[None] | None = None
        self._opened_at = 0.0
        self._queued_since: float | None = None
        """When we connected, if the server then put us in its queue; None otherwise."""
        self._error: PaddockError | None = None
        """Why the episode is lost."""
        self._closed = False

    # -- Transport --------------------------------------------------------------------------------

    async def open(self, slot: dict[str, Any] | None = None) -> None:
        """Connect, unless connected. A closed client may be opened again.

        `slot` is the address and lease of a free slot, if the gateway of a cluster named one.
        """
        if self._closed and not self._opening.locked():
            self._closed = False
        async with self._opening:
            if self._socket is not None or self._reconnecting is not None:
                return
            self._error = self._queued_since = None
            self._loop = asyncio.get_running_loop()
            self._opened_at = self._loop.time()
            self._start_session(await self._connect(self._new_session_headers(self._queue_timeout), **(slot or {})))

    def _new_session_headers(self, queue_timeout: float | None) -> dict[str, str]:
        headers = dict(self._headers)
        if self._reconnect.within > 0:
            headers["Session-Resume"] = "new"
        if queue_timeout is not None:
            headers["Queue-Timeout"] = f"{queue_timeout:g}"
        return headers

    def _start_session(self, socket: WebSocketConnection) -> None:
        """Use the connection of a new session, unless it failed or the client was closed meanwhile."""
        self.deterministic = "Paddock-Deterministic" in socket.headers
        self._pending.is_foreign = "Paddock-Version" not in socket.headers
        if self._error is None and not self._closed:
            self._token = socket.headers.get("Session-Id")
            self._adopt(socket)
        else:
            socket.close()

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind, seconds_left = message["type"], timeout
        if self._socket is None or self._error is not None or self._closed:
            seconds_left = await self._ensure_open(message, timeout)
        pending = self._pending.add(encode_request(message, kind), seconds_left, self._loop, is_reset=kind == "reset")
        try:
            reply = await pending.reply
        except asyncio.CancelledError:
            self._pending.cancel(pending)
            raise
        if reply is None:
            raise no_answer(message, timeout)
        if isinstance(reply, PaddockError):
            raise reply
        if reply["type"] == "error":
            raise from_wire(reply["data"])
        return reply

    async def fetch(self, path: str) -> Any:
        return await get_json(self.base + path, self._headers, self.timeouts.connect)

    async def close(self) -> None:
        """End the session on the server, and the connection."""
        socket = self._detach_socket()
        if socket is not None:
            socket.send(b'{"type":"close"}')
            await socket.close_and_wait()
        elif self._token is not None and self._error is None:
            # The connection dropped: without a notice the server would keep the session for a resumption.
            with suppress(PaddockError):
                await close_session(self.base, self._headers, self._token, NOTICE_SECONDS)
        self._token = None
        self._fail(ClientError("the client was closed"))

    def abandon(self) -> bool:
        """Close without waiting, because the client was garbage-collected. False if there was nothing to close."""
        was_open = not self._closed and (self._socket is not None or self._reconnecting is not None)
        socket = self._detach_socket()
        if socket is not None:
            socket.send(b'{"type":"close"}')
            socket.close()
        return was_open

    def _detach_socket(self) -> WebSocketConnection | None:
        self._closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        self._pending.stop_timer()
        socket, self._socket = self._socket, None
        return None if socket is None or socket.is_lost else socket

    def drop(self) -> None:
        """Abort the connection, as a broken network would. For tests of reconnecting."""
        if self._socket is not None:
            self._socket.abort()

    # -- sending ----------------------------------------------------------------------------------

    async def _ensure_open(self, message: dict[str, Any], timeout: float | None) -> float | None:
        """Connect if needed, and return the seconds left. A reset may replace a session that is lost."""
        self._check_not_closed()
        if self._error is not None:
            if message["type"] != "reset":
                raise self._error
            self._forget_episode()
        try:
            async with asyncio.timeout(timeout) as deadline:
                await self.open()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise no_answer(message, timeout) from None
        if self._error is not None:
            raise self._error
        self._check_not_closed()
        expires_at = deadline.when()
        return None if expires_at is None else max(LEAST_SECONDS, expires_at - self._loop.time())

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ClientError("the client is closed")

    def _send_frame(self, frame: bytes) -> None:
        """Send a frame, if connected."""
        if self._socket is not None and not self._socket.is_lost:
            self._socket.send(frame)

    # -- receiving --------------------------------------------------------------------------------

    def _on_message(self, attempt: int, raw: bytes) -> None:
        if attempt != self._attempt:
            return
        reply = orjson.loads(raw)
        if self._pending.accept_reply(reply):
            self._reconnector.record_answer()
        else:
            self._on_notice(reply)

    def _on_notice(self, message: dict[str, Any]) -> None:
        """A message that replies to no request."""
        if message["type"] == "queued":
            self._queued_since = self._opened_at
            if self._on_queue is not None:
                self._on_queue(message["data"]["place"])
        elif message["type"] == "moved":
            self._follow_slot(message["data"])
        elif message["type"] == "error":
            self._on_session_error(from_wire(message["data"]))

    def _on_session_error(self, error: PaddockError) -> None:
        """An error without a number is about the session itself: it does not exist, or not any more."""
        if isinstance(error, SessionNotFound) and self._pending.only_reset_is_waiting():
            self._forget_episode()
            self._reconnecting = self._loop.create_task(self._open_new_session())
            return
        if isinstance(error, (SessionNotFound, SessionClosed)):
            error = episode_lost(error.message, self._token)
        self._token = None
        self._fail(error)

    def _follow_slot(self, slot: dict[str, Any]) -> None:
        """A slot came free on another host: connect to it, and send the requests without a reply there."""
        socket, self._socket, self._queued_since = self._socket, None, None
        if socket is not None:
            socket.close()
        self._reconnecting = self._loop.create_task(self._open_new_session(slot))

    async def _open_new_session(self, slot: dict[str, Any] | None = None) -> None:
        """Open a new session and send the requests without a reply to it."""
        self._reconnecting = None
        try:
            await self.open(slot)
        except PaddockError as error:
            self._fail(error)
            return
        self._pending.resend()

    def _adopt(self, socket: WebSocketConnection) -> None:
        """Use this connection, unless it is lost already."""
        self._socket = socket
        if socket.is_lost:
            self._on_lost(socket)

    def _on_lost(self, socket: WebSocketConnection) -> None:
        if socket is not self._socket:
            return
        self._socket = None
        if self._closed:
            return
        if socket.code == CLOSE_MESSAGE_TOO_BIG:
            self._pending.fail_largest()
        is_idle = self._error is None and self._reconnecting is None
        if self._token is None and self._queued_since is not None and is_idle:
            self._reconnecting = self._loop.create_task(self._queue_again(self._queued_since))
        elif self._token is None or self._reconnect.within <= 0:
            why = f"the connection dropped ({socket.code} {socket.reason})".rstrip()
            if self._pending.has_unnumbered:
                why += ", and what was unanswered may have been executed"
            self._fail(self._error or episode_lost(why))
        elif self._reconnecting is None:
            self._reconnecting = self._loop.create_task(self._resume())

    async def _resume(self) -> None:
        """Reconnect to the same session and repeat the requests without a reply."""
        try:
            headers = {**self._headers, "Session-Resume": self._token or ""}
            socket = await self._reconnector.connect(lambda: self._connect(headers))
        except ConnectFailed as error:
            self._token = None
            self._fail(episode_lost(f"could not reconnect: {error}"))
            return
        finally:
            self._reconnecting = None
        if self._error is not None or self._closed:
            socket.close()
            return
        self.reconnects += 1
        logger.info("reconnected to %s, the episode continues", self.base)
        self._adopt(socket)
        self._pending.resend()

    async def _queue_again(self, since: float) -> None:
        """The connection dropped while we queued: queue again, for the rest of the time."""
        seconds_left = self._queue_timeout
        if seconds_left is not None:
            seconds_left = max(0.0, since + seconds_left - self._loop.time())
        try:
            headers = self._new_session_headers(seconds_left)
            socket = await self._reconnector.connect(lambda: self._connect(headers))
        except ConnectFailed as error:
            self._fail(error)
            return
        finally:
            self._reconnecting = None
        self._start_session(socket)
        self._pending.resend()

    def _fail(self, error: PaddockError) -> None:
        """Fail every waiting caller, and the next ones too, until a reset begins a new episode."""
        self._error = error
        self._pending.fail_all(error)

    def _forget_episode(self) -> None:
        self._error = None
        self._token = None
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            self._reconnecting = None
        socket, self._socket = self._socket, None
        if socket is not None and not socket.is_lost:
            socket.close()

    async def _connect(
        self, headers: dict[str, str], url: str | None = None, lease: str | None = None
    ) -> WebSocketConnection:
        address = socket_address(url or self.base, f"lease={lease}" if lease else "")
        self._attempt = attempt = self._attempt + 1
        on_message = partial(self._on_message, attempt)
        try:
            return await open_socket(address, headers, on_message, self._on_lost, self.timeouts.connect)
        except asyncio.CancelledError:
            if attempt == self._attempt:
                # Messages of a connection without pending requests are ignored.
                self._attempt += 1
            raise
