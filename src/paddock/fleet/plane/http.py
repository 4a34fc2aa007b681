"""Requests and responses of the plane: JSON bodies, validated fields, and errors.

The `fleet-python` SDK reads `detail` as a string, or as an object with a `message`; a list breaks it. It repeats 404,
429 and 5xx by itself, so a final refusal is a 400.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

from paddock.errors import PaddockError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_TEXT_CHARS = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PATH = re.compile(r"[^\x21-\x7e]")


class HttpError(PaddockError):
    """A request that is answered with an error status. Clients read `detail`."""

    code = "REFUSED"

    def __init__(
        self,
        status: int,
        detail: str | dict[str, Any],
        *,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail if isinstance(detail, str) else str(detail.get("message", detail)))
        self.status = status
        self.detail = detail
        self.retry_after = retry_after
        self.headers = dict(headers or {})

    def response(self) -> Response:
        body: dict[str, Any] = {"detail": self.detail}
        headers = self.headers
        if self.retry_after is not None:
            body["retryable"] = True
            headers = {**headers, "Retry-After": str(max(1, round(self.retry_after)))}
        return json_response(body, self.status, headers)


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def raw_json_response(body: str) -> Response:
    """A response from JSON text."""
    return Response(body, media_type="application/json")


async def read_object(request: Request, *, required: bool = True) -> RequestFields:
    """The JSON object that a request carries. Raises HttpError."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_big()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise _too_big()
    if not body and not required:
        return RequestFields({})
    try:
        document = orjson.loads(body)
    except ValueError as error:
        raise HttpError(400, f"The body is not JSON ({error}). Send a JSON object.") from None
    if not isinstance(document, dict):
        raise HttpError(400, f"The body is a JSON {_kind(document)}. Send a JSON object.")
    return RequestFields(document)


def read_request_id(request: Request) -> str | None:
    """The id under which a client repeats a request whose response it lost."""
    request_id = request.headers.get("x-request-id")
    if request_id is not None and len(request_id) > MAX_TEXT_CHARS:
        raise HttpError(
            400, f"X-Request-ID has {len(request_id)} characters. Send at most {MAX_TEXT_CHARS}, such as a UUID."
        )
    return request_id or None


class RequestFields:
    """The fields of a request, each validated when it is read. Missing and null are the same."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def text(self, name: str, max_chars: int = MAX_TEXT_CHARS) -> str | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise HttpError(400, f"'{name}' is a {_kind(value)}. Send a string.")
        if len(value) > max_chars:
            raise HttpError(400, f"'{name}' has {len(value)} characters. Send at most {max_chars}.")
        return value

    def require_text(self, name: str, max_chars: int = MAX_TEXT_CHARS) -> str:
        value = self.text(name, max_chars)
        if not value:
            raise HttpError(400, f"'{name}' is missing. Send it as a string.")
        return value

    def label(self, name: str) -> str | None:
        """A short text for paths, logs and lists: no control characters."""
        value = self.text(name)
        if value is not None and _CONTROL.search(value):
            raise HttpError(400, f"'{name}' holds control characters. Send plain text.")
        return value or None

    def integer(self, name: str, minimum: int, maximum: int) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise HttpError(400, f"'{name}' is a {_kind(value)}. Send a whole number from {minimum} to {maximum}.")
        if not minimum <= value <= maximum:
            raise HttpError(400, f"'{name}' is {value}. Send a whole number from {minimum} to {maximum}.")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise HttpError(400, f"'{name}' is a {_kind(value)}. Send an object.")
        return value

    def items(self, name: str, min_count: int = 0) -> list[Any] | None:
        value = self.values.get(name)
        if value is None and min_count == 0:
            return None
        if not isinstance(value, list):
            raise HttpError(400, f"'{name}' is a {_kind(value)}. Send a list.")
        if len(value) < min_count:
            raise HttpError(400, f"'{name}' has {len(value)} entries. Send at least {min_count}.")
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        value = self.text(name)
        if value is not None and value not in allowed:
            raise HttpError(400, f"'{name}' is '{printable(value)}'. Send one of {', '.join(allowed)}.")
        return value


def printable(text: str, max_chars: int = 100) -> str:
    """Text of a client, safe to repeat in an error message."""
    plain = _PATH.sub("?", text.replace(" ", "_"))
    return plain if len(plain) <= max_chars else plain[:max_chars] + "…"


def _too_big() -> HttpError:
    return HttpError(413, f"The body is larger than {MAX_BODY_BYTES // 2**20} MiB. Send less at once.")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "list"}
    return names.get(type(value), "object")
