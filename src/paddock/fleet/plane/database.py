"""The plane's database: one SQLite file, used on one thread, by one plane at a time.

Knows the tables, and nothing of what their rows mean.
"""

from __future__ import annotations

import fcntl
import os
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from paddock.errors import ConfigError, ServerDraining
from paddock.sqlite import Database, Migration, Schema, WorkerThread

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

P = ParamSpec("P")
Result = TypeVar("Result")

KEEP_RESPONSES_SECONDS = 86_400.0
TABLES = (
    """CREATE TABLE instances (
    instance_id TEXT PRIMARY KEY, request_id TEXT UNIQUE, env_key TEXT NOT NULL, version TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT, port INTEGER, pid INTEGER, started_ticks INTEGER,
    region TEXT NOT NULL, env_variables TEXT, data_key TEXT, data_version TEXT, image_type TEXT,
    run_id TEXT, created_at TEXT NOT NULL, updated_at TEXT NOT NULL, running_at TEXT, terminated_at TEXT,
    expires_at REAL NOT NULL, heartbeat_interval INTEGER, heartbeat_region TEXT, last_heartbeat REAL,
    stop_request_id TEXT, address TEXT)""",
    "CREATE INDEX instances_by_status ON instances (status)",
    "CREATE INDEX instances_by_run ON instances (run_id)",
    """CREATE TABLE versions (
    env_key TEXT NOT NULL, version TEXT NOT NULL, since TEXT NOT NULL, PRIMARY KEY (env_key, version))""",
    """CREATE TABLE tasks (
    key TEXT PRIMARY KEY, env_id TEXT NOT NULL, version TEXT, data_id TEXT, data_version TEXT,
    project_key TEXT, task_project_key TEXT, verifier_id TEXT, created_at TEXT NOT NULL, body TEXT NOT NULL)""",
    """CREATE TABLE verifiers (
    verifier_id TEXT PRIMARY KEY, key TEXT NOT NULL, version INTEGER NOT NULL, sha256 TEXT NOT NULL,
    code TEXT NOT NULL, created_at TEXT NOT NULL, comment TEXT, UNIQUE (key, version))""",
    "CREATE INDEX verifiers_by_content ON verifiers (sha256)",
    "CREATE TABLE bundles (sha256 TEXT PRIMARY KEY, verifier_id TEXT NOT NULL)",
    """CREATE TABLE executions (
    execution_id TEXT PRIMARY KEY, request_id TEXT UNIQUE, fingerprint TEXT NOT NULL,
    created_at TEXT NOT NULL, answer TEXT)""",
    """CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY, name TEXT NOT NULL, created_at TEXT NOT NULL, body TEXT NOT NULL)""",
    """CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, job_id TEXT, model TEXT, task_key TEXT, instance_id TEXT,
    status TEXT NOT NULL, verifier_execution_id TEXT, created_at TEXT NOT NULL, started_at TEXT, ended_at TEXT,
    metadata TEXT, config TEXT)""",
    "CREATE INDEX sessions_by_job ON sessions (job_id)",
    """CREATE TABLE messages (
    session_id TEXT NOT NULL, position INTEGER NOT NULL, role TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (session_id, position)) WITHOUT ROWID""",
    "CREATE TABLE answers (request_id TEXT PRIMARY KEY, at REAL NOT NULL, answer TEXT NOT NULL)",
    "CREATE INDEX answers_by_age ON answers (at)",
)


def _add_address(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE instances ADD COLUMN address TEXT")


SCHEMA = Schema(TABLES, (Migration(_add_address),), hint="choose another state folder")


class PlaneDatabase:
    """The file `plane.db` in the state folder. It holds the folder's lock until `close`."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if another plane uses the folder, StoreError if the file cannot be used."""
        self.folder = folder
        self._lock = _lock_folder(folder)
        try:
            self._database = Database(folder / "plane.db", SCHEMA, named_rows=True)
        except BaseException:
            os.close(self._lock)
            raise
        self._is_closed = False
        self._worker = WorkerThread("plane-database")

    async def run(
        self, work: Callable[Concatenate[sqlite3.Connection, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """The result of `work(connection, ...)`, which is one transaction.

        A cancelled caller returns at once; its work is still done. Raises ServerDraining after `close`.
        """
        if self._is_closed:
            raise ServerDraining("the plane is stopping")
        return await self._worker.run(partial(self.run_blocking, work, *args, **kwargs))

    def run_blocking(
        self, work: Callable[Concatenate[sqlite3.Connection, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """The same in the calling thread."""
        with self._database.write() as connection:
            return work(connection, *args, **kwargs)

    def close(self) -> None:
        self._is_closed = True
        self._worker.close()
        self._database.close()
        os.close(self._lock)


def now_text() -> str:
    return datetime.now(UTC).isoformat()


def format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def insert_row(connection: sqlite3.Connection, table: str, *, replace: bool = False, **values: Any) -> None:
    """Insert a row, or with `replace` put it in the place of the row with the same key."""
    verb = "INSERT OR REPLACE" if replace else "INSERT"
    placeholders = ", ".join(f":{name}" for name in values)
    connection.execute(f"{verb} INTO {table} ({', '.join(values)}) VALUES ({placeholders})", values)


def run_once(connection: sqlite3.Connection, request_id: str | None, work: Callable[[], str]) -> str:
    """The stored response to a request id, or the response of `work`, which is stored.

    A client that lost a response sends its request again with the same id. The work must not be done twice.
    """
    if request_id is None:
        return work()
    row = connection.execute("SELECT answer FROM answers WHERE request_id = ?", (request_id,)).fetchone()
    if row is not None:
        return str(row["answer"])
    response, now = work(), time.time()
    connection.execute("DELETE FROM answers WHERE at < ?", (now - KEEP_RESPONSES_SECONDS,))
    insert_row(connection, "answers", request_id=request_id, at=now, answer=response)
    return response


def _lock_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "plane.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the state folder {folder} cannot be used: {error.strerror or error}", hint="choose a writable one"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"another plane uses the state folder {folder}", hint="end that one, or choose another folder"
        ) from None
    return descriptor
