"""One HTTP request to a fleet: sent once or with retries; every failure is a `FleetError` that says whether it ran.

Invariant: a response counts as success only if it does not say `success: false`, whatever its status. A caller for
which a failure is data (an SQL error, a failed verifier) has to ask for it. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import aiohttp
import orjson

from paddock.fleet.client.errors import (
    AnswerLost,
    FleetError,
    FleetTimeout,
    InstanceLimit,
    PlaneError,
    ProtocolError,
    RequestRefused,
    Unreachable,
    Unsendable,
)
from paddock.http_pool import http_pool
from paddock.protocol.codec import decode_any, encode_any
from paddock.protocol.redact import redact
from paddock.retry import Backoff, Deadline, FailedAttempt, parse_retry_after, retry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

T = TypeVar("T")
FailedRequest: TypeAlias = FailedAttempt[FleetError]

MAX_MESSAGE_CHARS = 300
MAX_RETRY_AFTER_SECONDS = 120.0
"""A longer `Retry-After` is shortened to this."""
TEXT_STATUSES = frozenset((400, 403))
"""Statuses of final refusals that planes also use for transient conditions, stated in the text."""
_TRANSIENT = re.compile(
    r"""health[ -]?check|rate[ -]?limit|too many (?:requests|in-flight)|temporarily|timed out|timeout"""
    r"""|["']?\bretryable["']?\s*[:=]\s*true""",
    re.IGNORECASE,
)
_FINAL = re.compile(r"""["']?\bretryable["']?\s*[:=]\s*false""", re.IGNORECASE)
FAILED_STATUSES = frozenset(("error", "failed", "failure"))
"""Values of a `status` field for work that was not done."""
_LIMIT = re.compile(r"\binstance limit\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FleetReply:
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Raises ProtocolError."""
        return decode_response(self.body)


async def send(
    method: str,
    url: str,
    *,
    timeout: float,
    document: Any = None,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    failure_is_data: bool = False,
) -> FleetReply:
    """Send one request, once, and read the whole answer within `timeout` seconds of wall-clock time.

    Raises Unreachable, AnswerLost, FleetTimeout, PlaneError for an error status, or RequestRefused for an answer with
    `success: false`, which `failure_is_data` returns instead.
    """
    reply = await within(timeout, _exchange(method, url, document, headers, params), f"{method} {url}")
    refused = None if failure_is_data else _find_refusal(reply.body)
    if refused is not None:
        retryable = _read_error(reply.body)[1]
        rest = {name: value for name, value in refused.items() if name != "success"}
        reason = redact(shorten(_find_message(rest) or "no reason given"))
        # Read like a 400: it is the same refusal with another status.
        is_transient = _is_transient(400, refused, retryable) is True
        raise RequestRefused(f"{method} {url} refused: {reason}", detail=refused, retryable=is_transient)
    return reply


async def _exchange(
    method: str, url: str, document: Any, headers: Mapping[str, str] | None, params: Mapping[str, str] | None
) -> FleetReply:
    session = await http_pool()
    body, sent_headers = _encode_request(document, headers)
    try:
        async with session.request(
            method, url, data=body, headers=sent_headers, params=params, allow_redirects=False
        ) as response:
            return check_status(FleetReply(response.status, response.headers, await response.read()), method, url)
    except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise connection_error(error, method, url) from error


def _encode_request(document: Any, headers: Mapping[str, str] | None) -> tuple[bytes | None, dict[str, str]]:
    sent_headers = dict(headers or {})
    if document is None:
        return None, sent_headers
    sent_headers["Content-Type"] = "application/json"
    try:
        return encode_any(document), sent_headers
    except ValueError as error:
        raise Unsendable(f"this cannot be written as JSON: {error}") from error


def decode_response(body: bytes | str) -> Any:
    """Raises ProtocolError."""
    try:
        return decode_any(body)
    except ValueError as error:
        raise ProtocolError(f"the answer is not JSON: {redact(shorten(body))}") from error


def check_status(reply: FleetReply, method: str, url: str) -> FleetReply:
    """The reply, if it is not an error."""
    if reply.status < 300:
        return reply
    detail, stated_retryable = _read_error(reply.body)
    message = f"{method} {url} answered {reply.status}: {redact(shorten(_find_message(detail)))}"
    error = InstanceLimit if _is_instance_limit(reply.status, detail) else PlaneError
    raise error(
        message,
        status=reply.status,
        detail=detail,
        retryable=_is_transient(reply.status, detail, stated_retryable),
        retry_after=parse_retry_after(reply.headers.get("Retry-After"), longest_seconds=MAX_RETRY_AFTER_SECONDS),
    )


def connection_error(error: BaseException, method: str, url: str) -> FleetError:
    """The error for a broken exchange: the request was not sent, or it may have run."""
    what = f"{method} {url}"
    if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
        return ProtocolError(f"{what}: not a usable address", hint="check FLEET_BASE_URL")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        unreachable = Unreachable(f"{what}: no connection ({type(error).__name__})")
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
            unreachable.transient = False
        return unreachable
    return AnswerLost(f"{what}: the connection broke before the answer was complete ({type(error).__name__})")


def shorten(value: Any) -> str:
    """A value as a short text for a message."""
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= MAX_MESSAGE_CHARS else f"{text[:MAX_MESSAGE_CHARS]}…"


# -- reading refusals ---------------------------------------------------------------------------------


def _read_error(body: bytes) -> tuple[Any, bool | None]:
    """The `detail` of an error body, or the whole body; and its `retryable` flag, if it has one."""
    try:
        document = orjson.loads(body)
    except ValueError:
        return body.decode(errors="replace"), None
    if not isinstance(document, dict):
        return document, None
    detail = document.get("detail", document)
    levels = [level for level in (detail, document) if isinstance(level, dict)]
    levels += [level["error"] for level in levels if isinstance(level.get("error"), dict)]
    flags = (level.get("retryable") for level in levels)
    return detail, next((flag for flag in flags if isinstance(flag, bool)), None)


def _find_message(detail: Any) -> Any:
    """The message of a refusal, whichever field holds it."""
    if not isinstance(detail, dict):
        return detail
    for name in ("message", "error", "detail", "reason"):
        message = detail.get(name)
        if isinstance(message, dict):
            return _find_message(message)
        if message:
            return message
    return detail


def _is_transient(status: int, detail: Any, retryable: bool | None) -> bool | None:
    """Whether the same request may succeed later; None when the status alone decides.

    A `retryable` flag decides. Without one, the text of a 400 or 403 does: planes report rate limits and failed
    health checks that way.
    """
    if retryable is not None:
        return retryable
    if status not in TEXT_STATUSES:
        return None
    text = detail if isinstance(detail, str) else orjson.dumps(detail, default=str).decode()
    if _FINAL.search(text):
        return False
    return True if _TRANSIENT.search(text) else None


def _is_instance_limit(status: int, detail: Any) -> bool:
    """Whether the plane refused a create because of its instance limit."""
    kind = detail.get("error_type") if isinstance(detail, dict) else None
    if kind is not None:
        return bool(kind == "instance_limit_exceeded")
    return status == 403 and _LIMIT.search(str(_find_message(detail))) is not None


def _find_refusal(body: bytes) -> dict[str, Any] | None:
    """The document of a response with `success: false`; None for any other response."""
    if b'"success"' not in body:
        return None
    try:
        document = orjson.loads(body)
    except ValueError:
        return None
    if not isinstance(document, dict) or "success" not in document or document["success"] is True:
        return None
    return document


def is_confirmed(document: Any) -> bool:
    """Whether a response confirms the work: `success: true`, or an observation and no failure."""
    if not isinstance(document, dict):
        return False
    if "success" in document:
        return document["success"] is True
    is_failed = (
        bool(document.get("error")) or document.get("ok") is False or document.get("status") in FAILED_STATUSES
    )
    return document.get("observation") is not None and not is_failed


# -- deadlines and retries ----------------------------------------------------------------------------


async def within(seconds: float, work: Awaitable[T], what: str) -> T:
    """The result of `work`. Raises FleetTimeout if it takes longer; a cancelled caller is cancelled at once."""
    try:
        async with asyncio.timeout(max(seconds, 0.0)) as limit:
            return await work
    except TimeoutError as error:
        if limit.expired():
            raise FleetTimeout(f"{what} took longer than {seconds:.3g} s") from error
        raise


async def retry_request(
    work: Callable[[], Awaitable[T]],
    *,
    what: str,
    deadline: Deadline,
    backoff: Backoff,
    may_retry: Callable[[FleetError], bool],
    attempt_seconds: float | None = None,
    before_retry: Callable[[FailedRequest], Awaitable[None]] | None = None,
    counts: Callable[[FleetError], bool] | None = None,
) -> T:
    """`paddock.retry.retry` for requests to a fleet: an attempt that takes too long raises FleetTimeout."""

    async def report(failed: FailedRequest) -> None:
        if before_retry is not None:
            await within(deadline.seconds_left, before_retry(failed), what)

    return await retry(
        lambda seconds: within(seconds, work(), what),
        errors=FleetError,
        deadline=deadline,
        backoff=backoff,
        may_retry=may_retry,
        attempt_seconds=attempt_seconds,
        before_retry=report,
        counts=counts,
    )
