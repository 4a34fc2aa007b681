"""The SQLite layer: versions, migrations, transactions and the worker thread."""

import asyncio
import logging
import sqlite3
import threading
from pathlib import Path

import pytest

from paddock.errors import StoreError
from paddock.sqlite import Database, Migration, Schema, WorkerThread, connect, read_pragma

FIRST = Schema(("CREATE TABLE items (name TEXT)",), application_id=7)


def add_size(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE items ADD COLUMN size INTEGER DEFAULT 1")


def emulate_size(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TEMP VIEW items AS SELECT name, 1 AS size FROM main.items")


SECOND = Schema(
    ("CREATE TABLE items (name TEXT, size INTEGER DEFAULT 1)",),
    (Migration(add_size, emulate_size),),
    application_id=7,
)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    file = tmp_path / "items.db"
    database = Database(file, FIRST)
    with database.write() as connection:
        connection.execute("INSERT INTO items VALUES ('one')")
    database.close()
    return file


def rows(database: Database) -> list[tuple[object, ...]]:
    with database.read() as connection:
        return [tuple(row) for row in connection.execute("SELECT name, size FROM items")]


def test_the_version_counts_the_migrations() -> None:
    assert (FIRST.version, SECOND.version) == (1, 2)


def test_a_new_file_has_the_newest_version(tmp_path: Path) -> None:
    database = Database(tmp_path / "items.db", SECOND, named_rows=True)
    with database.write() as connection:
        assert read_pragma(connection, "user_version") == 2
        connection.execute("INSERT INTO items (name) VALUES ('one')")
        assert connection.execute("SELECT * FROM items").fetchone()["size"] == 1
    database.close()


def test_an_older_file_is_migrated(old: Path) -> None:
    for _ in range(2):
        database = Database(old, SECOND)
        assert rows(database) == [("one", 1)]
        assert not database.is_emulated
        database.close()


def test_an_older_file_is_read_through_views_and_not_changed(old: Path) -> None:
    database = Database(old, SECOND, read_only=True)
    assert database.is_emulated
    assert rows(database) == [("one", 1)]
    database.close()
    connection = connect(old, "ro")
    assert read_pragma(connection, "user_version") == 1
    connection.close()


def test_a_failed_migration_changes_nothing(old: Path) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        raise RuntimeError("failed")

    broken = Schema(SECOND.tables, (*SECOND.migrations, Migration(fail)), application_id=7)
    with pytest.raises(RuntimeError):
        Database(old, broken)
    database = Database(old, FIRST)
    with database.read() as connection:
        assert connection.execute("SELECT * FROM items").fetchall() == [("one",)]
    database.close()


def test_a_newer_file_and_one_of_another_program_are_refused(old: Path) -> None:
    Database(old, SECOND).close()
    with pytest.raises(StoreError, match="newer paddock"):
        Database(old, FIRST)
    with pytest.raises(StoreError, match="another program"):
        Database(old, Schema(FIRST.tables, application_id=8))


def test_a_failed_transaction_leaves_nothing(old: Path) -> None:
    database = Database(old, SECOND)

    def delete_and_fail() -> None:
        with database.write() as connection:
            connection.execute("DELETE FROM items")
            raise RuntimeError("failed")

    with pytest.raises(RuntimeError):
        delete_and_fail()
    assert rows(database) == [("one", 1)]
    database.close()
    with pytest.raises(StoreError, match="closed"):
        rows(database)


def test_sqlite_errors_become_store_errors(old: Path) -> None:
    database = Database(old, SECOND, name="the list")
    with pytest.raises(StoreError, match="the list: no such table"), database.write() as connection:
        connection.execute("SELECT * FROM missing")
    database.close()


def test_the_worker_thread_keeps_the_order() -> None:
    worker = WorkerThread("test-worker")
    order: list[int] = []

    async def run_all() -> None:
        await asyncio.gather(*(worker.run(lambda number=number: order.append(number)) for number in range(20)))  # type: ignore[misc]

    asyncio.run(run_all())
    worker.close()
    assert order == list(range(20))


def test_work_of_a_cancelled_caller_is_done_and_its_error_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerThread("test-worker")
    held = threading.Event()

    def fail() -> None:
        held.wait(20)
        raise RuntimeError("failed late")

    async def leave() -> None:
        task = asyncio.create_task(worker.run(fail))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    held.set()
    with caplog.at_level(logging.WARNING):
        worker.close()
    assert "failed late" in caplog.text
