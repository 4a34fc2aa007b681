"""The `env` of a verifier: the instance's databases, copied into memory and read-only."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from paddock.fleet.instance.database_diff import describe_columns, quoted, table_names
from paddock.fleet.instance.databases import explain_refusals, forbid_writes
from paddock.fleet.instance.verifier.expectations import IgnoreConfig, SnapshotDiff
from paddock.fleet.instance.verifier.queries import Awaitable, Query, as_result

BUSY_SECONDS = 5.0


@dataclass(slots=True)
class QueryResponse(Awaitable):
    """The rows of a query, or why it failed."""

    success: bool
    columns: list[str] | None = None
    rows: list[list[Any]] | None = None
    rows_affected: int | None = None
    last_insert_id: int | None = None
    error: str | None = None
    message: str = ""


@dataclass(slots=True)
class TableDescription:
    name: str
    sql: str
    columns: list[dict[str, Any]]


@dataclass(slots=True)
class DatabaseDescription(Awaitable):
    success: bool
    resource_name: str
    tables: list[TableDescription]
    error: str | None = None
    message: str = ""


def copy_database(name: str, path: str) -> VerifierDatabase:
    """The database at `path` as it is now, in memory."""
    stored = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    copy = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    try:
        stored.backup(copy)
    finally:
        stored.close()
    # Otherwise large sorts use temporary files, which a restricted process cannot create.
    copy.execute("PRAGMA temp_store = MEMORY")
    forbid_writes(copy)
    return VerifierDatabase(name, copy)


class VerifierDatabase(Awaitable):
    """One database of the instance. It can be read; writing answers with an error."""

    mode = "ro"

    def __init__(self, name: str, connection: sqlite3.Connection) -> None:
        self.name = name
        self.connection = connection

    def __repr__(self) -> str:
        return f"<Database {self.name}>"

    def query(self, query: str, args: Any = None) -> QueryResponse:
        """Run one statement. A wrong one answers `success=False`, as it does over HTTP."""
        try:
            with explain_refusals():
                cursor = self.connection.execute(query, args or ())
            rows = [list(row) for row in cursor] if cursor.description else None
        except (sqlite3.Error, sqlite3.Warning) as error:
            return QueryResponse(False, error=str(error), message=f"Query failed: {error}")
        columns = [column[0] for column in cursor.description] if cursor.description else None
        return QueryResponse(True, columns, rows, message="Query executed successfully")

    exec = query

    def describe(self) -> DatabaseDescription:
        rows = self.connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        sources = {name: sql or "" for name, sql in rows}
        tables = [
            TableDescription(table, sources[table], describe_columns(self.connection, table))
            for table in table_names(self.connection)
        ]
        return DatabaseDescription(True, self.name, tables, message="Schema retrieved successfully")

    def tables(self) -> Any:
        return as_result(table_names(self.connection))

    def table(self, table_name: str) -> Query:
        if not self.connection.execute(f"PRAGMA table_info({quoted(table_name)})").fetchall():
            raise sqlite3.OperationalError(f"no such table: {table_name}")
        return Query(self.connection, table_name)

    def snapshot(self, name: str | None = None) -> VerifierDatabase:
        """The copy never changes, so it is a snapshot already."""
        return self

    def diff(
        self, other: VerifierDatabase, ignore_config: IgnoreConfig | None = None, **_options: Any
    ) -> SnapshotDiff:
        return SnapshotDiff(self, other, ignore_config)

    def expect_row(self, table: str, where: dict[str, Any], expect: dict[str, Any]) -> VerifierDatabase:
        query = self.table(table).where(where).assert_exists()
        for column, value in expect.items():
            query.assert_eq(column, value)
        return self

    def expect_rows(
        self, table: str, where: dict[str, Any], *, count: int | None = None, contains: list[Any] | None = None
    ) -> VerifierDatabase:
        query = self.table(table).where(where)
        if count is not None:
            query.count().assert_eq(count)
        rows = query.all()
        for wanted in contains or ():
            if not any(wanted.items() <= row.items() for row in rows):
                raise AssertionError(f"expected a row with {wanted!r} in {table}, found none")
        return self

    def expect_absent_row(self, table: str, where: dict[str, Any]) -> VerifierDatabase:
        self.table(table).where(where).assert_none()
        return self


class VerifierInstance:
    """`env.instance`: everything is loaded already."""

    def __init__(self, environment: VerifierEnvironment) -> None:
        self._environment = environment

    def load(self) -> Any:
        return as_result(None)

    def db(self, name: str = "current") -> VerifierDatabase:
        return self._environment.db(name)


class VerifierEnvironment:
    """The instance that is graded, as far as a verifier may read it."""

    def __init__(self, databases: dict[str, VerifierDatabase], attributes: dict[str, Any]) -> None:
        self._databases = databases
        self.instance = VerifierInstance(self)
        self.__dict__.update(attributes)

    def db(self, name: str = "current") -> VerifierDatabase:
        if name not in self._databases:
            names = ", ".join(self._databases) or "none"
            raise KeyError(f"there is no database {name!r}; there is: {names}")
        return self._databases[name]

    def resources(self) -> Any:
        return as_result(list(self._databases.values()))

    def app(self, name: str) -> VerifierEnvironment:
        """One environment answers for all of its apps."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"env.{name} is not there for a verifier: it has db(), app(), resources() and instance")
