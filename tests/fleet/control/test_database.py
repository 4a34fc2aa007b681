"""The plane's memory outlives versions of Paddock."""

import sqlite3
from pathlib import Path

import pytest

from paddock.errors import ConfigError
from paddock.fleet.control import records
from paddock.fleet.control.database import SCHEMA, Database
from paddock.fleet.control.records import Order


def test_a_database_of_the_version_before_is_brought_up_to_date(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "plane.db") as old:
        old.executescript(SCHEMA.replace(", address TEXT)", ")") + "PRAGMA user_version = 1;")
    old.close()
    database = Database(tmp_path)
    order = Order(instance_id="i", env_key="e", version="v1", region="r", ttl_seconds=9, max_wait_seconds=9)
    database.run_blocking(records.insert, order, 5)
    running = database.run_blocking(records.mark_running, "i", 80, "10.0.0.7")
    assert running is not None
    assert (running.port, running.address) == (80, "10.0.0.7")
    database.close()


def test_a_database_of_a_later_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "plane.db") as later:
        later.execute("PRAGMA user_version = 99")
    later.close()
    with pytest.raises(ConfigError, match="another version"):
        Database(tmp_path)
