"""Keeps secrets out of what an exception says."""

from __future__ import annotations

import re

MASK = "***"

_NAMED = re.compile(
    r"""(?ix) ( [\w-]* (?: password | passwd | pwd | secret | token | api[_-]?key | apikey | credential s? ) [\w-]*
    ["']? \s* [=:] \s* ) ( "[^"]*" | '[^']*' | [^\s,;&'"]+ )"""
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_SHAPED = re.compile(r"\b(?:sk|pk|rk|hf|ghp|gho|ghs|glpat|xox[abp])[-_][A-Za-z0-9_-]{8,}\b")
_IN_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """`text` with everything that looks like a credential, and every string in `secrets`, masked."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _IN_URL.sub(MASK, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _NAMED.sub(rf"\g<1>{MASK}", text)
    return _SHAPED.sub(MASK, text)
