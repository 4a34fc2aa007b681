"""The difference between two SQLite databases, row by row. Works on connections; opens no file.

Rows are identified by their primary key; without one by a column `id` with unique values, else by `rowid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sqlite3

Row = dict[str, Any]
Same = Callable[[Any, Any], bool]


@dataclass(frozen=True, slots=True)
class DiffIgnore:
    """What a comparison skips: whole tables, a field in all tables, fields of one table."""

    tables: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()
    table_fields: dict[str, frozenset[str]] = field(default_factory=dict)

    def hides(self, table: str, name: str) -> bool:
        return name in self.fields or name in self.table_fields.get(table, ())

    def without(self, table: str, row: Row) -> Row:
        return {name: value for name, value in row.items() if not self.hides(table, name)}


def compare_databases(
    before: sqlite3.Connection, after: sqlite3.Connection, ignored: DiffIgnore, same: Same | None = None
) -> dict[str, dict[str, Any]]:
    """Added, removed and modified rows of every table of either database, by table."""
    tables = sorted({*table_names(before), *table_names(after)} - ignored.tables)
    return {table: _compare_table(before, after, table, ignored, same or _equal) for table in tables}


def table_names(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' ORDER BY name"
    )
    return [row[0] for row in rows]


def describe_columns(connection: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    """The columns of a table; `pk` is the place in the primary key, from 1, and 0 outside of it."""
    rows = connection.execute(f"PRAGMA table_info({quoted(table)})")
    return [
        {"name": name, "type": kind, "notnull": bool(required), "default_value": default, "pk": place}
        for _, name, kind, required, default, place in rows
    ]


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other)


def _compare_table(
    before: sqlite3.Connection, after: sqlite3.Connection, table: str, ignored: DiffIgnore, same: Same
) -> dict[str, Any]:
    key = _key_columns((before, after), table)
    old, new = _rows_by_key(before, table, key), _rows_by_key(after, table, key)
    modified, unchanged = [], 0
    for identity in _sorted(old.keys() & new.keys()):
        first, second = (ignored.without(table, rows[identity]) for rows in (old, new))
        names = [*second, *(name for name in first if name not in second)]
        changes = {
            name: {"before": first.get(name), "after": second.get(name)}
            for name in names
            if not same(first.get(name), second.get(name))
        }
        if changes:
            modified.append({"row_id": _row_id(identity), "changes": changes, "data": second})
        else:
            unchanged += 1
    added = _list_rows(new, new.keys() - old.keys(), table, ignored)
    removed = _list_rows(old, old.keys() - new.keys(), table, ignored)
    return {
        "table_name": table,
        "primary_key": list(key),
        "added_rows": added,
        "removed_rows": removed,
        "modified_rows": modified,
        "unchanged_count": unchanged,
        "total_changes": len(added) + len(removed) + len(modified),
    }


def _list_rows(
    rows: dict[Any, Row], identities: Iterable[Any], table: str, ignored: DiffIgnore
) -> list[dict[str, Any]]:
    return [
        {"row_id": _row_id(identity), "data": ignored.without(table, rows[identity])}
        for identity in _sorted(identities)
    ]


def _key_columns(connections: tuple[sqlite3.Connection, ...], table: str) -> tuple[str, ...]:
    """The columns that identify a row in both databases."""
    described = [columns for one in connections if (columns := describe_columns(one, table))]
    shared = set.intersection(*({column["name"] for column in columns} for columns in described))
    declared = sorted((column["pk"], column["name"]) for column in described[-1] if column["pk"])
    names = tuple(name for _, name in declared)
    if names and shared.issuperset(names):
        return names
    if "id" in shared and all(_is_unique(one, table, "id") for one in connections):
        return ("id",)
    return ("rowid",)


def _is_unique(connection: sqlite3.Connection, table: str, column: str) -> bool:
    """Whether no two rows have the same value, and none is empty. A missing table has no rows."""
    if not describe_columns(connection, table):
        return True
    query = f"SELECT COUNT(*) = COUNT(DISTINCT {quoted(column)}) FROM {quoted(table)}"
    return bool(connection.execute(query).fetchone()[0])


def _rows_by_key(connection: sqlite3.Connection, table: str, key: tuple[str, ...]) -> dict[Any, Row]:
    names = [column["name"] for column in describe_columns(connection, table)]
    if not names:
        return {}
    columns = ", ".join(quoted(name) for name in names)
    identity = ", ".join("rowid" if name == "rowid" else quoted(name) for name in key)
    rows = connection.execute(f"SELECT {identity}, {columns} FROM {quoted(table)}")
    width = len(key)
    return {tuple(row[:width]): dict(zip(names, row[width:], strict=True)) for row in rows}


def _row_id(identity: tuple[Any, ...]) -> Any:
    return identity[0] if len(identity) == 1 else identity


def _sorted(identities: Iterable[Any]) -> list[Any]:
    """In the order of their keys; values of different types cannot be compared, so the type comes first."""
    return sorted(identities, key=lambda key: [(type(part).__name__, part) for part in key if part is not None])
