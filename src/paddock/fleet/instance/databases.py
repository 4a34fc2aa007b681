"""The two databases of an instance: `seed`, the state after the last reset, and `current`, the state now.

Everything here blocks: call it on a thread.
"""

from __future__ import annotations

import base64
import sqlite3
import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from paddock.fleet.instance.differences import Ignored, describe_columns, differences, table_names
from paddock.fleet.instance.read_only import explained, forbid_writes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODES = {"seed": "ro", "current": "rw"}
BUSY_SECONDS = 5.0
QUERY_SECONDS = 30.0
MOST_ROWS = 200_000
MOST_BYTES = 64 * 1024 * 1024
"""Of text and bytes in one value, and in one answer."""
LOOK_EVERY = 10_000
"""Steps of SQLite's machine between two looks at the clock."""


class Databases:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        return self._folder / f"{name}.sqlite"

    def clear(self) -> Path:
        """Remove `current`, whatever was made of it; the path for a new one."""
        current = self.path("current")
        for ending in ("", "-journal", "-wal", "-shm"):
            current.with_name(current.name + ending).unlink(missing_ok=True)
        return current

    def keep_seed(self) -> None:
        """Make `seed` a copy of `current`."""
        fresh = self._folder / "seed.new"
        fresh.unlink(missing_ok=True)
        with _opened(self.path("current"), "rw") as current, closing(sqlite3.connect(fresh)) as copy:
            current.backup(copy)
            # A copy in WAL mode could not be opened for reading alone.
            copy.execute("PRAGMA journal_mode = DELETE")
        fresh.replace(self.path("seed"))

    def describe(self, name: str) -> dict[str, Any]:
        """The tables of a database. Raises sqlite3.Error."""
        with _opened(self.path(name), "ro") as connection:
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
        """Run one statement. Raises sqlite3.Error, sqlite3.Warning, or ValueError for what cannot be run."""
        read_only = read_only or MODES[name] == "ro"
        mode = "ro" if read_only else "rw"
        with _opened(self.path(name), mode) as connection, explained(), _deadline(connection):
            if read_only:
                forbid_writes(connection)
            found = connection.execute(sql, arguments)
            if found.description is None:
                return _answer(rows_affected=max(found.rowcount, 0), last_insert_id=found.lastrowid)
            columns = [column[0] for column in found.description]
            rows = _rows(found)
            # A statement may both change rows and return some; it ends with its last row.
            return _answer(columns=columns, rows=rows, rows_affected=found.rowcount)

    def diff(self, ignored: Ignored) -> dict[str, Any]:
        """What has changed since the last reset, by table. Raises sqlite3.Error."""
        with (
            _opened(self.path("seed"), "ro") as seed,
            _opened(self.path("current"), "ro") as current,
            _deadline(seed, current),
        ):
            return {table: _plain(report) for table, report in differences(seed, current, ignored).items()}


def _rows(cursor: sqlite3.Cursor) -> list[list[Any]]:
    """All rows of a statement. Raises ValueError as soon as they are more than one answer may hold."""
    rows: list[list[Any]] = []
    size = 0
    for row in cursor:
        rows.append([_plain(value) for value in row])
        size += sum(len(value) for value in rows[-1] if isinstance(value, str))
        if len(rows) > MOST_ROWS:
            raise ValueError(f"the answer has more than {MOST_ROWS} rows: add a LIMIT")
        if size > MOST_BYTES:
            raise ValueError(f"the answer has more than {MOST_BYTES} bytes: select less, or add a LIMIT")
    return rows


def _answer(**found: Any) -> dict[str, Any]:
    empty = {"columns": None, "rows": None, "rows_affected": None, "last_insert_id": None, "error": None}
    if found.get("rows_affected") == -1:
        found["rows_affected"] = None
    return {"success": True, **empty, **found, "message": "Query executed successfully"}


@contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    address = f"file:{quote(str(path))}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        # No statement may reach another file: not the seed by way of `current`, nor any other.
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
        connection.text_factory = _text
        yield connection
    finally:
        connection.close()


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


@contextmanager
def _deadline(*connections: sqlite3.Connection) -> Iterator[None]:
    """Interrupt what takes longer than `QUERY_SECONDS`. Raises sqlite3.OperationalError that says so."""
    deadline = time.monotonic() + QUERY_SECONDS
    for connection in connections:
        connection.set_progress_handler(lambda: time.monotonic() > deadline, LOOK_EVERY)
    try:
        yield
    except sqlite3.OperationalError as error:
        if str(error) != "interrupted":
            raise
        raise sqlite3.OperationalError(f"interrupted: it took longer than {QUERY_SECONDS:g} s") from error


def _plain(value: Any) -> Any:
    """Values as JSON can say them: bytes become base64."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(member) for member in value]
    return value
