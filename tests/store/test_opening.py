"""Where the store is, who may read it, and which files it refuses."""

import os
import sqlite3
from pathlib import Path

import pytest

from paddock.errors import StoreError
from paddock.store import Store
from paddock.store.record import RolloutRecord
from paddock.store.schema import SCHEMA
from paddock.store.store import default_folder

from .children import go, running, start


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a" / "store") as store:
        assert store.path == tmp_path / "a" / "store"
        assert store.path.stat().st_mode & 0o777 == 0o700
        assert (store.path / "store.db").stat().st_mode & 0o777 == 0o600


def test_the_default_folder_follows_the_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PADDOCK_STORE", raising=False)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".local/share/paddock/store"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_folder() == tmp_path / "data/paddock/store"
    monkeypatch.setenv("PADDOCK_STORE", str(tmp_path / "mine"))
    with Store.open() as store:
        assert store.path == tmp_path / "mine"


def test_the_settings_are_those_promised(store: Store) -> None:
    with store._database.autocommit() as connection:

        def setting(name: str) -> object:
            return connection.execute(f"PRAGMA {name}").fetchone()[0]

        assert setting("journal_mode") == "wal"
        assert setting("synchronous") == 1
        assert setting("foreign_keys") == 1
        assert setting("busy_timeout") == 10_000
        assert setting("auto_vacuum") == 2
        assert setting("user_version") == SCHEMA.version


def test_what_was_stored_is_there_when_opened_again(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.begin(RolloutRecord("r-one", "task"))
    with Store.open(tmp_path) as store:
        assert store.get("r-one") is not None


def altered(folder: Path, statement: str) -> Path:
    folder.mkdir(exist_ok=True)
    connection = sqlite3.connect(folder / "store.db")
    connection.execute(statement)
    connection.commit()
    connection.close()
    return folder


def test_a_newer_store_is_refused_with_advice(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    altered(tmp_path, "PRAGMA user_version = 99")
    for read_only in (False, True):
        with pytest.raises(StoreError, match="newer paddock") as caught:
            Store.open(tmp_path, read_only=read_only)
        assert "upgrade" in str(caught.value.hint)


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    altered(tmp_path, "CREATE TABLE theirs (x)")
    before = (tmp_path / "store.db").read_bytes()
    with pytest.raises(StoreError, match="another program"):
        Store.open(tmp_path)
    assert (tmp_path / "store.db").read_bytes() == before


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_text("hello " * 1000)
    with pytest.raises(StoreError) as caught:
        Store.open(tmp_path)
    assert "another folder" in str(caught.value.hint)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot be written") as caught:
            Store.open(folder)
        assert "PADDOCK_STORE" in str(caught.value.hint)


def test_a_folder_without_the_right_to_write_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    Store.open(folder).close()
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o5:
            parent.chmod(0o755)
    folder.chmod(0o555)
    (folder / "store.db").chmod(0o444)
    (folder / "opening.lock").chmod(0o444)
    code = """
import urllib.parse  # pathlib imports it when it is needed, perhaps from a folder that only root can read
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    Store.open(folder)
except StoreError as error:
    print(error.message, "|", error.hint)
store = Store.open(folder, read_only=True)
print(store.count())
"""
    child = start(code, folder)
    output, _ = child.communicate(timeout=30)
    folder.chmod(0o755)
    assert "cannot be written: Permission denied | make it writable" in output
    assert output.endswith("\n0\n")


def test_a_read_only_store_reads_and_does_not_write(store: Store) -> None:
    with Store.open(store.path, read_only=True) as reader:
        store.begin(RolloutRecord("r-one", "task"))
        assert reader.count() == 1
        with pytest.raises(StoreError, match="read-only"):
            reader.begin(RolloutRecord("r-two", "task"))


def test_there_is_nothing_to_read_where_no_store_is(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        Store.open(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.count()


def test_several_processes_can_make_the_store_at_once(tmp_path: Path) -> None:
    code = "ready(); s = Store.open(folder); s.begin(RolloutRecord(f'r-{os.getpid()}', 'task')); s.close()"
    with running(code, tmp_path / "store", count=3) as children:
        go(children)
    with Store.open(tmp_path / "store") as store:
        assert store.count() == 3


def test_a_store_does_not_cross_a_fork(store: Store) -> None:
    store._database._pid = -1
    try:
        with pytest.raises(StoreError, match="parent process"):
            store.count()
    finally:
        store._database._pid = os.getpid()
