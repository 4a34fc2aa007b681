"""HTTP as a fleet client needs it: every failure becomes a `FleetError` that says whether the request may have run.

Knows no endpoint. Connections are kept per event loop and shared by all clients on it; they end with the loop, so
a client that was never closed leaves no socket behind.
"""

from __future__ import annotations

import asyncio
import json
import weakref
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
from pydantic_core import from_json

from paddock.fleet.errors import (
    AnswerLost,
    FleetError,
    InstanceLimit,
    PlaneError,
    ProtocolError,
    RequestRefused,
    Unreachable,
    Unsendable,
)
from paddock.fleet.refusals import is_instance_limit, may_pass, message_of, read_error, refusal_in
from paddock.fleet.retry import within
from paddock.protocol.redact import redact

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

KEPT_IDLE = 4.0
"""Seconds an idle connection is kept. Common servers close theirs after 5 s, and a request that meets a closing
connection may or may not have run."""
CONNECT = 10.0
SHOWN = 300
LONGEST_WAIT = 120.0
"""A server that asks for a longer pause is not waited for longer than this before the next try."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer below 400."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises ProtocolError."""
        return decoded(self.body)


_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, Any]]
_sessions = weakref.WeakKeyDictionary()


async def connections() -> aiohttp.ClientSession:
    """The connections of the running loop."""
    loop = asyncio.get_running_loop()
    found = _sessions.get(loop)
    if found is None or found[0].closed:
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_IDLE),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            # A redirected POST would run at an address nobody named, with the key in its headers.
            headers={"User-Agent": "paddock-fleet"},
        )
        guard = _close_with_the_loop(session)
        found = _sessions[loop] = (session, guard)
        await anext(guard)
    return found[0]


async def _close_with_the_loop(session: aiohttp.ClientSession) -> AsyncGenerator[None]:
    # A loop that ends properly (`asyncio.run` does) closes its unfinished generators: the one hook it offers.
    try:
        yield
    finally:
        await session.close()


async def send(
    method: str,
    url: str,
    *,
    timeout: float,
    document: Any = None,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    failure_is_data: bool = False,
) -> Reply:
    """Send one request, once, and read the whole answer within `timeout` seconds of wall-clock time.

    Raises Unreachable, AnswerLost, FleetTimeout, PlaneError for an error status, or RequestRefused for an answer with
    `success: false`, which `failure_is_data` returns instead.
    """
    reply = await within(timeout, _exchange(method, url, document, headers, params), f"{method} {url}")
    refused = None if failure_is_data else refusal_in(reply.body)
    if refused is not None:
        stated = read_error(reply.body)[1]
        rest = {name: value for name, value in refused.items() if name != "success"}
        reason = redact(shown(message_of(rest) or "no reason given"))
        # The words count as they do in a 400: this is the same refusal under another status.
        passing = may_pass(400, refused, stated) is True
        raise RequestRefused(f"{method} {url} refused: {reason}", detail=refused, retryable=passing)
    return reply


async def _exchange(
    method: str, url: str, document: Any, headers: Mapping[str, str] | None, params: Mapping[str, str] | None
) -> Reply:
    session = await connections()
    body, sent = encoded(document, headers)
    try:
        async with session.request(
            method, url, data=body, headers=sent, params=params, allow_redirects=False
        ) as response:
            return checked(Reply(response.status, response.headers, await response.read()), method, url)
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise failure(error, method, url) from error


def encoded(document: Any, headers: Mapping[str, str] | None) -> tuple[bytes | None, dict[str, str]]:
    sent = dict(headers or {})
    if document is None:
        return None, sent
    sent["Content-Type"] = "application/json"
    try:
        return orjson.dumps(document), sent
    except TypeError:
        # Agents write integers of any length and broken characters; the slow writer knows both.
        try:
            return json.dumps(document, allow_nan=False).encode(), sent
        except (TypeError, ValueError, RecursionError) as error:
            raise Unsendable(f"this cannot be written as JSON: {error}") from error


def decoded(body: bytes | str) -> Any:
    """Raises ProtocolError."""
    try:
        return from_json(body)
    except ValueError:
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the answer is not JSON: {redact(shown(body))}") from error


def checked(reply: Reply, method: str, url: str) -> Reply:
    """The reply, if it is not an error."""
    if reply.status < 300:
        return reply
    detail, stated = read_error(reply.body)
    message = f"{method} {url} answered {reply.status}: {redact(shown(message_of(detail)))}"
    error = InstanceLimit if is_instance_limit(reply.status, detail) else PlaneError
    retryable, wait = may_pass(reply.status, detail, stated), retry_after(reply.headers)
    raise error(message, status=reply.status, detail=detail, retryable=retryable, retry_after=wait)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds the server asks to be left alone for: a number, or a date."""
    text = headers.get("Retry-After", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT)


def failure(error: BaseException, method: str, url: str) -> FleetError:
    """What a broken exchange means: did the request leave us or not?"""
    what = f"{method} {url}"
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return ProtocolError(f"{what}: not a usable address", hint="check FLEET_BASE_URL")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        unreachable = Unreachable(f"{what}: no connection ({type(error).__name__})")
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
            unreachable.transient = False
        return unreachable
    return AnswerLost(f"{what}: the connection broke before the answer was complete ({type(error).__name__})")


def shown(value: Any) -> str:
    """A short form for a message."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
