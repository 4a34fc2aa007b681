"""Plain HTTP: single GETs, and episodes over `/reset`, `/step` and `/state`."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any
from urllib.parse import urlsplit

import h11
import orjson

from paddock.client.outgoing import write
from paddock.client.policy import Reconnect, Timeouts
from paddock.client.returning import Tries, episode_lost, no_answer, outcome_unknown
from paddock.client.transports.address import server_url
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
from paddock.protocol.codec import encode

REQUESTS = {"/step": "step", "/reset": "reset", "/mcp": "call"}
"""What a caller calls the request behind each path."""
NOTICE_SECONDS = 2.0
"""How long the notice that a request was given up may take."""


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
    """The error behind an HTTP answer, whoever's server sent it."""
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
            # So MCP tells that there is no such session.
            return SessionNotFound(str(detail))
    if status == 401:
        return Unauthorized(str(detail))
    if status == 422:
        return InvalidMessage("Invalid request", errors=detail)
    return ServerError(f"HTTP {status}: {detail}", status=status)


class HttpTransport:
    """An episode over plain HTTP. The server's `Session-Id` keeps it together: without one there is no episode.

    A server that hands out a session executes a numbered request at most once (`sessions/numbered.py`). So a request
    whose answer was lost is repeated under its number. Any other server cannot tell a repeat from a new request: then
    the caller is told that the outcome is unknown.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        timeouts: Timeouts | None = None,
        reconnect: Reconnect | None = None,
    ) -> None:
        self.base = server_url(url)
        self.timeouts = timeouts or Timeouts()
        self._headers = headers or {}
        self._reconnect = reconnect or Reconnect()
        self._connection = HttpConnection(self.base, self._headers)
        self._session: str | None = None
        self._number = 0
        self._turn = asyncio.Lock()
        """One request at a time, its repeats included: a later number would make them late."""
        self._notices: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """There is nothing to open: the first request connects."""

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind, data = message["type"], message.get("data", {})
        method, path, content = "POST", f"/{kind}", b""
        if kind == "state":
            method = "GET"
        elif kind == "step":
            content = write({"action": data, **({} if timeout in (None, inf) else {"timeout_s": timeout})}, kind)
        else:
            content = write(data, kind)
        try:
            async with asyncio.timeout(timeout) as deadline, self._turn:
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
        """Leave without waiting for anything. The session is ended from a thread: the loop may be about to end."""
        session, self._session = self._session, None
        with suppress(RuntimeError):
            # Raised if the loop has ended already.
            self._connection.abandon()
        if session is not None:
            leave = partial(_close_forgotten, self.base, self._headers, session)
            with suppress(RuntimeError):
                threading.Thread(target=leave, name="paddock-client-close").start()
        return session is not None

    async def _exchange(self, method: str, path: str, content: bytes) -> Any:
        """The answer to one request. A caller that is cancelled gives it up."""
        headers: dict[str, str] = {}
        if self._session is not None:
            self._number += 1
            headers = self._named(path, self._session, self._number)
        try:
            status, received, answer = await self._deliver(method, path, content, headers)
        except asyncio.CancelledError:
            if self._session is not None:
                self._tell_given_up(self._session)
            raise
        if status >= 400:
            problem = error_of(status, answer)
            if isinstance(problem, (SessionNotFound, SessionClosed)):
                token, self._session = self._session, None
                raise episode_lost(problem.message, token)
            raise problem
        # A reset that finds its session gone begins in a new one, or in none.
        self._session = received.get("session-id", None if path == "/reset" else self._session)
        return orjson.loads(answer)

    def _named(self, path: str, session: str, number: int) -> dict[str, str]:
        name = "mcp-session-id" if path == "/mcp" else "session-id"
        return {name: session, "request-number": str(number)}

    async def _deliver(
        self, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request, and send it again if its answer is lost and the server knows it by its number."""
        attempt = partial(self._attempt, method, path, content, headers)
        try:
            return await attempt()
        except ConnectFailed as error:
            if not self._connection.has_sent:
                raise
            lost = error
        # A reset that begins an episode may be repeated too: one that nobody goes on with makes room.
        if (headers or method == "GET" or path == "/reset") and self._reconnect.within > 0:
            try:
                return await Tries(self._reconnect).reach(attempt)
            except ConnectFailed as error:
                lost = error
        if method == "GET":
            raise lost
        raise outcome_unknown(REQUESTS[path], str(lost)) from lost

    async def _attempt(
        self, method: str, path: str, content: bytes, headers: dict[str, str]
    ) -> tuple[int, dict[str, str], bytes]:
        try:
            return await self._connection.request(method, path, content, headers)
        except (OSError, h11.RemoteProtocolError) as error:
            raise ConnectFailed(f"cannot reach {self.base}: {error}", hint="is the server up?") from error

    def _tell_given_up(self, session: str) -> None:
        """The server goes on with a numbered request when its connection drops. A later number stops it."""
        self._number += 1
        call = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {}}
        notice = asyncio.ensure_future(self._notify(call, self._named("/mcp", session, self._number)))
        self._notices.add(notice)
        notice.add_done_callback(self._notices.discard)

    async def _notify(self, call: dict[str, Any], named: dict[str, str]) -> None:
        connection = HttpConnection(self.base, self._headers)
        with suppress(OSError, h11.RemoteProtocolError, TimeoutError):
            try:
                async with asyncio.timeout(NOTICE_SECONDS):
                    await connection.request("POST", "/mcp", encode(call), named)
            finally:
                await connection.close()


def _close_forgotten(base: str, headers: dict[str, str], session: str) -> None:
    with suppress(PaddockError):
        asyncio.run(close_session(base, headers, session, NOTICE_SECONDS))


async def close_session(base: str, headers: dict[str, str], session: str, timeout: float | None) -> None:
    """Tell a server that a session is not needed any more. Raises ConnectFailed, or what the server reports."""
    call = {"jsonrpc": "2.0", "id": 0, "method": "openenv/session/close", "params": {"session_id": session}}
    await post_json(f"{base}/mcp", {**headers, "mcp-session-id": session}, call, timeout)
