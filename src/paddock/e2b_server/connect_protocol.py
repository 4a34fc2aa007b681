"""The Connect protocol as E2B's clients use it: JSON, alone or in envelopes. No IO.

A stream is a sequence of envelopes: a byte of flags, a length of 32 bits, a message. The last one has a flag and says
how the stream ended. E2B's clients send JSON; the protobuf form of the protocol is refused.
"""

from __future__ import annotations

import struct
from typing import Any

import orjson

HEAD = struct.Struct(">BI")
COMPRESSED, LAST = 1, 2
UNARY, STREAM = "application/json", "application/connect+json"
LONGEST_MESSAGE = 64 << 20
STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}


class ConnectError(Exception):
    """An error in the form of the protocol."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @property
    def status(self) -> int:
        return STATUS.get(self.code, 500)

    def to_json(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    data = orjson.dumps(message)
    return HEAD.pack(flags, len(data)) + data


def last_envelope(error: ConnectError | None = None) -> bytes:
    return envelope({} if error is None else {"error": error.to_json()}, LAST)


class Envelopes:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def add(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete by now. Raises ConnectError for what cannot be one."""
        self._buffer += data
        messages: list[dict[str, Any]] = []
        while len(self._buffer) >= HEAD.size:
            flags, length = HEAD.unpack_from(self._buffer)
            if flags & COMPRESSED:
                raise ConnectError("unimplemented", "compressed messages are not supported")
            if length > LONGEST_MESSAGE:
                raise ConnectError("resource_exhausted", f"a message of {length} bytes is too long")
            if len(self._buffer) < HEAD.size + length:
                break
            data = bytes(self._buffer[HEAD.size : HEAD.size + length])
            del self._buffer[: HEAD.size + length]
            if not flags & LAST:
                messages.append(parse(data))
        return messages


def parse(data: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(data or b"{}")
    except ValueError as error:
        raise ConnectError("invalid_argument", f"this is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise ConnectError("invalid_argument", "a message is a JSON object")
    return message


def timeout_of(header: str | None) -> float | None:
    """Seconds, from `Connect-Timeout-Ms`; None without one."""
    if not header:
        return None
    if not header.isascii() or not header.isdigit():
        raise ConnectError("invalid_argument", f"Connect-Timeout-Ms is {header!r}")
    return int(header) / 1000 or None
