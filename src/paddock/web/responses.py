"""Responses of the page: JSON, errors in one form, server-sent events, and headers that forbid foreign content."""

from __future__ import annotations

import gzip
import json
import logging
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from paddock.errors import PaddockError, StoreError
from paddock.protocol import sse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.requests import Request

    Endpoint = Callable[[Request], Awaitable[Response]]

logger = logging.getLogger("paddock.web")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self';"
    " form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
MIN_COMPRESSED_BYTES = 1400
"""A smaller body fits into one packet anyway."""


class PageError(PaddockError):
    """A request that the page cannot answer."""

    http_status: ClassVar[int] = 400
    code = "PAGE_ERROR"


class PageNotFound(PageError):
    http_status = 404


class PageConflict(PageError):
    http_status = 409


class PartMissing(PageError):
    """The page was started without this part: a store, a server or a plane."""

    http_status = 404


def json_response(request: Request, document: Any, status: int = 200) -> Response:
    """A document as JSON, compressed if the browser accepts that."""
    body = encode_json(document)
    headers = {"cache-control": "no-store", "content-type": "application/json", "vary": "accept-encoding"}
    if len(body) > MIN_COMPRESSED_BYTES and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 1)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers)


def encode_json(document: Any) -> bytes:
    try:
        return orjson.dumps(document)
    except TypeError:
        # Lone surrogates, which an agent may print, and integers beyond 64 bits.
        return json.dumps(document, ensure_ascii=True, default=str).encode()


def event_stream(events: AsyncIterator[bytes]) -> Response:
    """A response of server-sent events that ends with `events`."""
    return StreamingResponse(events, headers={"cache-control": "no-store"}, media_type=sse.MEDIA_TYPE)


def event(name: str, document: Any) -> bytes:
    return sse.write_event(encode_json(document), name)


def error_response(error: PaddockError) -> Response:
    status = error.http_status
    if isinstance(error, StoreError):
        status = 400 if "candidates" in error.data else 404 if error.data.get("missing") else 503
    return failure_response(status, error.message, error.hint)


def failure_response(status: int, message: str, hint: str | None = None) -> Response:
    body = orjson.dumps({"error": {"message": message, "hint": hint}})
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


def handle_errors(endpoint: Endpoint) -> Endpoint:
    """Decorates an endpoint: errors become responses."""

    async def handled(request: Request) -> Response:
        try:
            return await endpoint(request)
        except PaddockError as error:
            return error_response(error)
        except (ClientDisconnect, HTTPException):
            raise
        except Exception as error:
            logger.exception("%s failed", request.url.path)
            return failure_response(
                500, f"the page failed: {type(error).__name__}", "the log of the server says more"
            )

    return handled
