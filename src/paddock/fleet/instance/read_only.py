"""Connections to SQLite that can only read.

Invariant: what a read-only connection may do is listed here, and everything else is refused when the statement is
compiled, before any of it runs. `PRAGMA query_only` is not enough: some pragmas (`journal_mode`) write in spite of
it, and others switch it off. A file is opened with `mode=ro` as well, so that two mechanisms would have to fail.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ACTIONS = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION))
REFUSED_FUNCTIONS = frozenset(("load_extension", "fts3_tokenizer", "writefile", "edit"))
ASKING_PRAGMAS = frozenset(
    (
        *("application_id", "auto_vacuum", "collation_list", "compile_options", "data_version", "database_list"),
        *("encoding", "foreign_keys", "freelist_count", "function_list", "journal_mode", "module_list", "page_count"),
        *("page_size", "pragma_list", "query_only", "schema_version", "synchronous", "user_version"),
    )
)
"""Pragmas that only read as long as they have no argument."""
LOOKING_PRAGMAS = frozenset(
    (
        *("foreign_key_check", "foreign_key_list", "index_info", "index_list", "index_xinfo", "integrity_check"),
        *("quick_check", "table_info", "table_list", "table_xinfo"),
    )
)
"""Pragmas that only read, whose argument says what is looked at."""
SCHEMA_TABLES = frozenset(("sqlite_master", "sqlite_temp_master"))
REFUSAL = "attempt to write a readonly database"
"""SQLite's own words, which callers know."""
REFUSALS = ("not authorized", "authorization denied", "prohibited")
ALLOWED = "a read-only query may SELECT, and ask pragmas such as table_info; to write, send read_only: false"


def forbid_writes(connection: sqlite3.Connection) -> None:
    """Refuse everything but reading on this connection, from now on."""
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_authorize)


@contextmanager
def explained() -> Iterator[None]:
    """Say in the error of a refused statement what is allowed. Raises sqlite3.OperationalError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if any(words in str(error) for words in REFUSALS):
            raise sqlite3.OperationalError(f"{REFUSAL}: {ALLOWED}") from error
        raise


def _authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    """SQLite asks this for everything that a statement would do, while it is compiled."""
    if action == sqlite3.SQLITE_PRAGMA:
        name = (first or "").lower()
        allowed = name in LOOKING_PRAGMAS or (name in ASKING_PRAGMAS and second is None)
    elif action == sqlite3.SQLITE_FUNCTION:
        allowed = (second or "").lower() not in REFUSED_FUNCTIONS
    elif action == sqlite3.SQLITE_UPDATE:
        # Asked when a virtual table is opened (json_each, full text search). Nothing is written: SQLite refuses to
        # change its schema as long as `writable_schema` is off, and switching that on is refused above.
        allowed = first in SCHEMA_TABLES
    else:
        allowed = action in ACTIONS
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
