"""What every answer of the page has in common: JSON, errors in one form, and headers that let nothing else in."""

from __future__ import annotations

import gzip
import json
import logging
from typing import TYPE_CHECKING, Any, ClassVar

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from paddock.errors import PaddockError, StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

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
SMALL = 1400
"""What fits into one packet anyway is not compressed."""


class PageError(PaddockError):
    """Something asked of the page that it cannot answer."""

    http_status: ClassVar[int] = 400
    code = "PAGE_ERROR"


class NotFound(PageError):
    http_status = 404


class Conflict(PageError):
    http_status = 409


class NotHere(PageError):
    """This page has no such part: it depends on what it was started with."""

    http_status = 404


def answer(request: Request, document: Any, status: int = 200) -> Response:
    """A document as JSON, compressed where the browser takes that."""
    body = encode(document)
    headers = {"cache-control": "no-store", "content-type": "application/json", "vary": "accept-encoding"}
    if len(body) > SMALL and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 1)
        headers["content-encoding"] = "gzip"
    return Response(body, status, headers)


def encode(document: Any) -> bytes:
    try:
        return orjson.dumps(document)
    except TypeError:
        # Lone surrogates, which an agent may print, and integers beyond 64 bits.
        return json.dumps(document, ensure_ascii=True, default=str).encode()


def refusal(error: PaddockError) -> Response:
    status = error.http_status
    if isinstance(error, StoreError):
        status = 400 if "candidates" in error.data else 404 if error.data.get("missing") else 503
    return failure(status, error.message, error.hint)


def failure(status: int, message: str, hint: str | None = None) -> Response:
    body = orjson.dumps({"error": {"message": message, "hint": hint}})
    return Response(body, status, {"cache-control": "no-store"}, "application/json")


def answering(endpoint: Endpoint) -> Endpoint:
    """The same endpoint, with its errors as answers."""

    async def answered(request: Request) -> Response:
        try:
            return await endpoint(request)
        except PaddockError as error:
            return refusal(error)
        except (ClientDisconnect, HTTPException):
            raise
        except Exception as error:
            logger.exception("%s failed", request.url.path)
            return failure(500, f"the page failed: {type(error).__name__}", "the log of the server says more")

    return answered
