"""Masks the parts of a text that differ from one run to the next: times, ids, ports, process ids, addresses.

Used to compare a request with a recorded one. What is masked is never stored or sent.
"""

from __future__ import annotations

import re

MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
WEEKDAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,?"
ID_PREFIX = r"(?:call|toolu|msg|ses|session|prt|chatcmpl|resp|fc|rs|req|evt|job|run|thread|conv|tmp)"
DURATION_NAME = r"(?:duration|elapsed|latency|uptime|wall[_ ]?time)(?:[_ ]?(?:ms|us|ns|s|secs?|seconds))?"
RULES: tuple[tuple[str, str], ...] = (
    (r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b", "<id>"),
    (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?", "<time>"),
    (r"\b\d{4}[-/]\d\d[-/]\d\d\b|\b\d{1,2}/\d{1,2}/\d{4}\b", "<date>"),
    (
        rf"\b(?:{WEEKDAY}\s+)?(?:{MONTH}\s+\d{{1,2}}|\d{{1,2}}\s+{MONTH}(?!\s+\d{{1,2}}\b))(?:,?\s+\d{{4}}\b)?|\b{WEEKDAY}(?=\s|$)",
        "<date>",
    ),
    (r"\b\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?(?:\s(?:UTC|GMT)(?:\s+\d{4})?)?\b", "<time>"),
    (r"\b\d+(?:\.\d+)?\s?(?:ms|us|µs|ns|s|secs?|seconds?|m|mins?|minutes?)\b", "<duration>"),
    (rf"(?i)\b({DURATION_NAME}\b[\"']?\s*[>:=]\s*)\d+(?:\.\d+)?", r"\1<duration>"),
    (r"\b0x[0-9a-fA-F]{4,}\b", "<address>"),
    (r"((?:127\.0\.0\.1|0\.0\.0\.0|localhost|\[::1?\]):)\d{2,5}\b", r"\1<port>"),
    (r"(?i)\b(port[ =:]+)\d{2,5}\b", r"\1<port>"),
    (r"(?i)\b((?:pid|process(?: id)?)[ =:#(]+)\d+", r"\1<pid>"),
    (r"(?m)^(\[\d+\][+-]?\s+)\d+\b", r"\1<pid>"),
    (r"\b1[5-9]\d{8}(?:\.\d+)?\b|\b1[5-9]\d{11}\b|\b1[5-9]\d{17}\b", "<time>"),
    (rf"\b{ID_PREFIX}[_-](?=[A-Za-z]*\d)[A-Za-z0-9]{{6,}}\b", "<id>"),
    (r"(?i)\b((?:chunk|request|session|trace|span)[ _-]?id[\"']?\s*[:=]\s*[\"']?)[0-9a-f]{4,}\b", r"\1<id>"),
    (r"/tmp/[\w.-]+", "/tmp/<name>"),
    (r"\b\d+( (?:more )?(?:characters|chars|bytes|lines|tokens) (?:truncated|omitted))\b", r"<count>\1"),
    (r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,64}\b", "<id>"),
)
PATTERNS = tuple((re.compile(pattern), replacement) for pattern, replacement in RULES)


def mask_volatile(text: str) -> str:
    """The text with every volatile part replaced by the name of its kind."""
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text
