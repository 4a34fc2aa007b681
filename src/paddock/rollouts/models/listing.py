"""Which models an endpoint says it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from paddock.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 15.0
MOST_BYTES = 4 * 1024 * 1024
HINT = "check that the server runs there, or give the model's name"


async def list_models(url: str, *, shown: str, api_key: str | None, headers: Mapping[str, str]) -> list[str]:
    """The names that `GET /models` lists, one at least. `shown` is the address that messages name.

    Raises ModelError if nobody answers, refuses, or lists nothing.
    """
    sent = dict(headers) if api_key is None else {**headers, "Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=SECONDS, sock_connect=SECONDS)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/models", headers=sent, allow_redirects=False) as answer,
        ):
            status = answer.status
            raw = await answer.content.read(MOST_BYTES) if status == 200 else b""
            while status == 200 and len(raw) < MOST_BYTES and (more := await answer.content.read(MOST_BYTES)):
                raw += more
    except TimeoutError:
        raise ModelError(f"{shown} did not answer within {SECONDS:g} s", hint=HINT) from None
    except aiohttp.ClientError as error:
        raise ModelError(f"{shown} does not answer: {_reason(error)}", hint=HINT) from None
    if status in (401, 403):
        raise ModelError(f"{shown} wants another key (status {status})", hint="set PADDOCK_MODEL_API_KEY")
    if status != 200:
        raise ModelError(f"{shown} does not list its models (status {status})", hint="give the model's name")
    names = _names(raw)
    if not names:
        raise ModelError(f"{shown} lists no models", hint="give the model's name")
    return names


def _reason(error: aiohttp.ClientError) -> str:
    """What went wrong, without the request: it may hold a key."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or "no connection"
    return type(error).__name__


def _names(raw: bytes) -> list[str]:
    try:
        listed: Any = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return []
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return []
    return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
