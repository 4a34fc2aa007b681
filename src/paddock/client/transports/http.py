"""Plain HTTP: single GETs, and episodes over `/reset`, `/step` and `/state`."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import h11
import orjson

from paddock.client.reconnect import Reconnector, episode_lost, no_answer, outcome_unknown
from paddock.client.requests import encode_request, server_url
from paddock.errors import (
    ClientError,
    ConnectFailed,
    InvalidMessage,
    PaddockError,
    ServerError,
    SessionClosed,
    SessionNotFound,
    Unauthorized,
    from_wire,
)
from paddock.net import HttpConnection
from paddock.protocol import mcp
from paddock.protocol.codec import encode

if TYPE_CHECKING:
    from paddock.client.transports import ConnectOptions

REQUEST_NAMES = {"/step": "step", "/reset": "reset", "/mcp": "call"}
"""By path, for error messages."""
NOTICE_SECONDS = 2.0
"""How long the notice that a request was cancelled, or a session is not needed, may take."""


async def get_json(url: str, headers: dict[str, str], timeout: float | None) -> Any:
    """The JSON behind one GET. Raises ConnectFailed, Unauthorized or ServerError."""
    return await _exchange_once("GET", url, headers, b"", timeout)


async def post_json(url: str, headers: dict[str, str], document: Any, timeout: float | None) -> Any:
    """The JSON that answers one POST. Raises ConnectFailed, or the error that the server reports."""
    return await _exchange_once("POST", url, headers, encode(document), timeout)


async def _exchange_once(
    method: str, url: str, headers: dict[str, str], content: bytes, timeout: float | None
) -> Any:
    parts = urlsplit(url)
    connection = HttpConnection(f"{parts.scheme}://{parts.netloc}", headers)
    try:
        async with asyncio.timeout(timeout):
            status, _, body = await connection.request(method, parts.path or "/", content)
    except TimeoutError:
        raise ConnectFailed(f"{url} did not answer within {timeout} s", hint="is the server up?") from None
    except (OSError, h11.RemoteProtocolError) as error:
        raise ConnectFailed(f"cannot reach {url}: {error}", hint="is the server up, and the port right?") from error
    finally:
        await connection.close()
    if status >= 400:
        raise error_of(status, body)
    return orjson.loads(body)


def error_of(status: int, body: bytes) -> PaddockError:
    """The error in an HTTP response of Paddock's or another server."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ServerError(f"HTTP {status}: {body[:200].decode(errors='replace')}", status=status)
    detail = document.get("detail") if isinstance(document, dict) else document
    if isinstance(document, dict) and "code" in document:
        return from_wire({**document, "message": detail, "detail": None})
    if isinstance(document, dict) and isinstance(document.get("error"), dict):
        detail = document["error"].get("message")
        if status == 404:
            # MCP's way to say that there is no such session.
            return SessionNotFound(str(detail))
    if status == 401:
        return Unauthorized(str(detail))
    if status == 422:
        return InvalidMessage("Invalid request", errors=detail)
    return ServerError(f"HTTP {status}: {detail}", status=status)


class HttpTransport:
    """An episode over plain HTTP. The header `Session-Id` names its session; without it there is no episode.

    A server that hands out a session executes a numbered request at most once (`NewestRequest`). So a request
    whose answer was lost is repeated under its number. Any other server cannot tell a repeat from a new request: then
    the caller gets OutcomeUnknown.
    """

    def __init__(self, url: str, options: ConnectOptions) -> None:
        self.base = server_url(url)
        self.timeouts = options.timeouts
        self._headers = options.headers
        self._reconnect = options.reconnect
        self._connection = HttpConnection(self.base, self._headers)
        self._session: str | None = None
        self._number = 0
        self._request_lock = asyncio.Lock()
        """One request at a time, its repeats included: the server refuses a number below the last one."""
        self._notices: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """There is nothing to open: the first request connects."""

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind, data = message["type"], message.get("data", {})
        method, path, content = "POST", f"/{kind}", b""
        if kind == "state":
            method = "GET"
        elif kind == "step":
            content = encode_request(
                {"action": data, **({} if timeout in (None, inf) else {"timeout_s": timeout})}, kind
            )
        else:
            content = encode_request(data, kind)
        try:
            async with asyncio.timeout(timeout) as deadline, self._request_lock:
                answer = await self._exchange(method, path, content)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise no_answer(message, timeout) from None
        if kind == "reset" and self._session is None:
            raise ClientError(
                "the server keeps no episode over HTTP: every step would act in an environment of its own",
                hint="use the WebSocket transport; if this is a Paddock server it is full, and has to free a slot",
            )
        return {"type": kind if kind in ("mcp", "state") else "observation", "data": answer}

    async def fetch(self, path: str) -> Any:
        return await get_json(self.base + path, self._headers, self.timeouts.connect)

    async def close(self) -> None:
        """End the episode on the server too, as far as it knows how."""
        session, self._session = self._session, None
        if session is not None:
            with suppress(PaddockError):
                await close_session(self.base, self._headers, session, self.timeouts.connect)
        for notice in self._notices:
            notice.cancel()
        await self._connection.close()

    def abandon(self) -> bool:
        """Close without waiting. The session is ended from a thread, because the loop may be about to end."""
        session, self._session = self._session, None
        with suppress(RuntimeError):
            # Raised if the loop has ended already.
            self._connection.abandon()
        if session is not None:
            close = partial(_close_abandoned, self.base, self._headers, session)
            with suppress(RuntimeError):
                threading.Thread(target=close, name="paddock-client-close").start()
        return session is not None

    async def _exchange(self, method: str, path: str, content: bytes) -> Any:
        """The response to one request. If the caller is cancelled, the request is cancelled on the server."""
        headers: dict[str, str] = {}
        if self._session is not None:
            self._number += 1
            headers = self._session_headers(path, self._session, self._number)
        try:
            status, received, answer = await self._deliver(method, path, content, headers)
        except asyncio.CancelledError:
            if self._session is not None:
                self._notify_cancelled(self._session)
            raise
        if status >= 400:
            problem = error_of(status, answer)
            if isinstance(problem, (SessionNotFound, SessionClosed)):
                token, self._session = self._session, None
                raise episode_lost(problem.message, token)
            raise problem
        # A reset whose session is gone begins in a new one, or in none.
        self._session = received.get("session-id", None if path == "/reset" else self._session)
        return orjson.loads(answer)

    def _session_headers(self, path: str, session: str, number: int) -> dict[str, str]:
        name = mcp.SESSION_HEADER if path == "/mcp" else "session-id"
        return {name: session, "request-number": str(number)}

    async def _deliver(
        self, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request, and repeat it if the answer is lost and the server recognises it by its number."""
        attempt = partial(self._attempt, method, path, content, headers)
        try:
            return await attempt()
        except ConnectFailed as error:
            if not self._connection.has_sent:
                raise
            lost = error
        # A reset that begins an episode may be repeated too: the server evicts an episode that no client continues.
        if (headers or method == "GET" or path == "/reset") and self._reconnect.within > 0:
            try:
                return await Reconnector(self._reconnect).connect(attempt)
            except ConnectFailed as error:
                lost = error
        if method == "GET":
            raise lost
        raise outcome_unknown(REQUEST_NAMES[path], str(lost)) from lost

    async def _attempt(
        self, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            return await self._connection.request(method, path, content, headers)
        except (OSError, h11.RemoteProtocolError) as error:
            raise ConnectFailed(f"cannot reach {self.base}: {error}", hint="is the server up?") from error

    def _notify_cancelled(self, session: str) -> None:
        """The server continues a numbered request when its connection drops. A later number stops it."""
        self._number += 1
        call = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {}}
        notice = asyncio.ensure_future(self._notify(call, self._session_headers("/mcp", session, self._number)))
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def _notify(self, call: dict[str, Any], headers: dict[str, str]) -> None:
        connection = HttpConnection(self.base, self._headers)
        with suppress(OSError, h11.RemoteProtocolError, TimeoutError):
            try:
                async with asyncio.timeout(NOTICE_SECONDS):
                    await connection.request("POST", "/mcp", encode(call), headers)
            finally:
                await connection.close()


def _close_abandoned(base: str, headers: dict[str, str], session: str) -> None:
    with suppress(PaddockError):
        asyncio.run(close_session(base, headers, session, NOTICE_SECONDS))


async def close_session(base: str, headers: dict[str, str], session: str, timeout: float | None) -> None:
    """End a session on its server. Raises ConnectFailed, or what the server reports."""
    call = {"jsonrpc": "2.0", "id": 0, "method": "openenv/session/close", "params": {"session_id": session}}
    await post_json(f"{base}/mcp", {**headers, mcp.SESSION_HEADER: session}, call, timeout)
