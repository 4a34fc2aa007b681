"""A query builder for one table, and its results: `db.table("notes").eq("title", "x").first()`.

An async verifier may await the results, or use them as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.fleet.instance.database_diff import quoted

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Generator, Iterable


class Query:
    """An immutable query. Every step returns a new one; `all`, `first`, `count` and the assertions run it."""

    def __init__(self, connection: sqlite3.Connection, table: str) -> None:
        self._connection = connection
        self._table = table
        self._columns: tuple[str, ...] = ()
        self._conditions: tuple[tuple[str, tuple[Any, ...]], ...] = ()
        self._joins: tuple[str, ...] = ()
        self._order: tuple[str, ...] = ()
        self._limit: int | None = None

    # -- building --------------------------------------------------------------------------

    def select(self, *columns: str) -> Query:
        return self._copy(_columns=columns)

    def where(self, conditions: dict[str, Any] | None = None, **more: Any) -> Query:
        query = self
        for column, value in {**(conditions or {}), **more}.items():
            query = query.eq(column, value)
        return query

    def eq(self, column: str, value: Any) -> Query:
        return self.is_null(column) if value is None else self._compare(column, "=", value)

    def neq(self, column: str, value: Any) -> Query:
        return self.not_null(column) if value is None else self._compare(column, "!=", value)

    def gt(self, column: str, value: Any) -> Query:
        return self._compare(column, ">", value)

    def gte(self, column: str, value: Any) -> Query:
        return self._compare(column, ">=", value)

    def lt(self, column: str, value: Any) -> Query:
        return self._compare(column, "<", value)

    def lte(self, column: str, value: Any) -> Query:
        return self._compare(column, "<=", value)

    def ilike(self, column: str, pattern: str) -> Query:
        """`LIKE` of SQLite, which ignores case."""
        return self._compare(column, "LIKE", pattern)

    def in_(self, column: str, values: Iterable[Any]) -> Query:
        return self._compare_list(column, "IN", values)

    def not_in(self, column: str, values: Iterable[Any]) -> Query:
        return self._compare_list(column, "NOT IN", values)

    def is_null(self, column: str) -> Query:
        return self._add_condition(f"{_quote_column(column)} IS NULL")

    def not_null(self, column: str) -> Query:
        return self._add_condition(f"{_quote_column(column)} IS NOT NULL")

    def join(self, other_table: str, on: dict[str, str]) -> Query:
        """Rows of another table beside ours, where our column (key) is its column (value)."""
        condition = " AND ".join(
            f"{quoted(self._table)}.{quoted(ours)} = {quoted(other_table)}.{quoted(theirs)}"
            for ours, theirs in on.items()
        )
        return self._copy(_joins=(*self._joins, f" JOIN {quoted(other_table)} ON {condition}"))

    def sort(self, column: str, desc: bool = False) -> Query:
        return self._copy(_order=(*self._order, f"{_quote_column(column)} {'DESC' if desc else 'ASC'}"))

    def limit(self, n: int) -> Query:
        return self._copy(_limit=int(n))

    # -- running ---------------------------------------------------------------------------------------

    def all(self) -> Any:
        return as_result(self._rows())

    def first(self) -> Any:
        rows = self.limit(1)._rows()
        return as_result(rows[0] if rows else None)

    def count(self) -> Any:
        sql, values = self._statement("COUNT(*)", ordered=False)
        return as_result(RowCount(self._connection.execute(sql, values).fetchone()[0]))

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
        sql, values = self._statement(self._column_list())
        return f"{sql} with {list(values)!r}" if values else sql

    def _rows(self) -> list[dict[str, Any]]:
        sql, values = self._statement(self._column_list())
        cursor = self._connection.execute(sql, values)
        names = [column[0] for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor]

    def _column_list(self) -> str:
        return ", ".join(_quote_column(column) for column in self._columns) or "*"

    def _statement(self, wanted: str, *, ordered: bool = True) -> tuple[str, tuple[Any, ...]]:
        sql = f"SELECT {wanted} FROM {quoted(self._table)}{''.join(self._joins)}"
        if self._conditions:
            sql += " WHERE " + " AND ".join(text for text, _ in self._conditions)
        if ordered and self._order:
            sql += " ORDER BY " + ", ".join(self._order)
        if ordered and self._limit is not None:
            sql += f" LIMIT {self._limit}"
        return sql, tuple(value for _, values in self._conditions for value in values)

    def _compare(self, column: str, operator: str, value: Any) -> Query:
        return self._add_condition(f"{_quote_column(column)} {operator} ?", value)

    def _compare_list(self, column: str, operator: str, values: Iterable[Any]) -> Query:
        listed = list(values)
        return self._add_condition(f"{_quote_column(column)} {operator} ({', '.join('?' * len(listed))})", *listed)

    def _add_condition(self, text: str, *values: Any) -> Query:
        return self._copy(_conditions=(*self._conditions, (text, values)))

    def _copy(self, **changes: Any) -> Query:
        query = Query(self._connection, self._table)
        query.__dict__.update(self.__dict__, **changes)
        return query


def _quote_column(column: str) -> str:
    """A column for SQL: `title`, `notes.title`, or an expression such as `COUNT(*)` as it is."""
    parts = column.split(".")
    return ".".join(map(quoted, parts)) if all(part.isidentifier() for part in parts) else column


_awaitable = False


def make_results_awaitable(yes: bool) -> None:
    """Choose once per process: an async verifier may await results, or use them as they are."""
    global _awaitable
    _awaitable = yes


def as_result(value: Any) -> Any:
    """`value` itself, or for an async verifier an equal value that can be awaited too."""
    if not _awaitable:
        return value
    if value is None:
        return _AwaitableNone()
    kind = _AWAITABLE_TYPES.get(type(value))
    return kind(value) if kind is not None else value


class Awaitable:
    """Awaiting it returns the object itself."""

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self


class RowCount(int):
    """How many rows there are."""

    @property
    def value(self) -> int:
        return int(self)

    def assert_eq(self, expected: int) -> RowCount:
        return self._check(self == expected, f"{expected}")

    def assert_gt(self, threshold: int) -> RowCount:
        return self._check(self > threshold, f"more than {threshold}")

    def assert_between(self, low: int, high: int) -> RowCount:
        return self._check(low <= self <= high, f"{low} to {high}")

    def _check(self, is_met: bool, wanted: str) -> RowCount:
        if not is_met:
            raise AssertionError(f"expected {wanted} rows, found {int(self)}")
        return self


class _AwaitableList(list[Any], Awaitable):
    pass


class _AwaitableDict(dict[str, Any], Awaitable):
    pass


class _AwaitableCount(RowCount, Awaitable):
    pass


class _AwaitableNone(Awaitable):
    """None cannot be awaited; this is false and equal to None, and awaiting it returns None."""

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return other is None

    def __hash__(self) -> int:
        return hash(None)

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()


_AWAITABLE_TYPES: dict[type, type] = {list: _AwaitableList, dict: _AwaitableDict, RowCount: _AwaitableCount}
