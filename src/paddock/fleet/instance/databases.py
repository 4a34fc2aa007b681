"""The two SQLite databases of an instance: `seed`, the state after the last reset, and `current`, the state now.

Invariant of read-only connections: an authorizer allows a list of actions and refuses everything else when the
statement is compiled, before any of it runs. `PRAGMA query_only` is not enough: some pragmas (`journal_mode`) write
in spite of it, and others switch it off. A file is also opened with `mode=ro`, so two mechanisms would have to fail.
All functions block: call them on a thread.
"""

from __future__ import annotations

import base64
import sqlite3
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paddock.fleet.instance.database_diff import DiffIgnore, compare_databases, describe_columns, table_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODES = {"seed": "ro", "current": "rw"}
BUSY_SECONDS = 5.0
QUERY_SECONDS = 30.0
MAX_ROWS = 200_000
MAX_BYTES = 64 * 1024 * 1024
"""Of text and bytes in one value, and in one result."""
CHECK_INTERVAL_OPCODES = 10_000
"""Instructions of SQLite's virtual machine between two deadline checks."""


class Databases:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.sqlite"

    def clear(self) -> Path:
        """Remove `current` and its journals; the path for a new one."""
        current = self.path("current")
        for ending in ("", "-journal", "-wal", "-shm"):
            current.with_name(current.name + ending).unlink(missing_ok=True)
        return current

    def keep_seed(self) -> None:
        """Make `seed` a copy of `current`."""
        fresh = self._folder / "seed.new"
        fresh.unlink(missing_ok=True)
        with _connect(self.path("current"), "rw") as current, closing(sqlite3.connect(fresh)) as copy:
            current.backup(copy)
            # A database in WAL mode cannot be opened with mode=ro.
            copy.execute("PRAGMA journal_mode = DELETE")
        fresh.replace(self.path("seed"))

    def describe(self, name: str) -> dict[str, Any]:
        """The tables of a database. Raises sqlite3.Error."""
        with _connect(self.path(name), "ro") as connection:
            sources = dict(connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall())
            tables = [
                {"name": table, "sql": sources[table] or "", "columns": describe_columns(connection, table)}
                for table in table_names(connection)
            ]
        return {
            "success": True,
            "resource_name": name,
            "tables": tables,
            "error": None,
            "message": "Schema retrieved successfully",
        }

    def query(self, name: str, sql: str, arguments: Any, *, read_only: bool) -> dict[str, Any]:
        """Run one statement. Raises sqlite3.Error, sqlite3.Warning, or ValueError."""
        read_only = read_only or MODES[name] == "ro"
        mode = "ro" if read_only else "rw"
        with _connect(self.path(name), mode) as connection, explain_refusals(), _query_deadline(connection):
            if read_only:
                forbid_writes(connection)
            cursor = connection.execute(sql, arguments)
            if cursor.description is None:
                return _result(rows_affected=max(cursor.rowcount, 0), last_insert_id=cursor.lastrowid)
            columns = [column[0] for column in cursor.description]
            rows = _read_rows(cursor)
            # With RETURNING, `rowcount` is known only after the last row was read.
            return _result(columns=columns, rows=rows, rows_affected=cursor.rowcount)

    def diff(self, ignored: DiffIgnore) -> dict[str, Any]:
        """What has changed since the last reset, by table. Raises sqlite3.Error."""
        with (
            _connect(self.path("seed"), "ro") as seed,
            _connect(self.path("current"), "ro") as current,
            _query_deadline(seed, current),
        ):
            return {table: _plain(report) for table, report in compare_databases(seed, current, ignored).items()}


def _read_rows(cursor: sqlite3.Cursor) -> list[list[Any]]:
    """All rows of a statement. Raises ValueError as soon as they are more than one result may hold."""
    rows: list[list[Any]] = []
    size = 0
    for row in cursor:
        rows.append([_plain(value) for value in row])
        size += sum(len(value) for value in rows[-1] if isinstance(value, str))
        if len(rows) > MAX_ROWS:
            raise ValueError(f"the answer has more than {MAX_ROWS} rows: add a LIMIT")
        if size > MAX_BYTES:
            raise ValueError(f"the answer has more than {MAX_BYTES} bytes: select less, or add a LIMIT")
    return rows


def _result(**values: Any) -> dict[str, Any]:
    empty = {"columns": None, "rows": None, "rows_affected": None, "last_insert_id": None, "error": None}
    if values.get("rows_affected") == -1:
        values["rows_affected"] = None
    return {"success": True, **empty, **values, "message": "Query executed successfully"}


@contextmanager
def _connect(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    address = f"file:{quote(str(path))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        # Without ATTACH, a statement reaches no other file, such as the seed.
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_BYTES)
        connection.text_factory = lambda data: data.decode(errors="replace")
        yield connection
    finally:
        connection.close()


@contextmanager
def _query_deadline(*connections: sqlite3.Connection) -> Iterator[None]:
    """Interrupt what takes longer than `QUERY_SECONDS`. Raises sqlite3.OperationalError that says so."""
    deadline = time.monotonic() + QUERY_SECONDS
    for connection in connections:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, CHECK_INTERVAL_OPCODES)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) != "interrupted":
            raise
        raise sqlite3.OperationalError(f"interrupted: it took longer than {QUERY_SECONDS:g} s") from error


def _plain(value: Any) -> Any:
    """A value in JSON types: bytes become base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    return value


READ_ACTIONS = frozenset(
    (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION)
)
REFUSED_FUNCTIONS = frozenset(("load_extension", "fts3_tokenizer", "writefile", "edit"))
PRAGMAS_WITHOUT_ARGUMENT = frozenset(
    (
        *("application_id", "auto_vacuum", "collation_list", "compile_options", "data_version", "database_list"),
        *("encoding", "foreign_keys", "freelist_count", "function_list", "journal_mode", "module_list", "page_count"),
        *("page_size", "pragma_list", "query_only", "schema_version", "synchronous", "user_version"),
    )
)
"""Pragmas that only read while they have no argument."""
PRAGMAS_WITH_ARGUMENT = frozenset(
    (
        *("foreign_key_check", "foreign_key_list", "index_info", "index_list", "index_xinfo", "integrity_check"),
        *("quick_check", "table_info", "table_list", "table_xinfo"),
    )
)
"""Pragmas that only read; their argument names a table or an index."""
SCHEMA_TABLES = frozenset(("sqlite_master", "sqlite_temp_master"))
READ_ONLY_ERROR = "attempt to write a readonly database"
"""SQLite's own message, which callers recognize."""
AUTHORIZER_ERRORS = ("not authorized", "authorization denied", "prohibited")
READ_ONLY_HINT = "a read-only query may SELECT, and ask pragmas such as table_info; to write, send read_only: false"


def forbid_writes(connection: sqlite3.Connection) -> None:
    """Refuse everything but reading on this connection, from now on."""
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_authorize)


@contextmanager
def explain_refusals() -> Iterator[None]:
    """Replace the error of a refused statement by one that says what is allowed. Raises sqlite3.OperationalError."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if any(text in str(error) for text in AUTHORIZER_ERRORS):
            raise sqlite3.OperationalError(f"{READ_ONLY_ERROR}: {READ_ONLY_HINT}") from error
        raise


def _authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    """SQLite calls this for every action of a statement while it compiles it."""
    if action == sqlite3.SQLITE_PRAGMA:
        name = (first or "").lower()
        allowed = name in PRAGMAS_WITH_ARGUMENT or (name in PRAGMAS_WITHOUT_ARGUMENT and second is None)
    elif action == sqlite3.SQLITE_FUNCTION:
        allowed = (second or "").lower() not in REFUSED_FUNCTIONS
    elif action == sqlite3.SQLITE_UPDATE:
        # Requested when a virtual table is opened (json_each, full text search). Nothing is written: SQLite refuses
        # to change its schema while `writable_schema` is off, and that pragma is refused above.
        allowed = first in SCHEMA_TABLES
    else:
        allowed = action in READ_ACTIONS
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
