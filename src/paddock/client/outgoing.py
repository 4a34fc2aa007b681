"""What a client sends: actions as plain fields, messages as JSON, its token as a header.

What cannot be sent is refused here, by name.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from paddock.config import read_variables
from paddock.errors import EnvironmentFailure, InvalidMessage
from paddock.protocol.codec import encode
from paddock.protocol.finite import place_of_nonfinite, problem_at

PARTS = {"step": "action", "reset": "arguments", "mcp": "arguments"}
"""What a caller calls the part of a message that it has given."""
AROUND = {"step": ("data", "action"), "reset": ("data",), "mcp": ("data", "params", "arguments")}
"""The keys around that part, in a frame or in a body of HTTP."""


def authorization(token: str | None) -> dict[str, str]:
    """The header that shows this token, or else that of `PADDOCK_AUTH_TOKEN`; none without either."""
    shown = token or read_variables().auth_token
    return {"Authorization": f"Bearer {shown}"} if shown else {}


def fields_of(action: Any) -> dict[str, Any]:
    """The fields of an action, which is a dict or a model. Raises InvalidMessage."""
    if isinstance(action, dict):
        return action
    if not isinstance(action, BaseModel):
        raise _refused("action", "dict_type", f"{action!r:.60} is neither a dict nor an action model")
    _check_finite(action, "action")
    try:
        return action.model_dump(mode="json", by_alias=True, fallback=_plain)
    except (PydanticSerializationError, EnvironmentFailure, ValueError, TypeError, RecursionError) as error:
        raise _refused("action", "not_json", str(error)) from error


def write(document: Any, kind: str) -> bytes:
    """A message of this kind as it is sent. Raises InvalidMessage for what JSON cannot express."""
    try:
        written = encode(document)
    except EnvironmentFailure as error:
        raise _refused(PARTS.get(kind, "message"), "not_json", str(error.__cause__ or error)) from error
    if b"null" in written:
        # It may stand for a number that is not finite.
        _check_finite(document, PARTS.get(kind, "message"), AROUND.get(kind, ()))
    return written


def _check_finite(value: Any, part: str, around: tuple[str, ...] = ()) -> None:
    """Refuse a number that is not finite, by its place in what the caller gave: `around` are the keys outside."""
    place = place_of_nonfinite(value)
    if place is not None:
        for name in around:
            place = place[1:] if place[:1] == [name] else place
        raise InvalidMessage("Invalid message", errors=[problem_at([part, *place])])


def _plain(value: Any) -> Any:
    """What pydantic does not know may still be an array."""
    return orjson.loads(encode(value))


def _refused(part: str, kind: str, reason: str) -> InvalidMessage:
    return InvalidMessage("Invalid message", errors=[{"type": kind, "loc": [part], "msg": reason}])
