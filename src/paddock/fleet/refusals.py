"""Reading a refusal: what a server says it did not do, and whether a later try may succeed.

Invariant: an answer counts as success only if it does not say the opposite. Every HTTP answer that this package reads
passes `refusal_in` (in `http.send`), whatever its status; a caller for whom a failure is data (an SQL error, a failed
verifier) has to ask for it.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

TEXT_STATUSES = frozenset((400, 403))
"""Statuses of final refusals under which planes also report passing conditions, in words."""
_PASSING = re.compile(
    r"""health[ -]?check|rate[ -]?limit|too many (?:requests|in-flight)|temporarily|timed out|timeout"""
    r"""|["']?\bretryable["']?\s*[:=]\s*true""",
    re.IGNORECASE,
)
_FINAL = re.compile(r"""["']?\bretryable["']?\s*[:=]\s*false""", re.IGNORECASE)
FAILED = frozenset(("error", "failed", "failure"))
"""What a `status` says of work that was not done."""
_LIMIT = re.compile(r"\binstance limit\b", re.IGNORECASE)


def read_error(body: bytes) -> tuple[Any, bool | None]:
    """What an error body says, which is its `detail` if it has one, and whether it says that a retry may help."""
    try:
        document = orjson.loads(body)
    except ValueError:
        return body.decode(errors="replace"), None
    if not isinstance(document, dict):
        return document, None
    detail = document.get("detail", document)
    stated = [level.get("retryable") for level in (detail, document) if isinstance(level, dict)]
    stated += [level["error"].get("retryable") for level in (detail, document) if isinstance(_error_of(level), dict)]
    return detail, next((value for value in stated if isinstance(value, bool)), None)


def message_of(detail: Any) -> Any:
    """The words of a refusal, whichever field they stand in."""
    if not isinstance(detail, dict):
        return detail
    for name in ("message", "error", "detail", "reason"):
        words = detail.get(name)
        if isinstance(words, dict):
            return message_of(words)
        if words:
            return words
    return detail


def may_pass(status: int, detail: Any, stated: bool | None) -> bool | None:
    """Whether the same request may succeed later; None when only the status tells.

    A stated `retryable` decides. Without one, the words of a 400 or 403 do: planes report rate limits and failed
    health checks that way.
    """
    if stated is not None:
        return stated
    if status not in TEXT_STATUSES:
        return None
    words = detail if isinstance(detail, str) else orjson.dumps(detail, default=str).decode()
    if _FINAL.search(words):
        return False
    return True if _PASSING.search(words) else None


def is_instance_limit(status: int, detail: Any) -> bool:
    """Whether a refusal says that the team runs as many instances as it may."""
    kind = detail.get("error_type") if isinstance(detail, dict) else None
    if kind is not None:
        return bool(kind == "instance_limit_exceeded")
    return status == 403 and _LIMIT.search(str(message_of(detail))) is not None


def refusal_in(body: bytes) -> dict[str, Any] | None:
    """The document of an answer that says `success: false`; None for any other answer."""
    if b'"success"' not in body:
        return None
    try:
        document = orjson.loads(body)
    except ValueError:
        return None
    if not isinstance(document, dict) or "success" not in document or document["success"] is True:
        return None
    return document


def is_confirmed(document: Any) -> bool:
    """Whether an answer says that the work was done: `success: true`, or an observation and no word of a failure."""
    if not isinstance(document, dict):
        return False
    if "success" in document:
        return document["success"] is True
    is_failed = bool(document.get("error")) or document.get("ok") is False or document.get("status") in FAILED
    return document.get("observation") is not None and not is_failed


def _error_of(level: Any) -> Any:
    return level.get("error") if isinstance(level, dict) else None
