"""Questions to one table, put together step by step: `db.table("notes").eq("title", "x").first()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.fleet.instance.differences import quoted
from paddock.fleet.instance.verifier.results import Count, given

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable


class Query:
    """A question; every step gives a new one. `all`, `first`, `count` and the assertions ask it."""

    def __init__(self, connection: sqlite3.Connection, table: str) -> None:
        self._connection = connection
        self._table = table
        self._columns: tuple[str, ...] = ()
        self._conditions: tuple[tuple[str, tuple[Any, ...]], ...] = ()
        self._joins: tuple[str, ...] = ()
        self._order: tuple[str, ...] = ()
        self._limit: int | None = None

    # -- putting it together --------------------------------------------------------------------------

    def select(self, *columns: str) -> Query:
        return self._with(_columns=columns)

    def where(self, conditions: dict[str, Any] | None = None, **more: Any) -> Query:
        found = self
        for column, value in {**(conditions or {}), **more}.items():
            found = found.eq(column, value)
        return found

    def eq(self, column: str, value: Any) -> Query:
        return self.is_null(column) if value is None else self._compared(column, "=", value)

    def neq(self, column: str, value: Any) -> Query:
        return self.not_null(column) if value is None else self._compared(column, "!=", value)

    def gt(self, column: str, value: Any) -> Query:
        return self._compared(column, ">", value)

    def gte(self, column: str, value: Any) -> Query:
        return self._compared(column, ">=", value)

    def lt(self, column: str, value: Any) -> Query:
        return self._compared(column, "<", value)

    def lte(self, column: str, value: Any) -> Query:
        return self._compared(column, "<=", value)

    def ilike(self, column: str, pattern: str) -> Query:
        """`LIKE` of SQLite, which does not tell cases apart."""
        return self._compared(column, "LIKE", pattern)

    def in_(self, column: str, values: Iterable[Any]) -> Query:
        return self._among(column, "IN", values)

    def not_in(self, column: str, values: Iterable[Any]) -> Query:
        return self._among(column, "NOT IN", values)

    def is_null(self, column: str) -> Query:
        return self._that(f"{_name(column)} IS NULL")

    def not_null(self, column: str) -> Query:
        return self._that(f"{_name(column)} IS NOT NULL")

    def join(self, other_table: str, on: dict[str, str]) -> Query:
        """Rows of another table beside ours, where our column (key) is its column (value)."""
        same = " AND ".join(
            f"{quoted(self._table)}.{quoted(ours)} = {quoted(other_table)}.{quoted(theirs)}"
            for ours, theirs in on.items()
        )
        return self._with(_joins=(*self._joins, f" JOIN {quoted(other_table)} ON {same}"))

    def sort(self, column: str, desc: bool = False) -> Query:
        return self._with(_order=(*self._order, f"{_name(column)} {'DESC' if desc else 'ASC'}"))

    def limit(self, n: int) -> Query:
        return self._with(_limit=int(n))

    # -- asking ---------------------------------------------------------------------------------------

    def all(self) -> Any:
        return given(self._rows())

    def first(self) -> Any:
        rows = self.limit(1)._rows()
        return given(rows[0] if rows else None)

    def count(self) -> Any:
        sql, values = self._statement("COUNT(*)", ordered=False)
        return given(Count(self._connection.execute(sql, values).fetchone()[0]))

    def assert_exists(self) -> Query:
        if not self._rows():
            raise AssertionError(f"expected a row in {self._table} for {self.explain()}, found none")
        return self

    def assert_none(self) -> Query:
        if rows := self._rows():
            raise AssertionError(f"expected no row in {self._table} for {self.explain()}, found {len(rows)}")
        return self

    def assert_eq(self, column: str, value: Any) -> Query:
        rows = self.limit(1)._rows()
        if not rows:
            raise AssertionError(f"expected {column} = {value!r} in {self._table}, found no row for {self.explain()}")
        if rows[0].get(column) != value:
            raise AssertionError(f"expected {column} = {value!r} in {self._table}, found {rows[0].get(column)!r}")
        return self

    def explain(self) -> str:
        sql, values = self._statement(self._wanted())
        return f"{sql} with {list(values)!r}" if values else sql

    def _rows(self) -> list[dict[str, Any]]:
        sql, values = self._statement(self._wanted())
        found = self._connection.execute(sql, values)
        names = [column[0] for column in found.description]
        return [dict(zip(names, row, strict=True)) for row in found]

    def _wanted(self) -> str:
        return ", ".join(_name(column) for column in self._columns) or "*"

    def _statement(self, wanted: str, *, ordered: bool = True) -> tuple[str, tuple[Any, ...]]:
        sql = f"SELECT {wanted} FROM {quoted(self._table)}{''.join(self._joins)}"
        if self._conditions:
            sql += " WHERE " + " AND ".join(text for text, _ in self._conditions)
        if ordered and self._order:
            sql += " ORDER BY " + ", ".join(self._order)
        if ordered and self._limit is not None:
            sql += f" LIMIT {self._limit}"
        return sql, tuple(value for _, values in self._conditions for value in values)

    def _compared(self, column: str, operator: str, value: Any) -> Query:
        return self._that(f"{_name(column)} {operator} ?", value)

    def _among(self, column: str, operator: str, values: Iterable[Any]) -> Query:
        listed = list(values)
        return self._that(f"{_name(column)} {operator} ({', '.join('?' * len(listed))})", *listed)

    def _that(self, text: str, *values: Any) -> Query:
        return self._with(_conditions=(*self._conditions, (text, values)))

    def _with(self, **changes: Any) -> Query:
        found = Query(self._connection, self._table)
        found.__dict__.update(self.__dict__, **changes)
        return found


def _name(column: str) -> str:
    """A column for SQL: `title`, `notes.title`, or an expression such as `COUNT(*)` as it is."""
    parts = column.split(".")
    return ".".join(map(quoted, parts)) if all(part.isidentifier() for part in parts) else column
