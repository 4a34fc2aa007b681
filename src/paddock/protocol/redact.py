"""Masks secrets in the texts of exceptions."""

from __future__ import annotations

import re

MASK = "***"

MAX_CHARACTERS = 8_000
"""An exception's text is cut here before it is searched."""

_NAMED = re.compile(
    r"""(?ix) (?<![\w-]) ( [\w-]{0,40}?
    (?: password | passwd | pwd | passphrase | secret | token | api[_-]?key | private[_-]?key | credential s? )
    [\w-]{0,40} ["']? \s{0,3} [=:] \s{0,3} ) ( "[^"]*" | '[^']*' | [^\s,;&'"]+ )"""
)
_HEADER = re.compile(
    r"""(?ix) \b( authorization ["']? \s{0,3} [:=] \s{0,3} ["']?
    (?: (?: bearer | basic | token | digest | negotiate | api-?key ) \s{1,3} )?+ )
    (?! (?-i: KEY | TOKEN ) (?: [\s,;'")] | \Z ) ) ["']? [^\s,;'"]+"""
)
"""The whole value of the header, or nothing of it: the scheme is possessive, so that it is never taken for the value.
KEY and TOKEN are the words by which our own messages say what to send."""
_BEARER = re.compile(r"""(?i)\b(bearer|basic)\s+["']?[A-Za-z0-9._~+/=:-]{6,}""")
_SHAPED = re.compile(
    r"""(?x) \b(?: (?: sk|pk|rk|hf|gsk|xai|ghp|gho|ghs|github_pat|glpat|xox[abp] ) [-_] [A-Za-z0-9_-]{8,}
    | (?: AKIA|ASIA ) [0-9A-Z]{16} | AIza [A-Za-z0-9_-]{30,}
    | eyJ [A-Za-z0-9_-]{8,} \. [A-Za-z0-9_-]{8,} \. [A-Za-z0-9_-]* )"""
)
"""Keys that show by their beginning whose they are, and JSON Web Tokens."""
_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,30}PRIVATE KEY-----|\Z)", re.DOTALL
)
_IN_QUERY = re.compile(r"(?i)([?&](?:key|sig|signature|auth|access_key|code)=)[^&\s'\"]+")
_IN_URL = re.compile(r"(?<=://)[^/\s:@]{0,200}:[^/\s@]{1,200}(?=@)")


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """`text` with everything that looks like a credential, and every string in `secrets`, masked."""
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + "…"
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    text = _KEY_BLOCK.sub(MASK, text)
    text = _IN_URL.sub(MASK, text)
    text = _IN_QUERY.sub(rf"\1{MASK}", text)
    text = _HEADER.sub(rf"\1{MASK}", text)
    text = _BEARER.sub(rf"\1 {MASK}", text)
    text = _NAMED.sub(rf"\g<1>{MASK}", text)
    return _SHAPED.sub(MASK, text)


def describe_error(error: BaseException, secrets: tuple[str, ...] = ()) -> str:
    """The type and text of an exception, with secrets masked. Only the type if its `str` fails."""
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception:
        text = ""
    return redact(f"{kind}: {text}" if text else kind, secrets)


def mask_url(text: str) -> str:
    """A URL without user and password, query and fragment."""
    scheme = re.match(r"([a-z][a-z0-9+.-]*://)?", text, re.IGNORECASE)
    start = scheme.group() if scheme is not None else ""
    _, at, rest = text[len(start) :].rpartition("@")
    return f"{start}{'***@' if at else ''}{re.split('[?#]', rest)[0]}"
