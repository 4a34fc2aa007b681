"""What changed between two databases, and whether only that changed which was allowed to.

A change that is allowed is described by a dict with `table` and `pk`, and then either `field` and `after` (one
value; a whole row is `field` None with `after` `"__added__"` or `"__removed__"`), or `type` (`insert`, `modify`,
`delete`) with `fields` or `resulting_fields`: pairs of a name and a value, where `...` stands for any value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.fleet.instance.differences import Ignored, differences
from paddock.fleet.instance.verifier.results import Awaited

if TYPE_CHECKING:
    from paddock.fleet.instance.verifier.handle import Database

Spec = Mapping[str, Any]
ADDED, REMOVED = "__added__", "__removed__"
WHOLE_ROW = {"insert": ADDED, "delete": REMOVED}
MOST_SHOWN = 5


class IgnoreConfig:
    """Tables, fields and fields of single tables that a comparison passes by."""

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

    def ignored(self) -> Ignored:
        by_table = {table: frozenset(names) for table, names in self.table_fields.items()}
        return Ignored(frozenset(self.tables), frozenset(self.fields), by_table)


@dataclass(frozen=True, slots=True)
class Change:
    """One row that is not what it was."""

    type: str
    table: str
    row_id: Any
    row: dict[str, Any]
    fields: dict[str, dict[str, Any]]
    """The values before and after, for a row that was modified."""

    def __str__(self) -> str:
        what = self.fields if self.type == "modify" else self.row
        return f"{self.type} in {self.table}, row {self.row_id!r}: {json.dumps(what, default=repr)[:500]}"

    def is_meant_by(self, spec: Spec) -> bool:
        return spec.get("table") == self.table and _same_key(spec.get("pk"), self.row_id)


class SnapshotDiff(Awaited):
    """The difference between two databases. `changes` shows it, the `expect` methods judge it."""

    def __init__(self, before: Database, after: Database, ignore_config: IgnoreConfig | None = None) -> None:
        self.before = before
        self.after = after
        self.ignore_config = ignore_config or IgnoreConfig()
        self._found: dict[str, dict[str, Any]] | None = None

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        if self._found is None:
            ignored = self.ignore_config.ignored()
            self._found = differences(self.before.connection, self.after.connection, ignored, equivalent)
        return self._found

    def expect_only(self, allowed_changes: Iterable[Spec]) -> SnapshotDiff:
        """Raise AssertionError for a change that no spec with `field` and `after` allows."""
        return self._judge(list(allowed_changes), _allowed_by_field)

    expect_only_v1 = expect_only

    def expect_only_v2(self, allowed_changes: Iterable[Spec]) -> SnapshotDiff:
        """Raise AssertionError for a change that no spec allows, with `type` or without."""
        return self._judge(list(allowed_changes), _allowed_by_type)

    def expect_exactly(self, expected_changes: Iterable[Spec]) -> SnapshotDiff:
        """Like `expect_only_v2` with a `type` in every spec; and every spec must have happened."""
        specs = list(expected_changes)
        for number, spec in enumerate(specs):
            missing = {"type", "table", "pk"} - spec.keys()
            if missing:
                raise ValueError(f"spec {number} has no {', '.join(sorted(missing))}: {spec!r}")
            if spec["type"] not in ("insert", "modify", "delete"):
                raise ValueError(f"spec {number} has the type {spec['type']!r}; known are insert, modify, delete")
        happened = list(self._changes())
        self._judge(specs, _allowed_by_type)
        for spec in specs:
            if not any(change.type == spec["type"] and change.is_meant_by(spec) for change in happened):
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

    def _judge(self, specs: list[Spec], objection: Callable[[Change, list[Spec]], str | None]) -> SnapshotDiff:
        found = [f"{change} ({said})" for change in self._changes() if (said := objection(change, specs)) is not None]
        if found:
            more = [f"and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
            raise AssertionError("\n".join(["changes that were not allowed:", *found[:MOST_SHOWN], *more]))
        return self

    def _changes(self) -> Iterator[Change]:
        for table, report in self.changes.items():
            for type, rows in (("insert", "added_rows"), ("delete", "removed_rows"), ("modify", "modified_rows")):
                for row in report[rows]:
                    yield Change(type, table, row["row_id"], row["data"], row.get("changes", {}))


def _allowed_by_field(change: Change, specs: list[Spec]) -> str | None:
    """What speaks against the change; None if a spec allows it."""
    meant = [spec for spec in specs if change.is_meant_by(spec)]
    if change.type != "modify":
        marks = [spec.get("after") for spec in meant if spec.get("field") is None]
        return None if WHOLE_ROW[change.type] in marks else "no spec allows the row"
    for name, values in change.fields.items():
        allowed = [spec.get("after") for spec in meant if spec.get("field") == name]
        if not any(equivalent(value, values["after"]) for value in allowed):
            return f"no spec allows {name} = {values['after']!r}"
    return None


def _allowed_by_type(change: Change, specs: list[Spec]) -> str | None:
    meant = [spec for spec in specs if change.is_meant_by(spec) and spec.get("type") == change.type]
    if not meant:
        return _allowed_by_field(change, specs)
    spec = meant[0]
    if change.type == "modify":
        return _against_modification(change, spec)
    if spec.get("fields") is None:
        return None
    return _against_values(change.row, spec["fields"], complete=change.type == "insert")


def _against_modification(change: Change, spec: Spec) -> str | None:
    if spec.get("resulting_fields") is None:
        return None
    strict = spec.get("no_other_changes")
    if not isinstance(strict, bool):
        raise ValueError("a spec with resulting_fields needs no_other_changes: True or False")
    after = {name: values["after"] for name, values in change.fields.items()}
    return _against_values(after, spec["resulting_fields"], complete=strict)


def _against_values(row: dict[str, Any], pairs: Iterable[Any], *, complete: bool) -> str | None:
    """What speaks against a row; with `complete` every one of its fields must be named."""
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


def _same_key(written: Any, row_id: Any) -> bool:
    """Keys are compared as text, for specs write numbers as strings and tuples as lists."""
    if written is None:
        return False
    if isinstance(written, (list, tuple)) and isinstance(row_id, tuple):
        return [str(part) for part in written] == [str(part) for part in row_id]
    return str(written) == str(row_id)
