"""Keeps secrets out of what an exception says."""

from __future__ import annotations

import re

MASK = "***"

LONGEST = 8_000
"""An exception's text is cut here before it is searched."""

_NAMED = re.compile(
    r"""(?ix) (?<![\w-]) ( [\w-]{0,40}?
    (?: password | passwd | pwd | passphrase | secret | token | api[_-]?key | private[_-]?key | credential s? )
    [\w-]{0,40} ["']? \s{0,3} [=:] \s{0,3} ) ( "[^"]*" | '[^']*' | [^\s,;&'"]+ )"""
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
_SHAPED = re.compile(r"\b(?:sk|pk|rk|hf|ghp|gho|ghs|github_pat|glpat|xox[abp])[-_][A-Za-z0-9_-]{8,}\b")
_IN_URL = re.compile(r"(?<=://)[^/\s:@]{0,200}:[^/\s@]{1,200}(?=@)")


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """`text` with everything that looks like a credential, and every string in `secrets`, masked."""
    if len(text) > LONGEST:
        text = text[:LONGEST] + "…"
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _IN_URL.sub(MASK, text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _NAMED.sub(rf"\g<1>{MASK}", text)
    return _SHAPED.sub(MASK, text)
