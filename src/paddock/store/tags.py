"""Tags: words that people give to rollouts, to find them again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paddock.errors import ConfigError

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

TABLES = (
    """CREATE TABLE IF NOT EXISTS tags (
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        tag TEXT NOT NULL,
        PRIMARY KEY (rollout, tag)
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS tags_by_name ON tags (tag, rollout)",
)
TEMPORARY_TABLE = "CREATE TEMP TABLE tags (rollout INTEGER NOT NULL, tag TEXT NOT NULL)"
MAX_TAGS = 50
_VALID = re.compile(r"[^\s,+-][^\s,]{0,59}")


def check(tag: str) -> str:
    """The tag itself. Raises ConfigError if it is none."""
    if not _VALID.fullmatch(tag) or not tag.isprintable():
        raise ConfigError(
            f"{tag[:80]!r} is no tag",
            hint="a tag is one word of at most 60 characters, without commas, that does not begin with + or -",
        )
    return tag


def change(connection: sqlite3.Connection, key: int, add: Iterable[str], remove: Iterable[str]) -> list[str]:
    """Add and remove tags of one rollout; returns those that it has now."""
    for tag in remove:
        connection.execute("DELETE FROM tags WHERE rollout = ? AND tag = ?", (key, tag))
    for tag in add:
        connection.execute("INSERT OR IGNORE INTO tags (rollout, tag) VALUES (?, ?)", (key, check(tag)))
    tags = read(connection, [key]).get(key, [])
    if len(tags) > MAX_TAGS:
        raise ConfigError(f"a rollout may have {MAX_TAGS} tags", hint="remove some of them")
    return tags


def read(connection: sqlite3.Connection, keys: Sequence[int]) -> dict[int, list[str]]:
    """The tags of rollouts, in order; those without tags are left out."""
    marks = ", ".join("?" * len(keys))
    tags: dict[int, list[str]] = {}
    for key, tag in connection.execute(
        f"SELECT rollout, tag FROM tags WHERE rollout IN ({marks}) ORDER BY tag", keys
    ):
        tags.setdefault(key, []).append(tag)
    return tags


def counts(connection: sqlite3.Connection) -> dict[str, int]:
    """All tags, each with the number of its rollouts."""
    return dict(connection.execute("SELECT tag, count(*) FROM tags GROUP BY tag"))
