import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddock.fleet.instance import databases as module
from paddock.fleet.instance.database_diff import DiffIgnore
from paddock.fleet.instance.databases import Databases


@pytest.fixture
def databases(tmp_path: Path) -> Databases:
    opened = Databases(tmp_path)
    with closing(sqlite3.connect(opened.clear())) as connection, connection:
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        connection.execute("INSERT INTO t (a) VALUES ('one')")
    opened.keep_seed()
    return opened


def write(databases: Databases, sql: str, *arguments: Any, name: str = "current") -> dict[str, Any]:
    return databases.query(name, sql, arguments, read_only=False)


def test_a_query_returns_columns_and_rows(databases: Databases) -> None:
    result = databases.query("current", "SELECT id, a FROM t WHERE a = ?", ["one"], read_only=True)
    assert (result["success"], result["columns"], result["rows"]) == (True, ["id", "a"], [[1, "one"]])
    assert (result["rows_affected"], result["last_insert_id"]) == (None, None)


def test_a_write_reports_its_rows_and_persists(databases: Databases) -> None:
    done = write(databases, "INSERT INTO t (a) VALUES (?)", "two")
    assert (done["rows_affected"], done["last_insert_id"], done["rows"]) == (1, 2, None)
    assert write(databases, "INSERT INTO t (a) VALUES ('three') RETURNING id")["rows"] == [[3]]
    assert databases.query("current", "SELECT COUNT(*) FROM t", (), read_only=True)["rows"] == [[3]]
    assert databases.diff(DiffIgnore())["t"]["total_changes"] == 2


@pytest.mark.parametrize(
    "sql", ["DELETE FROM t", "DROP TABLE t", "CREATE TABLE x (a)", "INSERT INTO t DEFAULT VALUES"]
)
def test_what_is_read_only_stays_as_it_is(databases: Databases, sql: str) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        databases.query("current", sql, (), read_only=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        write(databases, sql, name="seed")
    assert databases.diff(DiffIgnore())["t"]["total_changes"] == 0


def test_read_only_does_not_carry_over_to_the_next_query(databases: Databases) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        databases.query("current", "PRAGMA query_only = OFF", (), read_only=True)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        databases.query("current", "DELETE FROM t", (), read_only=True)


def test_no_statement_reaches_another_file(databases: Databases, tmp_path: Path) -> None:
    for sql in (f"ATTACH '{databases.path('seed')}' AS s", f"VACUUM INTO '{tmp_path / 'copy'}'"):
        with pytest.raises(sqlite3.OperationalError, match="attached"):
            write(databases, sql)
    assert not (tmp_path / "copy").exists()


def test_one_statement_at_a_time(databases: Databases) -> None:
    with pytest.raises((sqlite3.Warning, sqlite3.ProgrammingError), match="one statement"):
        write(databases, "DELETE FROM t; DELETE FROM t")


def test_an_endless_query_is_interrupted(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "QUERY_SECONDS", 0.05)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"
    with pytest.raises(sqlite3.OperationalError, match="interrupted: it took longer than"):
        databases.query("current", endless, (), read_only=True)


def test_an_endless_result_is_refused(databases: Databases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 10)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    with pytest.raises(ValueError, match="LIMIT"):
        databases.query("current", endless, (), read_only=True)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT zeroblob(2000)", "too big"),
        ("SELECT hex(zeroblob(600))", "too big"),
        (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT zeroblob(100) FROM n",
            "bytes: select less",
        ),
    ],
)
def test_an_answer_has_a_size_limit(
    databases: Databases, monkeypatch: pytest.MonkeyPatch, sql: str, message: str
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 1000)
    with pytest.raises((ValueError, sqlite3.DatabaseError), match=message):
        databases.query("current", sql, (), read_only=True)


def test_bytes_become_base64(databases: Databases) -> None:
    write(databases, "INSERT INTO t (a) VALUES (x'ff00'), (CAST(x'ff41' AS TEXT))")
    rows = databases.query("current", "SELECT a FROM t WHERE id > 1", (), read_only=True)["rows"]
    assert rows == [["/wA="], ["\ufffdA"]]
    assert databases.diff(DiffIgnore())["t"]["added_rows"][0]["data"]["a"] == "/wA="


def test_the_seed_is_what_was_there_when_it_was_kept(databases: Databases) -> None:
    write(databases, "DELETE FROM t")
    assert databases.query("seed", "SELECT a FROM t", (), read_only=True)["rows"] == [["one"]]
    databases.keep_seed()
    assert databases.query("seed", "SELECT a FROM t", (), read_only=True)["rows"] == []


def test_a_description_names_tables_and_columns(databases: Databases) -> None:
    result = databases.describe("seed")
    assert [table["name"] for table in result["tables"]] == ["t"]
    assert [column["pk"] for column in result["tables"][0]["columns"]] == [1, 0]
    assert result["tables"][0]["sql"].startswith("CREATE TABLE t")


def test_an_environment_may_write_ahead(tmp_path: Path) -> None:
    opened = Databases(tmp_path)
    with closing(sqlite3.connect(opened.clear())) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        with connection:
            connection.execute("CREATE TABLE t (a)")
        opened.keep_seed()
        with connection:
            connection.execute("INSERT INTO t VALUES (1)")
        assert opened.query("seed", "SELECT COUNT(*) FROM t", (), read_only=True)["rows"] == [[0]]
        assert opened.diff(DiffIgnore())["t"]["total_changes"] == 1
    assert not opened.clear().exists()
