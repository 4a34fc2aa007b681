import sqlite3
from typing import Any

from paddock.fleet.instance.database_diff import DiffIgnore, compare_databases, describe_columns, table_names

from .memory_database import MemoryDatabase

NOTHING = DiffIgnore()


def database(*statements: str) -> sqlite3.Connection:
    connection = MemoryDatabase()
    for statement in statements:
        connection.execute(statement)
    return connection


def compared(before: list[str], after: list[str], schema: str, ignored: DiffIgnore = NOTHING) -> dict[str, Any]:
    return compare_databases(database(schema, *before), database(schema, *after), ignored)["t"]


KEYED = "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b TEXT)"


def test_every_kind_of_change_has_its_list() -> None:
    before = ["INSERT INTO t VALUES (1, 'x', 'y'), (2, 'gone', ''), (3, 'same', '')"]
    after = ["INSERT INTO t VALUES (1, 'z', 'y'), (3, 'same', ''), (4, 'new', NULL)"]
    assert compared(before, after, KEYED) == {
        "table_name": "t",
        "primary_key": ["id"],
        "added_rows": [{"row_id": 4, "data": {"id": 4, "a": "new", "b": None}}],
        "removed_rows": [{"row_id": 2, "data": {"id": 2, "a": "gone", "b": ""}}],
        "modified_rows": [
            {"row_id": 1, "changes": {"a": {"before": "x", "after": "z"}}, "data": {"id": 1, "a": "z", "b": "y"}}
        ],
        "unchanged_count": 1,
        "total_changes": 3,
    }


def test_a_key_of_two_columns_is_in_its_own_order() -> None:
    schema = "CREATE TABLE t (a INT, b INT, c INT, PRIMARY KEY (b, a)) WITHOUT ROWID"
    differences = compared(["INSERT INTO t VALUES (1, 2, 3)"], ["INSERT INTO t VALUES (1, 2, 4)"], schema)
    assert differences["primary_key"] == ["b", "a"]
    assert [row["row_id"] for row in differences["modified_rows"]] == [(2, 1)]


def test_rows_without_a_key_go_by_a_unique_id_else_by_their_number() -> None:
    schema = "CREATE TABLE t (id INT, a TEXT)"
    unique = compared(["INSERT INTO t VALUES (7, 'x')"], ["INSERT INTO t VALUES (7, 'y')"], schema)
    assert (unique["primary_key"], unique["modified_rows"][0]["row_id"]) == (["id"], 7)
    twice = compared(["INSERT INTO t VALUES (7, 'x')"], ["INSERT INTO t VALUES (7, 'x'), (7, 'x')"], schema)
    assert twice["primary_key"] == ["rowid"]
    assert twice["added_rows"] == [{"row_id": 2, "data": {"id": 7, "a": "x"}}]


def test_ignored_tables_and_fields_are_left_out() -> None:
    before, after = ["INSERT INTO t VALUES (1, 'x', 'y')"], ["INSERT INTO t VALUES (1, 'z', 'w'), (2, 'n', 'm')"]
    one = compared(before, after, KEYED, DiffIgnore(fields=frozenset(["a"])))
    assert one["modified_rows"][0]["changes"] == {"b": {"before": "y", "after": "w"}}
    assert one["added_rows"][0]["data"] == {"id": 2, "b": "m"}
    both = compared(before, after, KEYED, DiffIgnore(table_fields={"t": frozenset(["a", "b"])}))
    assert (both["modified_rows"], both["unchanged_count"]) == ([], 1)
    assert compare_databases(database(KEYED), database(KEYED), DiffIgnore(tables=frozenset(["t"]))) == {}


def test_a_table_of_one_side_is_all_new_or_all_gone() -> None:
    filled = database(KEYED, "INSERT INTO t VALUES (1, 'x', 'y')")
    assert len(compare_databases(database(), filled, NOTHING)["t"]["added_rows"]) == 1
    assert len(compare_databases(filled, database(), NOTHING)["t"]["removed_rows"]) == 1


def test_a_column_of_one_side_is_a_change() -> None:
    wider = database(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, a TEXT, b TEXT, c INT)", "INSERT INTO t VALUES (1, 'x', 'y', 5)"
    )
    differences = compare_databases(database(KEYED, "INSERT INTO t VALUES (1, 'x', 'y')"), wider, NOTHING)["t"]
    assert differences["modified_rows"][0]["changes"] == {"c": {"before": None, "after": 5}}


def test_odd_names_and_mixed_keys_are_compared() -> None:
    schema = 'CREATE TABLE "a ""b" ("select" PRIMARY KEY, "x y")'
    rows = """INSERT INTO "a ""b" VALUES (1, 1), ('1', 2), (1.5, 3), (NULL, 4)"""
    differences = compare_databases(database(schema), database(schema, rows), NOTHING)['a "b']
    assert differences["total_changes"] == 4


def test_the_tables_of_sqlite_itself_are_left_out() -> None:
    connection = database("CREATE TABLE t (id INTEGER PRIMARY KEY AUTOINCREMENT)", "CREATE TABLE sqlitex (a)")
    assert table_names(connection) == ["sqlitex", "t"]


def test_columns_have_their_position_in_the_key() -> None:
    connection = database("CREATE TABLE t (a INT NOT NULL DEFAULT 3, b INT, PRIMARY KEY (b, a))")
    assert describe_columns(connection, "t") == [
        {"name": "a", "type": "INT", "notnull": True, "default_value": "3", "pk": 2},
        {"name": "b", "type": "INT", "notnull": False, "default_value": None, "pk": 1},
    ]
