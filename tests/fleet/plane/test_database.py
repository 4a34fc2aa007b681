"""The plane's database outlives versions of Paddock."""

import sqlite3
from pathlib import Path

import pytest

from paddock.errors import StoreError
from paddock.fleet.plane import instance_records
from paddock.fleet.plane.database import TABLES, PlaneDatabase
from paddock.fleet.plane.instance_records import InstanceRequest


def test_a_database_of_the_version_before_is_migrated(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "plane.db") as old:
        for statement in TABLES:
            old.execute(statement.replace(", address TEXT)", ")"))
        old.execute("PRAGMA user_version = 1")
    old.close()
    database = PlaneDatabase(tmp_path)
    request = InstanceRequest(
        instance_id="i", env_key="e", version="v1", region="r", ttl_seconds=9, max_wait_seconds=9
    )
    database.run_blocking(instance_records.insert, request, 5)
    running = database.run_blocking(instance_records.mark_running, "i", 80, "10.0.0.7")
    assert running is not None
    assert (running.port, running.address) == (80, "10.0.0.7")
    database.close()


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "plane.db") as later:
        later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(StoreError, match="newer"):
        PlaneDatabase(tmp_path)
