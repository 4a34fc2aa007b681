"""How the plane answers: JSON, refusals with words, and hand-made validation.

Clients read `detail` as a string, or as an object with a `message`. A list there breaks them, and they
repeat 404, 429 and 5xx by themselves, so a final no is a 400.
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

MOST_BODY_BYTES = 32 * 1024 * 1024
MOST_TEXT = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PATH = re.compile(r"[^\x21-\x7e]")


class Refused(PaddockError):
    """A request that is answered with an error. `detail` is what clients read."""

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
        return answer(body, self.status, headers)


def answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def answer_text(body: str) -> Response:
    """An answer that is JSON already."""
    return Response(body, media_type="application/json")


async def read_object(request: Request, *, required: bool = True) -> Fields:
    """The JSON object that a request carries. Raises Refused."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MOST_BODY_BYTES:
        raise _too_big()
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_BODY_BYTES:
            raise _too_big()
    if not body and not required:
        return Fields({})
    try:
        found = orjson.loads(body)
    except ValueError as error:
        raise Refused(400, f"The body is not JSON ({error}). Send a JSON object.") from None
    if not isinstance(found, dict):
        raise Refused(400, f"The body is a JSON {_kind(found)}. Send a JSON object.")
    return Fields(found)


def request_id(request: Request) -> str | None:
    """The name under which a client repeats a request whose answer it lost."""
    given = request.headers.get("x-request-id")
    if given is not None and len(given) > MOST_TEXT:
        raise Refused(400, f"X-Request-ID has {len(given)} characters. Send at most {MOST_TEXT}, such as a UUID.")
    return given or None


class Fields:
    """The fields of a request, each checked when it is asked for. Missing and null are the same."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def text(self, name: str, most: int = MOST_TEXT) -> str | None:
        found = self.values.get(name)
        if found is None:
            return None
        if not isinstance(found, str):
            raise Refused(400, f"'{name}' is a {_kind(found)}. Send a string.")
        if len(found) > most:
            raise Refused(400, f"'{name}' has {len(found)} characters. Send at most {most}.")
        return found

    def needed_text(self, name: str, most: int = MOST_TEXT) -> str:
        found = self.text(name, most)
        if not found:
            raise Refused(400, f"'{name}' is missing. Send it as a string.")
        return found

    def label(self, name: str) -> str | None:
        """A short text that stands in paths, logs and lists: no control characters."""
        found = self.text(name)
        if found is not None and _CONTROL.search(found):
            raise Refused(400, f"'{name}' holds control characters. Send plain text.")
        return found or None

    def whole(self, name: str, least: int, most: int) -> int | None:
        found = self.values.get(name)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int):
            raise Refused(400, f"'{name}' is a {_kind(found)}. Send a whole number from {least} to {most}.")
        if not least <= found <= most:
            raise Refused(400, f"'{name}' is {found}. Send a whole number from {least} to {most}.")
        return found

    def mapping(self, name: str) -> dict[str, Any] | None:
        found = self.values.get(name)
        if found is not None and not isinstance(found, dict):
            raise Refused(400, f"'{name}' is a {_kind(found)}. Send an object.")
        return found

    def items(self, name: str, least: int = 0) -> list[Any] | None:
        found = self.values.get(name)
        if found is None and least == 0:
            return None
        if not isinstance(found, list):
            raise Refused(400, f"'{name}' is a {_kind(found)}. Send a list.")
        if len(found) < least:
            raise Refused(400, f"'{name}' has {len(found)} entries. Send at least {least}.")
        return found

    def choice(self, name: str, allowed: tuple[str, ...]) -> str | None:
        found = self.text(name)
        if found is not None and found not in allowed:
            raise Refused(400, f"'{name}' is '{shown(found)}'. Send one of {', '.join(allowed)}.")
        return found


def shown(text: str, most: int = 100) -> str:
    """Foreign text as an error message may repeat it."""
    plain = _PATH.sub("?", text.replace(" ", "_"))
    return plain if len(plain) <= most else plain[:most] + "…"


def _too_big() -> Refused:
    return Refused(413, f"The body is larger than {MOST_BODY_BYTES // 2**20} MiB. Send less at once.")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "list"}
    return names.get(type(value), "object")
