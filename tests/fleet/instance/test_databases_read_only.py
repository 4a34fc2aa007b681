"""Attacks on a read-only query: each must be refused, and leave every file as it was."""

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from paddock.fleet.instance.databases import Databases
from paddock.fleet.instance.verifier.environment import copy_database

ATTACKS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA journal_mode(WAL)",
    "PRAGMA main.journal_mode = OFF",
    "pragma JOURNAL_MODE = memory",
    "/* harmless */ PRAGMA journal_mode = WAL -- really",
    "PRAGMA query_only = OFF",
    "PRAGMA writable_schema = ON",
    "PRAGMA user_version = 7",
    "PRAGMA application_id = 7",
    "PRAGMA schema_version = 7",
    "PRAGMA encoding = 'UTF-16'",
    "PRAGMA auto_vacuum = FULL",
    "PRAGMA incremental_vacuum(10)",
    "PRAGMA wal_checkpoint(TRUNCATE)",
    "PRAGMA optimize",
    "PRAGMA locking_mode = EXCLUSIVE",
    "PRAGMA temp_store_directory = '/tmp'",
    "PRAGMA foreign_keys = OFF",
    "PRAGMA synchronous = OFF",
    "PRAGMA page_size = 512",
    "EXPLAIN PRAGMA journal_mode = WAL",
    "ATTACH '{folder}/attached.sqlite' AS other",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "VACUUM",
    "VACUUM INTO '{folder}/copy.sqlite'",
    "INSERT INTO t (a) VALUES ('x')",
    "INSERT INTO t (a) VALUES ('x') RETURNING id",
    "REPLACE INTO t (id, a) VALUES (1, 'x')",
    "UPDATE t SET a = 'x'",
    "DELETE FROM t",
    "WITH n(i) AS (SELECT 1) INSERT INTO t (a) SELECT i FROM n",
    "WITH n(i) AS (SELECT 1) DELETE FROM t WHERE id IN n",
    "UPDATE sqlite_master SET sql = 'x'",
    "INSERT INTO search (search) VALUES ('optimize')",
    "INSERT INTO search (search) VALUES ('delete-all')",
    "DROP TABLE t",
    "ALTER TABLE t ADD COLUMN b",
    "CREATE TABLE x (a)",
    "CREATE INDEX i ON t (a)",
    "CREATE VIEW v AS SELECT 1",
    "CREATE TEMP TABLE x (a)",
    "CREATE TEMP TRIGGER g AFTER INSERT ON t BEGIN DELETE FROM t; END",
    "CREATE VIRTUAL TABLE x USING fts5(a)",
    "CREATE VIRTUAL TABLE temp.x USING fts5(a)",
    "REINDEX",
    "ANALYZE",
    "BEGIN EXCLUSIVE",
    "SAVEPOINT s",
    "ROLLBACK",
    "SELECT load_extension('/tmp/evil.so')",
    "SELECT fts3_tokenizer('simple')",
    "SELECT 1; DELETE FROM t",
    "SELECT 1; PRAGMA journal_mode = WAL",
    "SELECT 1;\nCOMMIT; DELETE FROM t",
)
READS = (
    "SELECT a FROM t",
    "SELECT COUNT(*), MAX(a), upper(a) FROM t GROUP BY a ORDER BY 1",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 3) SELECT i FROM n",
    "SELECT value FROM json_each('[1, 2]')",
    "SELECT body FROM search WHERE search MATCH 'milk'",
    "SELECT name FROM sqlite_master",
    "SELECT name FROM pragma_table_info('t')",
    "PRAGMA table_info(t)",
    "PRAGMA journal_mode",
    "PRAGMA user_version",
    "PRAGMA integrity_check",
    "EXPLAIN QUERY PLAN SELECT a FROM t",
    "VALUES (1, 2)",
)


@pytest.fixture(params=["DELETE", "WAL"])
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> Databases:
    opened = Databases(tmp_path)
    with closing(sqlite3.connect(opened.clear())) as connection, connection:
        connection.execute(f"PRAGMA journal_mode = {request.param}")
        connection.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, a)")
        connection.execute("INSERT INTO t (a) VALUES ('one')")
        connection.execute("CREATE VIRTUAL TABLE search USING fts5(body)")
        connection.execute("INSERT INTO search VALUES ('milk and bread')")
    opened.keep_seed()
    return opened


def contents(folder: Path) -> dict[str, str]:
    """Every file of the folder but the empty ones that a reader of a WAL database shares memory by."""
    files = [path for path in folder.iterdir() if path.suffix != ".sqlite-shm" and path.stat().st_size]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", ["current", "seed"])
def test_no_attack_on_a_read_only_query_changes_anything(databases: Databases, tmp_path: Path, name: str) -> None:
    before = contents(tmp_path)
    refused = []
    for attack in ATTACKS:
        try:
            databases.query(name, attack.format(folder=tmp_path), (), read_only=True)
        except (sqlite3.Error, sqlite3.Warning):
            refused.append(attack)
        assert contents(tmp_path) == before, attack
    assert [attack for attack in ATTACKS if attack not in refused] == []


def test_the_seed_is_always_read_only(databases: Databases, tmp_path: Path) -> None:
    before = contents(tmp_path)
    for attack in ATTACKS:
        with pytest.raises((sqlite3.Error, sqlite3.Warning)):
            databases.query("seed", attack.format(folder=tmp_path), (), read_only=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("sql", READS)
def test_reading_goes_on(databases: Databases, sql: str) -> None:
    assert databases.query("current", sql, (), read_only=True)["rows"] is not None


def test_the_refusal_says_what_is_allowed(databases: Databases) -> None:
    with pytest.raises(sqlite3.OperationalError, match=r"SELECT.*read_only: false"):
        databases.query("current", "PRAGMA journal_mode = WAL", (), read_only=True)


def test_writing_works_with_read_only_false(databases: Databases) -> None:
    assert databases.query("current", "UPDATE t SET a = 'two'", (), read_only=False)["rows_affected"] == 1
    assert databases.query("current", "SELECT a FROM t", (), read_only=True)["rows"] == [["two"]]


def test_a_verifier_reads_only_too(databases: Databases, tmp_path: Path) -> None:
    copy = copy_database("current", str(databases.path("current")))
    allowed = [attack for attack in ATTACKS if copy.query(attack.format(folder=tmp_path)).success]
    assert allowed == []
    assert copy.query("SELECT a FROM t").rows == [["one"]]
    copy.connection.close()
