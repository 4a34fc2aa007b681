"""Queries of the full-text index: words, and phrases in double quotes, all of which have to occur."""

from __future__ import annotations

MATCHING = "SELECT rowid FROM transcript_index WHERE transcript_index MATCH ?"
"""The keys of the rollouts that an expression matches."""
MIN_PREFIX_CHARACTERS = 3
"""A shorter beginning of a word stands for too many words."""


def split_words(query: str) -> list[str]:
    """The words of a query, and the phrases in double quotes."""
    words: list[str] = []
    for place, part in enumerate(query.split('"')):
        words += [part.strip()] if place % 2 else part.split()
    return [word for word in words if any(map(str.isalnum, word))]


def match_expression(query: str) -> str | None:
    """The FTS5 expression for all words of a query; None without words. The last may be the beginning of a word."""
    words = split_words(query)
    if not words:
        return None
    quoted = [f'"{word}"' for word in words]
    is_open = not query.endswith(('"', " ")) and len(words[-1]) >= MIN_PREFIX_CHARACTERS
    return " ".join(quoted) + ("*" if is_open else "")
