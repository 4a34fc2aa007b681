"""Where a client's requests go and what is in them: address, credentials, actions, JSON.

Raises InvalidMessage for values that JSON cannot express, and names their place in the argument of the caller.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import orjson
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from paddock.config import PADDOCK_AUTH_TOKEN
from paddock.errors import ConfigError, EnvironmentFailure, InvalidMessage
from paddock.protocol.codec import encode
from paddock.protocol.finite import find_nonfinite, problem_at

CALLER_PARTS = {"step": "action", "reset": "arguments", "mcp": "arguments"}
"""By kind of message: the name of the part that comes from the caller."""
OUTER_KEYS = {"step": ("data", "action"), "reset": ("data",), "mcp": ("data", "params", "arguments")}
"""The keys around that part, in a frame or in the body of an HTTP request."""
URL_HINT = "give http://host:port; a Client takes an environment class too"


def server_url(url: str) -> str:
    """The URL of a server, without a slash at its end. Raises ConfigError."""
    try:
        parts = urlsplit(str(url))
        is_complete = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL of a server: {error}", hint=URL_HINT) from None
    if not is_complete:
        raise ConfigError(f"{url!r} is no URL of a server", hint=URL_HINT)
    return url.rstrip("/")


def authorization(token: str | None) -> dict[str, str]:
    """The header with this token, or else with that of `PADDOCK_AUTH_TOKEN`; empty without either."""
    token = token or PADDOCK_AUTH_TOKEN.read()
    return {"Authorization": f"Bearer {token}"} if token else {}


def action_fields(action: Any) -> dict[str, Any]:
    """The fields of an action, which is a dict or a model. Raises InvalidMessage."""
    if isinstance(action, dict):
        return action
    if not isinstance(action, BaseModel):
        raise _invalid("action", "dict_type", f"{action!r:.60} is neither a dict nor an action model")
    _check_finite(action, "action")
    try:
        return action.model_dump(mode="json", by_alias=True, fallback=_to_plain)
    except (PydanticSerializationError, EnvironmentFailure, ValueError, TypeError, RecursionError) as error:
        raise _invalid("action", "not_json", str(error)) from error


def encode_request(document: Any, kind: str) -> bytes:
    """A request of this kind as JSON. Raises InvalidMessage for what JSON cannot express."""
    try:
        encoded = encode(document)
    except EnvironmentFailure as error:
        raise _invalid(CALLER_PARTS.get(kind, "message"), "not_json", str(error.__cause__ or error)) from error
    if b"null" in encoded:
        # NaN and the infinities are encoded as null too.
        _check_finite(document, CALLER_PARTS.get(kind, "message"), OUTER_KEYS.get(kind, ()))
    return encoded


def _check_finite(value: Any, part: str, outer_keys: tuple[str, ...] = ()) -> None:
    """Refuse a number that is not finite, with its place inside of `outer_keys`."""
    place = find_nonfinite(value)
    if place is not None:
        for name in outer_keys:
            place = place[1:] if place[:1] == [name] else place
        raise InvalidMessage("Invalid message", errors=[problem_at([part, *place])])


def _to_plain(value: Any) -> Any:
    """What pydantic cannot serialise may still be an array."""
    return orjson.loads(encode(value))


def _invalid(part: str, kind: str, reason: str) -> InvalidMessage:
    return InvalidMessage("Invalid message", errors=[{"type": kind, "loc": [part], "msg": reason}])
