"""What verifiers say about databases, without a child."""

import sqlite3
from typing import Any

import pytest

from paddock.fleet.instance.verifier.child import (
    contains_number,
    extract_numbers,
    normalized_contains,
    normalized_string_comparison,
)
from paddock.fleet.instance.verifier.environment import VerifierDatabase
from paddock.fleet.instance.verifier.expectations import IgnoreConfig, SnapshotDiff, equivalent

from ..memory_database import MemoryDatabase

SCHEMA = "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b TEXT)"


def database(*rows: tuple[Any, ...]) -> VerifierDatabase:
    connection = MemoryDatabase()
    connection.execute(SCHEMA)
    connection.executemany("INSERT INTO t VALUES (?, ?, ?)", rows)
    return VerifierDatabase("db", connection)


def difference(*after: tuple[Any, ...], **ignored: Any) -> SnapshotDiff:
    before = database((1, "x", "y"), (2, "gone", "z"))
    return before.diff(database(*after), IgnoreConfig(**ignored))


ADDED = {"table": "t", "pk": 3, "field": None, "after": "__added__"}
REMOVED = {"table": "t", "pk": 2, "field": None, "after": "__removed__"}
CHANGED = {"table": "t", "pk": "1", "field": "a", "after": "X"}
INSERT = {"table": "t", "pk": 3, "type": "insert", "fields": [("id", 3), ("a", "new"), ("b", ...)]}
DELETE = {"table": "t", "pk": 2, "type": "delete"}
MODIFY = {"table": "t", "pk": 1, "type": "modify", "resulting_fields": [("a", "X")], "no_other_changes": True}
AFTER = ((1, "X", "y"), (3, "new", None))


def test_only_what_is_allowed_may_change() -> None:
    assert difference((1, "x", "y"), (2, "gone", "z")).expect_only([])
    assert difference(*AFTER).expect_only([ADDED, REMOVED, CHANGED])
    for missing in (ADDED, REMOVED, CHANGED):
        with pytest.raises(AssertionError, match="not allowed"):
            difference(*AFTER).expect_only([spec for spec in (ADDED, REMOVED, CHANGED) if spec is not missing])


def test_another_value_is_another_change() -> None:
    with pytest.raises(AssertionError, match="no spec allows a = 'X'"):
        difference(*AFTER).expect_only([ADDED, REMOVED, {**CHANGED, "after": "Y"}])


def test_rows_can_be_specified_field_by_field() -> None:
    assert difference(*AFTER).expect_only_v2([INSERT, DELETE, MODIFY])
    assert difference(*AFTER).expect_exactly([INSERT, DELETE, MODIFY])
    assert difference(*AFTER).expect_only_v2([ADDED, REMOVED, CHANGED])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**INSERT, "fields": [("id", 3), ("a", "new")]}, "b is in no spec"),
        ({**INSERT, "fields": [("id", 3), ("a", "old"), ("b", None)]}, "expected a = 'old'"),
        ({**MODIFY, "resulting_fields": [("b", "y")]}, "a is in no spec"),
        ({**MODIFY, "resulting_fields": [("a", "Z")]}, "expected a = 'Z'"),
        ({**DELETE, "fields": [("a", "there")]}, "expected a = 'there'"),
    ],
)
def test_a_row_must_match_its_spec(change: dict[str, Any], message: str) -> None:
    specs = [spec for spec in (INSERT, DELETE, MODIFY) if spec["type"] != change["type"]]
    with pytest.raises(AssertionError, match=message):
        difference(*AFTER).expect_only_v2([*specs, change])


def test_other_changes_may_be_allowed() -> None:
    loose = {**MODIFY, "resulting_fields": [("b", "y")], "no_other_changes": False}
    assert difference(*AFTER).expect_only_v2([INSERT, DELETE, loose])


def test_exactly_means_that_everything_happened() -> None:
    with pytest.raises(AssertionError, match="it did not happen"):
        difference((1, "x", "y")).expect_exactly([DELETE, MODIFY])
    assert difference((1, "x", "y")).expect_only_v2([DELETE, MODIFY])


@pytest.mark.parametrize(
    "spec",
    [
        {"table": "t", "pk": 1},
        {**DELETE, "type": "vanish"},
        {**MODIFY, "no_other_changes": "yes"},
        {**INSERT, "fields": ["a"]},
    ],
)
def test_a_wrong_spec_is_a_mistake_of_the_verifier(spec: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"spec|pair"):
        difference(*AFTER).expect_exactly([spec])


def test_ignored_fields_are_not_compared() -> None:
    assert difference(*AFTER, tables={"t"}).expect_only([])
    assert difference((1, "X", "y"), (2, "gone", "z"), fields={"a"}).expect_only([])
    assert difference((1, "X", "y"), (2, "gone", "z"), table_fields={"t": {"a"}}).expect_only([])


def test_tables_and_fields_may_be_forbidden() -> None:
    assert difference(*AFTER).expect(allow=[{"table": "t", "field": "a"}])
    with pytest.raises(AssertionError):
        difference(*AFTER).expect(allow=[{"table": "t", "field": "b"}])
    with pytest.raises(AssertionError):
        difference(*AFTER).expect(forbid=[{"table": "t", "field": "a"}])
    with pytest.raises(AssertionError):
        difference(*AFTER).expect(forbid=[{"table": "t"}])


def test_the_same_json_written_differently_is_the_same() -> None:
    assert equivalent('{"a": 1, "b": [2]}', '{"b":[2],"a":1}')
    assert not equivalent('{"a": 1}', '{"a": 2}')
    assert not equivalent("{x", "{y")
    assert not equivalent(None, "")


def test_queries_are_put_together_step_by_step() -> None:
    table = database((1, "x", None), (2, "y", "b"), (3, "z", "b")).table("t")
    assert [row["id"] for row in table.sort("id", desc=True).limit(2).all()] == [3, 2]
    assert table.eq("b", "b").count() == 2
    assert table.eq("b", None).first()["id"] == 1
    assert table.neq("b", None).neq("a", "y").first()["id"] == 3
    assert table.gt("id", 1).lte("id", 2).select("a").all() == [{"a": "y"}]
    assert table.gte("id", 2).lt("id", 3).count().assert_eq(1) == 1
    assert [row["id"] for row in table.in_("a", ["x", "z"]).all()] == [1, 3]
    assert table.not_in("a", ["x", "z"]).first()["id"] == 2
    assert table.ilike("a", "X%").where(id=1).first() == {"id": 1, "a": "x", "b": None}
    assert table.in_("a", []).first() is None
    assert table.join("t", {"id": "id"}).explain().startswith("SELECT * FROM")


def test_queries_have_assertions() -> None:
    result = database((1, "x", None))
    table = result.table("t")
    assert table.eq("id", 1).assert_exists().assert_eq("a", "x")
    result.expect_row("t", {"id": 1}, {"a": "x"}).expect_rows("t", {}, count=1, contains=[{"a": "x"}])
    result.expect_absent_row("t", {"id": 2})
    for wrong in (
        lambda: table.eq("id", 2).assert_exists(),
        lambda: table.assert_none(),
        lambda: table.assert_eq("a", "y"),
        lambda: table.count().assert_gt(1),
        lambda: table.count().assert_between(2, 3),
        lambda: result.expect_rows("t", {}, contains=[{"a": "y"}]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        result.table("nothing")


def test_names_and_numbers_are_compared_loosely() -> None:
    assert normalized_contains("New York", {"city": "new-york!"})
    assert not normalized_contains("Boston", "new york")
    assert normalized_string_comparison("A, b", "ab")
    assert extract_numbers("from -3 to 1,200.5") == [-3.0, 1200.5]
    assert contains_number("costs $1,200", "1,200")
    assert not contains_number("costs $1,200", "many")
