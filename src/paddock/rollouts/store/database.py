"""One connection behind one lock: opening, transactions, and SQLite's errors as ours.

Knows nothing of what the tables mean.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paddock.errors import StoreError
from paddock.rollouts.store import schema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BUSY_SECONDS = 10.0
MAPPED_BYTES = 1024 * 1024 * 1024
_LOW_SPACE = 1024 * 1024


class Database:
    """The file `store.db` in a folder."""

    def __init__(self, folder: Path, *, read_only: bool) -> None:
        self.folder = folder
        self.file = folder / "store.db"
        self.read_only = read_only
        self.stands_in = False
        """An older store, opened to be read: `figures.follow` has to be asked before they are read."""
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        with self._errors():
            if read_only:
                self._connection = self._open_read_only()
            else:
                with self._opening():
                    self._connection = self._open_writable()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of it is written, or nothing."""
        if self.read_only:
            raise StoreError(f"the store {self.folder} was opened read-only", hint="open it without read_only")
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Everything read in the block is of one moment."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextmanager
    def outside(self) -> Iterator[sqlite3.Connection]:
        """The connection without a transaction."""
        self._check_process()
        with self.lock, self._errors():
            if self._connection is None:
                raise StoreError(f"the store {self.folder} is closed", hint="open it again")
            yield self._connection

    def size(self) -> int:
        """Bytes on the disk, what is still in the write-ahead log included."""
        files = (self.file, self.file.with_name("store.db-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        self._check_process()
        with self.lock, self._errors():
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with self.outside() as connection:
            connection.execute(begin)
            try:
                yield connection
                connection.execute("COMMIT")
            finally:
                # A full disk makes SQLite roll back by itself.
                if connection.in_transaction:
                    connection.execute("ROLLBACK")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"the store {self.folder} was opened by the parent process",
                hint="open the store in each process; a SQLite connection must not cross a fork",
            )

    def _connect(self, address: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            address,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            uri=True,
        )
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _open_writable(self) -> sqlite3.Connection:
        if not self.file.exists():
            self.file.touch(mode=0o600)
        connection = self._connect(f"{self.file.absolute().as_uri()}?mode=rw")
        try:
            if not schema.is_store(connection, self.file):
                schema.create(connection)
            schema.migrate(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA cache_size = -8000")
            connection.execute(f"PRAGMA journal_size_limit = {16 * 1024 * 1024}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_read_only(self) -> sqlite3.Connection:
        if not self.file.exists():
            raise StoreError(f"there is no store in {self.folder}", hint="run a rollout first, or set PADDOCK_STORE")
        address = f"{self.file.absolute().as_uri()}?mode=ro"
        if not os.access(self.folder, os.W_OK) and not self.file.with_name("store.db-wal").exists():
            # Nobody can write here, and SQLite could not make the shared-memory file it wants.
            address += "&immutable=1"
        connection = self._connect(address)
        try:
            if not schema.is_store(connection, self.file):
                raise StoreError(f"{self.file} is empty", hint="run a rollout first, or set PADDOCK_STORE")
            # Looking through many rollouts reads the same pages again and again.
            connection.execute(f"PRAGMA mmap_size = {MAPPED_BYTES}")
            connection.execute("PRAGMA cache_size = -16000")
            self.stands_in = schema.needs_stand_in(connection)
            if self.stands_in:
                schema.stand_in(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """One process at a time makes the folder a store."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.folder / "opening.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"the store folder {self.folder} cannot be written: {error.strerror or error}",
                hint="make it writable, or choose another folder with PADDOCK_STORE",
            ) from error
        try:
            deadline = time.monotonic() + BUSY_SECONDS
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StoreError(
                            f"another process has been opening the store {self.folder} for too long",
                            hint="see whether one is stopped, then try again",
                        ) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except OSError as error:
            raise StoreError(f"the store {self.folder}: {error}", hint="see that the folder can be used") from error

    def _translated(self, error: sqlite3.Error) -> StoreError:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and self._is_full()):
            return StoreError(
                f"no space is left for the store {self.folder}",
                hint="free some space on that disk, or prune old rollouts",
                full=True,
            )
        hint = {
            sqlite3.SQLITE_BUSY: "another process holds it for long; try again when it is done",
            sqlite3.SQLITE_READONLY: "make the folder and store.db writable, or set PADDOCK_STORE",
            sqlite3.SQLITE_CANTOPEN: "see that the folder and store.db can be read and written",
            sqlite3.SQLITE_NOTADB: "store.db is no database; choose another folder with PADDOCK_STORE",
            sqlite3.SQLITE_CORRUPT: "store.db is damaged; copy it away and try `sqlite3 store.db .recover`",
        }.get(primary, "see whether the disk of the store is healthy")
        return StoreError(f"the store {self.folder}: {error}", hint=hint)

    def _is_full(self) -> bool:
        return shutil.disk_usage(self.folder).free < _LOW_SPACE
