"""The SQLite layer: connections, transactions, schema versions, migrations, and a worker thread for async callers.

It knows nothing of what tables mean. A database of ours is described by a `Schema`; `Database` opens its file in WAL
mode, creates or migrates it, and translates SQLite's errors. `connect` opens any other file.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import sqlite3
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from paddock.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Result = TypeVar("Result")

BUSY_SECONDS = 10.0
"""How long a statement waits for a lock that another connection holds."""
MAPPED_BYTES = 1024 * 1024 * 1024
WAL_LIMIT_BYTES = 16 * 1024 * 1024
LOW_DISK_BYTES = 1024 * 1024
"""SQLite reports some writes to a full disk as plain I/O errors. Below this much free space they count as full."""

logger = logging.getLogger(__name__)


# -- connections ----------------------------------------------------------------------------------


def connect(
    file: Path,
    mode: Literal["ro", "rw", "rwc"] = "rw",
    *,
    busy_seconds: float = BUSY_SECONDS,
    immutable: bool = False,
) -> sqlite3.Connection:
    """A connection in autocommit mode that any thread may use, one at a time.

    `immutable` promises that no process writes to the file: SQLite then needs no shared-memory file beside it.
    Raises sqlite3.Error.
    """
    uri = f"{file.absolute().as_uri()}?mode={mode}" + ("&immutable=1" if immutable else "")
    return sqlite3.connect(
        uri, uri=True, timeout=busy_seconds, isolation_level=None, check_same_thread=False, cached_statements=256
    )


@contextmanager
def transaction(connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Commit what the block writes, or roll all of it back if the block raises."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        # On a full disk SQLite may have rolled back already.
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def read_pragma(connection: sqlite3.Connection, name: str) -> int:
    """The value of a pragma that is a number."""
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


# -- schema ---------------------------------------------------------------------------------------


def _do_nothing(connection: sqlite3.Connection) -> None:
    """For a new version whose tables did not change."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One step from a schema version to the next."""

    apply: Callable[[sqlite3.Connection], None] = _do_nothing
    """Change the tables. Runs inside a transaction; all pending migrations commit together or not at all."""
    emulate: Callable[[sqlite3.Connection], None] | None = None
    """For an older file that may only be read: create temporary views and tables that look like the next version."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of the newest version, and how to reach it from every older one."""

    tables: tuple[str, ...]
    """Statements that create the newest version."""
    migrations: tuple[Migration, ...] = ()
    """The first leads from version 1 to 2, and so on. A schema change adds one entry and updates `tables`."""
    application_id: int = 0
    """Written to the file's header, so that a database of another program is recognised. 0 turns the check off."""
    hint: str = "choose another folder"
    """What a user can do about a file that cannot be used."""

    @property
    def version(self) -> int:
        """The version of a database with all migrations."""
        return len(self.migrations) + 1

    def is_initialised(self, connection: sqlite3.Connection, file: Path) -> bool:
        """False for an empty database. Raises StoreError for one of another program or of a newer version."""
        application = read_pragma(connection, "application_id")
        version = read_pragma(connection, "user_version")
        has_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
        if application != self.application_id or (has_tables and not version):
            if application or has_tables:
                raise StoreError(f"{file} is a database of another program", hint=self.hint)
            return False
        if version > self.version:
            raise StoreError(
                f"{file} was written by a newer paddock (schema {version}, this one knows {self.version})",
                hint=f"upgrade paddock, or {self.hint}",
            )
        return version > 0

    def create(self, connection: sqlite3.Connection) -> None:
        """Create the tables in an empty database. A crash in between leaves it empty."""
        # Both settings have to precede the first table.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        with transaction(connection):
            for statement in self.tables:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self.application_id}")
            connection.execute(f"PRAGMA user_version = {self.version}")

    def migrate(self, connection: sqlite3.Connection) -> None:
        """Bring an older database up to date. A crash in between leaves it as it was."""
        if read_pragma(connection, "user_version") >= self.version:
            return
        with transaction(connection):
            # Read again: another process may have migrated it meanwhile.
            for migration in self.migrations[read_pragma(connection, "user_version") - 1 :]:
                migration.apply(connection)
            connection.execute(f"PRAGMA user_version = {self.version}")

    def emulate(self, connection: sqlite3.Connection) -> bool:
        """Let an older database that may only be read look like the newest version; False if nothing was needed."""
        pending = self.migrations[read_pragma(connection, "user_version") - 1 :]
        steps = [migration.emulate for migration in pending if migration.emulate is not None]
        if steps:
            connection.execute("PRAGMA temp_store = MEMORY")
        for emulate in steps:
            emulate(connection)
        return bool(steps)


# -- databases ------------------------------------------------------------------------------------


class Database:
    """One connection behind one lock. Threads share it; each process has to open its own.

    Everything raises StoreError, with `full=True` in its data if the disk is full.
    """

    def __init__(
        self,
        file: Path,
        schema: Schema,
        *,
        name: str | None = None,
        read_only: bool = False,
        named_rows: bool = False,
    ) -> None:
        """`name` stands for the database in error messages. With `named_rows`, rows are `sqlite3.Row`."""
        self.file = file
        self.folder = file.parent
        self.name = name or f"the database {file}"
        self.schema = schema
        self.read_only = read_only
        self.is_emulated = False
        """Whether an older version is read through temporary views."""
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self._connection: sqlite3.Connection | None = None
        with self._translate_errors():
            if read_only:
                self._connection = self._open_read_only()
            else:
                with self._exclusive_opening():
                    self._connection = self._open_writable()
            if named_rows:
                self._connection.row_factory = sqlite3.Row

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """A write transaction: all of it is written, or nothing."""
        if self.read_only:
            raise StoreError(f"{self.name} was opened read-only", hint="open it without read_only")
        with self.autocommit() as connection, transaction(connection, "BEGIN IMMEDIATE"):
            yield connection

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """A read transaction: the block sees one snapshot."""
        with self.autocommit() as connection, transaction(connection, "BEGIN"):
            yield connection

    @contextmanager
    def autocommit(self) -> Iterator[sqlite3.Connection]:
        """The connection without a transaction."""
        self._check_process()
        with self.lock, self._translate_errors():
            if self._connection is None:
                raise StoreError(f"{self.name} is closed", hint="open it again")
            yield self._connection

    def size_bytes(self) -> int:
        """The size on the disk, including the write-ahead log."""
        files = (self.file, self.file.with_name(f"{self.file.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def close(self) -> None:
        """Close the connection. It may be called twice."""
        self._check_process()
        with self.lock, self._translate_errors():
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.name} was opened by the parent process",
                hint="open it in each process; a SQLite connection must not cross a fork",
            )

    def _open_writable(self) -> sqlite3.Connection:
        if not self.file.exists():
            self.file.touch(mode=0o600)
        connection = connect(self.file, "rw")
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            if not self.schema.is_initialised(connection, self.file):
                self.schema.create(connection)
            self.schema.migrate(connection)
            # WAL with NORMAL syncs at checkpoints only: a power loss may lose the last commits, never consistency.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA cache_size = -8000")
            connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_read_only(self) -> sqlite3.Connection:
        # In a read-only folder, SQLite could not create the shared-memory file that WAL needs.
        wal = self.file.with_name(f"{self.file.name}-wal")
        connection = connect(self.file, "ro", immutable=not os.access(self.folder, os.W_OK) and not wal.exists())
        try:
            if not self.schema.is_initialised(connection, self.file):
                raise StoreError(f"{self.file} is empty", hint=self.schema.hint)
            # Readers scan the same pages again and again.
            connection.execute(f"PRAGMA mmap_size = {MAPPED_BYTES}")
            connection.execute("PRAGMA cache_size = -16000")
            self.is_emulated = self.schema.emulate(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def _exclusive_opening(self) -> Iterator[None]:
        """A file lock: one process at a time creates or migrates the database."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self.folder / "opening.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"the folder {self.folder} cannot be written: {error.strerror or error}",
                hint=f"make it writable, or {self.schema.hint}",
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
                            f"another process has been opening {self.name} for more than {BUSY_SECONDS:g} s",
                            hint="see whether one is stopped, then try again",
                        ) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._translate(error) from error
        except OSError as error:
            raise StoreError(f"{self.name}: {error}", hint="see that the folder can be used") from error

    def _translate(self, error: sqlite3.Error) -> StoreError:
        primary = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if primary == sqlite3.SQLITE_FULL or (primary == sqlite3.SQLITE_IOERR and self._is_disk_full()):
            return StoreError(
                f"no space is left for {self.name}",
                hint="free some space on that disk, or prune old rollouts",
                full=True,
            )
        file = self.file.name
        hint = {
            sqlite3.SQLITE_BUSY: "another process holds it for long; try again when it is done",
            sqlite3.SQLITE_READONLY: f"make the folder and {file} writable, or {self.schema.hint}",
            sqlite3.SQLITE_CANTOPEN: f"see that the folder and {file} can be read and written",
            sqlite3.SQLITE_NOTADB: f"{file} is no database; {self.schema.hint}",
            sqlite3.SQLITE_CORRUPT: f"{file} is damaged; copy it away and try `sqlite3 {file} .recover`",
        }.get(primary, "see whether its disk is healthy")
        return StoreError(f"{self.name}: {error}", hint=hint)

    def _is_disk_full(self) -> bool:
        return shutil.disk_usage(self.folder).free < LOW_DISK_BYTES


# -- worker thread --------------------------------------------------------------------------------


class WorkerThread:
    """Runs blocking work for async callers on one thread, in the order of submission.

    The thread starts with the first job and ends with `close`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`. A cancelled caller returns at once; its work is still done, and an exception that
        no caller awaits is logged.

        Raises RuntimeError after `close`."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Result] = loop.create_future()

        def deliver(job: Future[Result]) -> None:
            error = job.exception()
            if result.cancelled():
                _log_failure(error)
            elif error is not None:
                result.set_exception(error)
            else:
                result.set_result(job.result())

        def on_done(job: Future[Result]) -> None:
            try:
                loop.call_soon_threadsafe(deliver, job)
            except RuntimeError:
                # The event loop is closed, so no caller waits any more.
                _log_failure(job.exception())

        self._executor.submit(work).add_done_callback(on_done)
        return await result

    def close(self) -> None:
        """Refuse further work, and wait for what was submitted."""
        is_own_thread = threading.current_thread().name.startswith(self._name)
        self._executor.shutdown(wait=not is_own_thread)


def _log_failure(error: BaseException | None) -> None:
    if error is not None:
        logger.warning("failed after the caller had left: %s", error, exc_info=error)
