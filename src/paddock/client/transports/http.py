"""Plain HTTP: single GETs, and episodes over `/reset`, `/step` and `/state`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import h11
import orjson

from paddock.client.outgoing import write
from paddock.client.policy import Timeouts
from paddock.client.returning import episode_lost
from paddock.client.transports.address import server_url
from paddock.errors import (
    ClientError,
    ConnectFailed,
    DeadlineExceeded,
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
    """An episode over plain HTTP. The server's `Session-Id` keeps it together: without one there is no episode."""

    def __init__(self, url: str, *, headers: dict[str, str] | None = None, timeouts: Timeouts | None = None) -> None:
        self.base = server_url(url)
        self.timeouts = timeouts or Timeouts()
        self._headers = headers or {}
        self._connection = HttpConnection(self.base, self._headers)
        self._session: str | None = None

    async def open(self) -> None:
        """There is nothing to open: the first request connects."""

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind, data = message["type"], message.get("data", {})
        if kind == "mcp":
            return {"type": "mcp", "data": await self._exchange("POST", "/mcp", write(data, kind), timeout)}
        if kind == "state":
            return {"type": "state", "data": await self._exchange("GET", "/state", b"", timeout)}
        if kind == "step":
            data = {"action": data, **({} if timeout is None else {"timeout_s": timeout})}
        answer = await self._exchange("POST", f"/{kind}", write(data, kind), timeout)
        if kind == "reset" and self._session is None:
            raise ClientError(
                "the server keeps no episode over HTTP: every step would act in an environment of its own",
                hint="use the WebSocket transport; if this is a Paddock server it is full, and has to free a slot",
            )
        return {"type": "observation", "data": answer}

    async def fetch(self, path: str) -> Any:
        return await get_json(self.base + path, self._headers, self.timeouts.connect)

    async def close(self) -> None:
        """End the episode on the server too, as far as it knows how."""
        if self._session is not None:
            params = {"session_id": self._session}
            call = {"jsonrpc": "2.0", "id": 0, "method": "openenv/session/close", "params": params}
            with suppress(PaddockError):
                await self.request({"type": "mcp", "data": call}, self.timeouts.connect)
        await self._connection.close()

    async def _exchange(self, method: str, path: str, content: bytes, timeout: float | None) -> Any:
        name = "mcp-session-id" if path == "/mcp" else "session-id"
        headers = {name: self._session} if self._session else {}
        try:
            async with asyncio.timeout(timeout):
                status, received, answer = await self._connection.request(method, path, content, headers)
        except TimeoutError:
            raise DeadlineExceeded(f"no answer to {path} within {timeout} s") from None
        except (OSError, h11.RemoteProtocolError) as error:
            raise ConnectFailed(f"cannot reach {self.base}: {error}", hint="is the server up?") from error
        if status >= 400:
            problem = error_of(status, answer)
            if isinstance(problem, (SessionNotFound, SessionClosed)):
                token, self._session = self._session, None
                raise episode_lost(problem.message, token)
            raise problem
        # A reset that finds its session gone begins in a new one, or in none.
        self._session = received.get("session-id", None if path == "/reset" else self._session)
        return orjson.loads(answer)
