"""The plane's memory: one SQLite file, one thread that uses it, one plane at a time.

Knows nothing of what the tables mean beyond their columns.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from paddock.errors import ConfigError, ServerDraining, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

P = ParamSpec("P")
Result = TypeVar("Result")

BUSY_SECONDS = 10.0
SCHEMA_VERSION = 2
SCHEMA = """
CREATE TABLE instances (
    instance_id TEXT PRIMARY KEY, request_id TEXT UNIQUE, env_key TEXT NOT NULL, version TEXT NOT NULL,
    status TEXT NOT NULL, reason TEXT, port INTEGER, pid INTEGER, started_ticks INTEGER,
    region TEXT NOT NULL, env_variables TEXT, data_key TEXT, data_version TEXT, image_type TEXT,
    run_id TEXT, created_at TEXT NOT NULL, updated_at TEXT NOT NULL, running_at TEXT, terminated_at TEXT,
    expires_at REAL NOT NULL, heartbeat_interval INTEGER, heartbeat_region TEXT, last_heartbeat REAL,
    stop_request_id TEXT, address TEXT);
CREATE INDEX instances_by_status ON instances (status);
CREATE INDEX instances_by_run ON instances (run_id);
CREATE TABLE versions (
    env_key TEXT NOT NULL, version TEXT NOT NULL, since TEXT NOT NULL, PRIMARY KEY (env_key, version));
CREATE TABLE tasks (
    key TEXT PRIMARY KEY, env_id TEXT NOT NULL, version TEXT, data_id TEXT, data_version TEXT,
    project_key TEXT, task_project_key TEXT, verifier_id TEXT, created_at TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE verifiers (
    verifier_id TEXT PRIMARY KEY, key TEXT NOT NULL, version INTEGER NOT NULL, sha256 TEXT NOT NULL,
    code TEXT NOT NULL, created_at TEXT NOT NULL, comment TEXT, UNIQUE (key, version));
CREATE INDEX verifiers_by_content ON verifiers (sha256);
CREATE TABLE bundles (sha256 TEXT PRIMARY KEY, verifier_id TEXT NOT NULL);
CREATE TABLE executions (
    execution_id TEXT PRIMARY KEY, request_id TEXT UNIQUE, fingerprint TEXT NOT NULL,
    created_at TEXT NOT NULL, answer TEXT);
CREATE TABLE jobs (
    job_id TEXT PRIMARY KEY, name TEXT NOT NULL, created_at TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY, job_id TEXT, model TEXT, task_key TEXT, instance_id TEXT,
    status TEXT NOT NULL, verifier_execution_id TEXT, created_at TEXT NOT NULL, started_at TEXT, ended_at TEXT,
    metadata TEXT, config TEXT);
CREATE INDEX sessions_by_job ON sessions (job_id);
CREATE TABLE messages (
    session_id TEXT NOT NULL, position INTEGER NOT NULL, role TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (session_id, position)) WITHOUT ROWID;
CREATE TABLE answers (request_id TEXT PRIMARY KEY, at REAL NOT NULL, answer TEXT NOT NULL);
CREATE INDEX answers_by_age ON answers (at);
"""
CHANGES = {1: "ALTER TABLE instances ADD COLUMN address TEXT;"}
"""What makes the version after it of each older version."""


class Database:
    """The file `plane.db` in the state folder. Opening takes the folder's lock; closing gives it back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = _take_folder(folder)
        try:
            self._connection = _open(folder / "plane.db")
        except BaseException:
            os.close(self._lock)
            raise
        self._closed = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plane-database")

    async def run(
        self, work: Callable[Concatenate[sqlite3.Connection, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """What `work(connection, ...)` returns. All it writes is written, or nothing: it is one transaction.
        A caller that is cancelled leaves at once; the work is still done. Raises ServerDraining after `close`."""
        if self._closed:
            raise ServerDraining("the plane is stopping")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: self.run_blocking(work, *args, **kwargs)
        )

    def run_blocking(
        self, work: Callable[Concatenate[sqlite3.Connection, P], Result], /, *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """The same in the calling thread, for before and after the plane runs."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(connection, *args, **kwargs)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return result

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown(wait=True)
        self._connection.close()
        os.close(self._lock)


def now_text() -> str:
    return datetime.now(UTC).isoformat()


def text_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _take_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(folder / "plane.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"the state folder {folder} cannot be used: {error.strerror or error}", hint="choose a writable one"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"another plane uses the state folder {folder}", hint="end that one, or choose another folder"
        ) from None
    return handle


def _open(file: Path) -> sqlite3.Connection:
    if not file.exists():
        file.touch(mode=0o600)
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found == 0:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif found in CHANGES:
            changes = "".join(CHANGES[version] for version in range(found, SCHEMA_VERSION))
            connection.executescript(f"BEGIN; {changes} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
        elif found != SCHEMA_VERSION:
            raise ConfigError(f"{file} was written by another version of Paddock", hint="choose another state folder")
    except ConfigError:
        connection.close()
        raise
    except sqlite3.Error as error:
        connection.close()
        raise StoreError(f"{file} cannot be opened: {error}", hint="choose another state folder") from error
    return connection


def replayed(
    connection: sqlite3.Connection, request_id: str | None, work: Callable[[], str], keep_seconds: float = 86_400.0
) -> str:
    """The stored answer to a request that was carried out before, or the answer of `work`, stored.

    A client that lost an answer sends its request again under the same id; it must not count twice.
    """
    if request_id is None:
        return work()
    row = connection.execute("SELECT answer FROM answers WHERE request_id = ?", (request_id,)).fetchone()
    if row is not None:
        return str(row["answer"])
    answer, now = work(), time.time()
    connection.execute("DELETE FROM answers WHERE at < ?", (now - keep_seconds,))
    connection.execute("INSERT INTO answers (request_id, at, answer) VALUES (?, ?, ?)", (request_id, now, answer))
    return answer
