"""The tables, and the check that a file is a store that this version can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.errors import StoreError
from paddock.rollouts.store import figures

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

APPLICATION_ID = 0x5061646B
VERSION = 3
"""3: calls keep their caller, their temperature and which logprobs they have. The tables are those of version 2."""
TABLES_SINCE = 2
_CALL_COLUMNS = {
    "texts": "BLOB",
    "tops": "BLOB",
    "prompt_tokens": "INTEGER",
    "completion_tokens": "INTEGER",
    "logprob_sum": "REAL",
    "brief": "BLOB",
}
"""Since version 2. NULL in rows of before, whose head holds the texts and the alternatives."""

# Keys are never used twice (AUTOINCREMENT): what another process remembers of a deleted row must not
# point at a new one.
TABLES = (
    """CREATE TABLE rollouts (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        rollout_id TEXT NOT NULL UNIQUE,
        task_id TEXT NOT NULL,
        agent TEXT NOT NULL,
        model TEXT NOT NULL,
        batch_id TEXT,
        outcome TEXT,
        started_at REAL NOT NULL,
        finished_at REAL,
        owner TEXT NOT NULL,
        head BLOB NOT NULL
    )""",
    "CREATE INDEX rollouts_listed ON rollouts (started_at, id, task_id, agent, model, batch_id, outcome)",
    "CREATE INDEX rollouts_of_task ON rollouts (task_id, started_at, id)",
    "CREATE INDEX rollouts_of_batch ON rollouts (batch_id, started_at, id) WHERE batch_id IS NOT NULL",
    "CREATE INDEX rollouts_running ON rollouts (owner) WHERE outcome IS NULL",
    # Not by outcome: a search for one outcome would take this index, and then look into every row.
    "CREATE INDEX rollouts_finished ON rollouts (finished_at, id) WHERE finished_at IS NOT NULL",
    # The long texts of a record.
    """CREATE TABLE bodies (
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        name TEXT NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (rollout, name)
    )""",
    """CREATE TABLE calls (
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        call_id TEXT NOT NULL,
        position INTEGER NOT NULL,
        brief BLOB,
        head BLOB NOT NULL,
        completion BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        texts BLOB,
        tops BLOB,
        prompt_tokens INTEGER,
        completion_tokens INTEGER,
        logprob_sum REAL,
        PRIMARY KEY (rollout, call_id)
    )""",
    # A list of messages or token ids: the head and the tail of its base with a middle of its own.
    # Rows are never changed, so one that others build on stays what it was.
    """CREATE TABLE sequences (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        kind TEXT NOT NULL,
        base INTEGER,
        head INTEGER NOT NULL,
        tail INTEGER NOT NULL,
        middle BLOB NOT NULL
    )""",
    "CREATE INDEX sequences_of_rollout ON sequences (rollout)",
    """CREATE TABLE events (
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        number INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (rollout, number)
    ) WITHOUT ROWID""",
    """CREATE TABLE scores (
        id INTEGER PRIMARY KEY,
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        data BLOB NOT NULL
    )""",
    "CREATE INDEX scores_of_rollout ON scores (rollout)",
    # `held` counts those who put the blob and have not named it in a record yet.
    """CREATE TABLE blobs (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        digest TEXT NOT NULL UNIQUE,
        held INTEGER NOT NULL DEFAULT 0,
        held_at REAL NOT NULL DEFAULT 0,
        data BLOB NOT NULL
    )""",
    """CREATE TABLE blob_references (
        rollout INTEGER NOT NULL REFERENCES rollouts (id) ON DELETE CASCADE,
        blob INTEGER NOT NULL REFERENCES blobs (id),
        PRIMARY KEY (rollout, blob)
    ) WITHOUT ROWID""",
    "CREATE INDEX references_to_blob ON blob_references (blob)",
    # No foreign key: a sandbox must be found and ended whatever became of its rollout.
    """CREATE TABLE sandboxes (
        sandbox_id TEXT PRIMARY KEY,
        rollout_id TEXT,
        owner TEXT NOT NULL,
        ended_at REAL,
        data BLOB NOT NULL
    )""",
    "CREATE INDEX sandboxes_open ON sandboxes (owner) WHERE ended_at IS NULL",
    "CREATE INDEX sandboxes_of_rollout ON sandboxes (rollout_id)",
    *figures.TABLES,
)


def is_store(connection: sqlite3.Connection, path: Path) -> bool:
    """False for an empty database. Raises StoreError if it is something else than a store of ours."""
    application = _number(connection, "application_id")
    version = _number(connection, "user_version")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application == APPLICATION_ID:
        if version > VERSION:
            raise StoreError(
                f"{path} was written by a newer paddock (schema {version}, this one knows {VERSION})",
                hint="upgrade paddock, or choose another folder with PADDOCK_STORE",
            )
        return True
    if application or tables:
        raise StoreError(f"{path} is a database of another program", hint="choose another folder with PADDOCK_STORE")
    return False


def create(connection: sqlite3.Connection) -> None:
    """Make an empty database a store. A crash in between leaves it empty."""
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("BEGIN IMMEDIATE")
    for statement in TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")


def version(connection: sqlite3.Connection) -> int:
    return _number(connection, "user_version")


def migrate(connection: sqlite3.Connection) -> None:
    """Bring an older store up to date. A crash in between leaves it as it was."""
    if version(connection) >= VERSION:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if version(connection) < TABLES_SINCE:
            known = {row[1] for row in connection.execute("PRAGMA table_info(calls)")}
            for name, kind in _CALL_COLUMNS.items():
                if name not in known:
                    connection.execute(f"ALTER TABLE calls ADD COLUMN {name} {kind}")
            for statement in figures.TABLES:
                connection.execute(statement)
            figures.fill(connection)
        connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def needs_stand_in(connection: sqlite3.Connection) -> bool:
    """Whether tables of today are missing."""
    return version(connection) < TABLES_SINCE


def stand_in(connection: sqlite3.Connection) -> None:
    """Let an older store that may only be read look like one of today: what is missing is kept in memory."""
    connection.execute("PRAGMA temp_store = MEMORY")
    missing = ", ".join(f"NULL AS {name}" for name in _CALL_COLUMNS)
    connection.execute(f"CREATE TEMP VIEW calls AS SELECT rowid, *, {missing} FROM main.calls")
    connection.execute(figures.STAND_IN)


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])
