"""The changes between two databases, compared with the changes that a verifier allows.

An allowed change is described by a dict with `table` and `pk`, and then either `field` and `after` (one
value; a whole row is `field` None with `after` `"__added__"` or `"__removed__"`), or `type` (`insert`, `modify`,
`delete`) with `fields` or `resulting_fields`: pairs of a name and a value, where `...` stands for any value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.fleet.instance.database_diff import DiffIgnore, compare_databases
from paddock.fleet.instance.verifier.queries import Awaitable

if TYPE_CHECKING:
    from paddock.fleet.instance.verifier.environment import VerifierDatabase

Spec = Mapping[str, Any]
ADDED, REMOVED = "__added__", "__removed__"
WHOLE_ROW = {"insert": ADDED, "delete": REMOVED}
MAX_SHOWN_CHANGES = 5


class IgnoreConfig:
    """Tables, fields and fields of single tables that a comparison skips."""

    def __init__(
        self,
        tables: Iterable[str] | None = None,
        fields: Iterable[str] | None = None,
        table_fields: Mapping[str, Iterable[str]] | None = None,
    ) -> None:
        self.tables = set(tables or ())
        self.fields = set(fields or ())
        self.table_fields = {table: set(names) for table, names in (table_fields or {}).items()}

    def should_ignore_table(self, table: str) -> bool:
        return table in self.tables

    def should_ignore_field(self, table: str, field: str) -> bool:
        return field in self.fields or field in self.table_fields.get(table, ())

    def to_diff_ignore(self) -> DiffIgnore:
        by_table = {table: frozenset(names) for table, names in self.table_fields.items()}
        return DiffIgnore(frozenset(self.tables), frozenset(self.fields), by_table)


@dataclass(frozen=True, slots=True)
class RowChange:
    """One added, removed or modified row."""

    type: str
    table: str
    row_id: Any
    row: dict[str, Any]
    fields: dict[str, dict[str, Any]]
    """The values before and after, for a row that was modified."""

    def __str__(self) -> str:
        what = self.fields if self.type == "modify" else self.row
        return f"{self.type} in {self.table}, row {self.row_id!r}: {json.dumps(what, default=repr)[:500]}"

    def is_named_by(self, spec: Spec) -> bool:
        return spec.get("table") == self.table and _is_same_key(spec.get("pk"), self.row_id)


class SnapshotDiff(Awaitable):
    """The difference between two databases. `changes` lists it, the `expect` methods check it."""

    def __init__(
        self, before: VerifierDatabase, after: VerifierDatabase, ignore_config: IgnoreConfig | None = None
    ) -> None:
        self.before = before
        self.after = after
        self.ignore_config = ignore_config or IgnoreConfig()
        self._changes_by_table: dict[str, dict[str, Any]] | None = None

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        if self._changes_by_table is None:
            ignored = self.ignore_config.to_diff_ignore()
            self._changes_by_table = compare_databases(
                self.before.connection, self.after.connection, ignored, equivalent
            )
        return self._changes_by_table

    def expect_only(self, allowed_changes: Iterable[Spec]) -> SnapshotDiff:
        """Raise AssertionError for a change that no spec with `field` and `after` allows."""
        return self._check(list(allowed_changes), _object_by_field)

    expect_only_v1 = expect_only

    def expect_only_v2(self, allowed_changes: Iterable[Spec]) -> SnapshotDiff:
        """Raise AssertionError for a change that no spec allows, with `type` or without."""
        return self._check(list(allowed_changes), _object_by_type)

    def expect_exactly(self, expected_changes: Iterable[Spec]) -> SnapshotDiff:
        """Like `expect_only_v2` with a `type` in every spec; and every spec must have happened."""
        specs = list(expected_changes)
        for number, spec in enumerate(specs):
            missing = {"type", "table", "pk"} - spec.keys()
            if missing:
                raise ValueError(f"spec {number} has no {', '.join(sorted(missing))}: {spec!r}")
            if spec["type"] not in ("insert", "modify", "delete"):
                raise ValueError(f"spec {number} has the type {spec['type']!r}; known are insert, modify, delete")
        changes = list(self._changes())
        self._check(specs, _object_by_type)
        for spec in specs:
            if not any(change.type == spec["type"] and change.is_named_by(spec) for change in changes):
                raise AssertionError(
                    f"expected {spec['type']} in {spec['table']}, row {spec['pk']!r}: it did not happen"
                )
        return self

    def expect(self, *, allow: Iterable[Spec] | None = None, forbid: Iterable[Spec] | None = None) -> SnapshotDiff:
        """Allow or forbid by table and field alone; a spec without `field` forbids new and removed rows."""
        allowed = {(spec["table"], spec.get("field")) for spec in allow or ()}
        forbidden = {(spec["table"], spec.get("field")) for spec in forbid or ()}
        for change in self._changes():
            if change.type != "modify" and (change.table, None) in forbidden:
                raise AssertionError(f"a forbidden change: {change}")
            for name in change.fields:
                place = (change.table, name)
                if place in forbidden or (allowed and place not in allowed):
                    raise AssertionError(f"a forbidden change of {name}: {change}")
        return self

    def _check(self, specs: list[Spec], objection: Callable[[RowChange, list[Spec]], str | None]) -> SnapshotDiff:
        objections = ((change, objection(change, specs)) for change in self._changes())
        refused = [f"{change} ({reason})" for change, reason in objections if reason is not None]
        if refused:
            more = [f"and {len(refused) - MAX_SHOWN_CHANGES} more"] if len(refused) > MAX_SHOWN_CHANGES else []
            raise AssertionError("\n".join(["changes that were not allowed:", *refused[:MAX_SHOWN_CHANGES], *more]))
        return self

    def _changes(self) -> Iterator[RowChange]:
        for table, report in self.changes.items():
            for type, rows in (("insert", "added_rows"), ("delete", "removed_rows"), ("modify", "modified_rows")):
                for row in report[rows]:
                    yield RowChange(type, table, row["row_id"], row["data"], row.get("changes", {}))


def _object_by_field(change: RowChange, specs: list[Spec]) -> str | None:
    """Why the change is not allowed; None if a spec allows it."""
    matching = [spec for spec in specs if change.is_named_by(spec)]
    if change.type != "modify":
        marks = [spec.get("after") for spec in matching if spec.get("field") is None]
        return None if WHOLE_ROW[change.type] in marks else "no spec allows the row"
    for name, values in change.fields.items():
        allowed = [spec.get("after") for spec in matching if spec.get("field") == name]
        if not any(equivalent(value, values["after"]) for value in allowed):
            return f"no spec allows {name} = {values['after']!r}"
    return None


def _object_by_type(change: RowChange, specs: list[Spec]) -> str | None:
    matching = [spec for spec in specs if change.is_named_by(spec) and spec.get("type") == change.type]
    if not matching:
        return _object_by_field(change, specs)
    spec = matching[0]
    if change.type == "modify":
        return _object_to_modification(change, spec)
    if spec.get("fields") is None:
        return None
    return _object_to_values(change.row, spec["fields"], complete=change.type == "insert")


def _object_to_modification(change: RowChange, spec: Spec) -> str | None:
    if spec.get("resulting_fields") is None:
        return None
    strict = spec.get("no_other_changes")
    if not isinstance(strict, bool):
        raise ValueError("a spec with resulting_fields needs no_other_changes: True or False")
    after = {name: values["after"] for name, values in change.fields.items()}
    return _object_to_values(after, spec["resulting_fields"], complete=strict)


def _object_to_values(row: dict[str, Any], pairs: Iterable[Any], *, complete: bool) -> str | None:
    """Why a row is not allowed; with `complete` the spec must name every field."""
    expected = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"a field is a pair of its name and its value (... for any), not {pair!r}")
        expected[pair[0]] = pair[1]
    for name, value in row.items():
        if name not in expected:
            if complete:
                return f"{name} is in no spec"
        elif expected[name] is not ... and not equivalent(expected[name], value):
            return f"expected {name} = {expected[name]!r}, found {value!r}"
    return None


def equivalent(one: Any, other: Any) -> bool:
    """Whether two values are equal, or are the same JSON object or array written differently."""
    if one == other:
        return True
    if not (isinstance(one, str) and isinstance(other, str) and one.strip()[:1] in ("{", "[")):
        return False
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def _is_same_key(spec_key: Any, row_id: Any) -> bool:
    """Keys are compared as text: specs write numbers as strings and tuples as lists."""
    if spec_key is None:
        return False
    if isinstance(spec_key, (list, tuple)) and isinstance(row_id, tuple):
        return [str(part) for part in spec_key] == [str(part) for part in row_id]
    return str(spec_key) == str(row_id)
