"""Errors of model calls: bad requests of an agent, failures of the endpoint, and the error that the agent gets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import orjson

Fault = Literal["endpoint", "request", "context"]
"""The cause of a failed call: the endpoint, the request, or a conversation that is too long."""
CONTEXT_CODE = "context_length_exceeded"
CONTEXT_TYPES = (CONTEXT_CODE, "exceed_context_size_error")
CONTEXT_TEXT = re.compile(
    r"maximum context length|context (length|window|size)|longer than the (model|maximum)|prompt is too long",
    re.IGNORECASE,
)
NUMBER = re.compile(r"\d[\d,]*")
MAX_MESSAGE_CHARACTERS = 4000
FINAL_MESSAGE = "the model endpoint does not work, and the attempts at this call are used up"
"""Agents search errors for words and numbers that promise success on a retry. This text has none of them: the proxy
has retried already. The record of the call keeps the reason."""
REFUSED_STATUS = (400, 404, 413, 422)


class BadRequest(ValueError):
    """The agent's request cannot be served; the message says why."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error for the agent. Its dialect gives it a form."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    """OpenAI's name for the type of the error."""
    code: str | int | None = None
    param: str | None = None
    invites_retry: bool = False
    """Whether the agent should retry."""

    @property
    def is_context_overflow(self) -> bool:
        return self.code == CONTEXT_CODE

    @property
    def sizes(self) -> tuple[int, int] | None:
        """The tokens of the prompt and the limit, if this is a context overflow and the endpoint sent both."""
        numbers = sorted({int(text.replace(",", "")) for text in NUMBER.findall(self.message)}, reverse=True)
        return (numbers[0], numbers[1]) if len(numbers) >= 2 else None


class UpstreamFailure(Exception):
    """An attempt at a call failed. `kind`, `code` and `param` are those of the endpoint's error, if it sent one."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retryable: bool = True,
        retry_after: float | None = None,
        kind: str | None = None,
        code: str | int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retryable = retryable
        self.retry_after = retry_after
        self.kind = kind
        self.code = code
        self.param = param

    @classmethod
    def from_document(cls, document: dict[str, Any], status: int | None) -> UpstreamFailure:
        """An error document in the place of a response or of a chunk."""
        error = read_error(orjson.dumps(document))
        code = error["code"]
        if isinstance(code, int) and 400 <= code < 600:
            status = code
        is_overflow = code == CONTEXT_CODE
        return cls(
            error["message"],
            status=400 if is_overflow else status,
            retryable=not is_overflow and status not in REFUSED_STATUS,
            kind=error["type"] if isinstance(error["type"], str) else None,
            code=code if isinstance(code, str | int) else None,
        )

    @property
    def is_context_overflow(self) -> bool:
        return self.code == CONTEXT_CODE

    @property
    def fault(self) -> Fault:
        """No response, no access, no model, overload and server errors are faults of the endpoint."""
        if self.is_context_overflow:
            return "context"
        status = self.status
        is_endpoint = status is None or status < 400 or status in (401, 403, 404, 408, 429) or status >= 500
        return "endpoint" if is_endpoint else "request"


def read_error(raw: bytes) -> dict[str, Any]:
    """An endpoint's error as `message`, `type`, `param` and `code`, from any of the known forms."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError:
        document = raw.decode("utf-8", "replace").strip()
    if isinstance(document, dict):
        document = document.get("error") or document.get("detail") or document
    if not isinstance(document, dict):
        document = {"message": document if isinstance(document, str) else orjson.dumps(document).decode()}
    error = {name: document.get(name) for name in ("type", "param", "code")}
    message = document.get("message")
    text = message if isinstance(message, str) else orjson.dumps(message or document).decode()
    if is_context_overflow(text, error["type"], error["code"]):
        # Agents compact their history when they see this code, and engines have many names for it.
        error["code"] = CONTEXT_CODE
    return {"message": text[:MAX_MESSAGE_CHARACTERS] or "no message", **error}


def is_context_overflow(message: str, kind: Any, code: Any) -> bool:
    return kind in CONTEXT_TYPES or code in CONTEXT_TYPES or bool(CONTEXT_TEXT.search(message))
