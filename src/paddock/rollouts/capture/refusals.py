"""What endpoints and agents are told when something cannot be done: one value, read from any shape. No IO."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

CONTEXT_CODE = "context_length_exceeded"
CONTEXT_TYPES = (CONTEXT_CODE, "exceed_context_size_error")
CONTEXT_WORDS = re.compile(
    r"maximum context length|context (length|window|size)|longer than the (model|maximum)|prompt is too long",
    re.IGNORECASE,
)
NUMBER = re.compile(r"\d[\d,]*")


class BadRequest(ValueError):
    """The body cannot be answered; the message says why."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class Fault:
    """What an agent is told instead of an answer, before its dialect gives it a shape."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    """As OpenAI names the kinds of errors."""
    code: str | int | None = None
    param: str | None = None
    again: bool = False
    """Asking again may help."""

    @property
    def is_context_overflow(self) -> bool:
        return self.code == CONTEXT_CODE

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Of an overflow: how long the prompt is and how long it may be, where the endpoint told both."""
        found = sorted({int(text.replace(",", "")) for text in NUMBER.findall(self.message)}, reverse=True)
        return (found[0], found[1]) if len(found) >= 2 else None


def read_error(raw: bytes) -> dict[str, Any]:
    """An endpoint's error as `message`, `type`, `param` and `code`, whatever shape it has."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        document = raw.decode("utf-8", "replace").strip()
    if isinstance(document, dict):
        document = document.get("error") or document.get("detail") or document
    if not isinstance(document, dict):
        told = document if isinstance(document, str) else orjson.dumps(document).decode()
        document = {"message": told}
    found = {name: document.get(name) for name in ("type", "param", "code")}
    message = document.get("message")
    text = message if isinstance(message, str) else orjson.dumps(message or document).decode()
    if is_context_overflow(text, found["type"], found["code"]):
        # Agents make room in their history when they see this code, and engines name it in many ways.
        found["code"] = CONTEXT_CODE
    return {"message": text[:4000] or "no message", **found}


def is_context_overflow(message: str, kind: Any, code: Any) -> bool:
    return kind in CONTEXT_TYPES or code in CONTEXT_TYPES or bool(CONTEXT_WORDS.search(message))
