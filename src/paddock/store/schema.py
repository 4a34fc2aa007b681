"""The tables of the store, and its migrations. A schema change edits `TABLES` and adds one entry to `migrations`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.sqlite import Migration, Schema
from paddock.store import calls, search, snapshots, tags, transcripts
from paddock.store.packing import decode, decompress

if TYPE_CHECKING:
    import sqlite3

_CALL_COLUMNS = {
    "texts": "BLOB",
    "tops": "BLOB",
    "prompt_tokens": "INTEGER",
    "completion_tokens": "INTEGER",
    "logprob_sum": "REAL",
    "brief": "BLOB",
}
"""Since version 2. NULL in older rows, whose head holds the texts and the alternatives."""

_WEIGHT_VERSION = 2 + calls.SUMMARY_FIELDS.index("weight_version")
"""Where the brief of a call has its weight version."""

# Of rollouts that replay another one. `parent` is its id, and `at` the index of the first call of their own. `source`
# is the key of the parent if rows of it are referred to, here or in `sequences.base`; see `replayed` and `tree`.
_FORKS = (
    """CREATE TABLE IF NOT EXISTS forks (
        rollout INTEGER PRIMARY KEY REFERENCES rollouts (id) ON DELETE CASCADE,
        parent TEXT NOT NULL,
        at INTEGER,
        source INTEGER,
        replayed BLOB
    )""",
    "CREATE INDEX IF NOT EXISTS forks_of_parent ON forks (parent)",
    "CREATE INDEX IF NOT EXISTS forks_of_source ON forks (source) WHERE source IS NOT NULL",
)

# AUTOINCREMENT: keys are never reused, because another process may still remember the key of a deleted row.
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
    "CREATE INDEX rollouts_running ON rollouts (owner) WHERE outcome IS NULL",
    # Not by outcome: SQLite would choose this index for a search by outcome, and then read every row.
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
    # See `sequences`: head and tail count the items that are shared with the base.
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
    *_FORKS,
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
    # `held` counts the `put`s of a blob that no record names yet.
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
    # No foreign key: a sandbox has to be ended even if its rollout was deleted.
    """CREATE TABLE sandboxes (
        sandbox_id TEXT PRIMARY KEY,
        rollout_id TEXT,
        owner TEXT NOT NULL,
        ended_at REAL,
        data BLOB NOT NULL
    )""",
    "CREATE INDEX sandboxes_open ON sandboxes (owner) WHERE ended_at IS NULL",
    "CREATE INDEX sandboxes_of_rollout ON sandboxes (rollout_id)",
    *search.TABLES,
    *snapshots.TABLES,
    *tags.TABLES,
    *transcripts.TABLES,
)


def _add_call_columns_and_figures(connection: sqlite3.Connection) -> None:
    existing = {row[1] for row in connection.execute("PRAGMA table_info(calls)")}
    for name, kind in _CALL_COLUMNS.items():
        if name not in existing:
            connection.execute(f"ALTER TABLE calls ADD COLUMN {name} {kind}")
    for statement in search.TABLES:
        connection.execute(statement)


def _emulate_call_columns_and_figures(connection: sqlite3.Connection) -> None:
    missing = ", ".join(f"NULL AS {name}" for name in _CALL_COLUMNS)
    connection.execute(f"CREATE TEMP VIEW calls AS SELECT rowid, *, {missing} FROM main.calls")


def _list_by_search_index(connection: sqlite3.Connection) -> None:
    for name in ("rollouts_listed", "rollouts_of_task", "rollouts_of_batch", "figures_in_time"):
        connection.execute(f"DROP INDEX IF EXISTS {name}")
    connection.execute(search.IN_TIME)


def _add_snapshots(connection: sqlite3.Connection) -> None:
    for statement in snapshots.TABLES:
        connection.execute(statement)


def _add_forks(connection: sqlite3.Connection) -> None:
    for statement in _FORKS:
        connection.execute(statement)
    for key, head in connection.execute("SELECT id, head FROM rollouts").fetchall():
        fork = decode(decompress(head)).get("fork") or {}
        if fork.get("source"):
            values = (key, fork["source"], fork.get("at"))
            connection.execute("INSERT OR IGNORE INTO forks (rollout, parent, at) VALUES (?, ?, ?)", values)


def _emulate_forks(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TEMP TABLE forks (rollout, parent, at, source, replayed)")


def _add_tags_and_transcripts(connection: sqlite3.Connection) -> None:
    """Transcripts are indexed later, some at a time: see `transcripts.add_pending`."""
    connection.execute("DROP TABLE figures")
    for statement in (*search.TABLES, *tags.TABLES, *transcripts.TABLES):
        connection.execute(statement)
    search.rebuild(connection)
    for key, brief in connection.execute("SELECT rollout, brief FROM calls WHERE position = 0").fetchall():
        version = None if brief is None else decode(brief)[_WEIGHT_VERSION]
        if version is not None:
            connection.execute("UPDATE figures SET weights = ? WHERE rollout = ?", (version, key))


def _emulate_tags_and_transcripts(connection: sqlite3.Connection) -> None:
    for statement in (search.TEMPORARY_TABLE, tags.TEMPORARY_TABLE, *transcripts.TEMPORARY_TABLES):
        connection.execute(statement)


SCHEMA = Schema(
    tables=TABLES,
    migrations=(
        # 2: calls keep texts, alternatives and counts in columns of their own; figures are searched.
        Migration(_add_call_columns_and_figures, _emulate_call_columns_and_figures),
        # 3: calls keep their caller, their temperature and the kind of their logprobs. The tables are the same.
        Migration(),
        # 4: rollouts are listed and counted by the search index only.
        Migration(_list_by_search_index),
        # 5: calls say which recorded call they repeat. The tables are the same.
        Migration(),
        # 6: snapshots of work folders have references of their own. Only writers use them.
        Migration(_add_snapshots),
        # 7: forks are found from their parents, and refer to rows of them. Heads of calls have a dictionary.
        Migration(_add_forks, _emulate_forks),
        # 8: calls say how their prompt ids were made in token mode. The tables are the same.
        Migration(),
        # 9: rollouts have tags, and their transcripts are searched. Figures have members, weight versions and causes.
        Migration(_add_tags_and_transcripts, _emulate_tags_and_transcripts),
    ),
    application_id=0x5061646B,
    hint="choose another folder with PADDOCK_STORE",
)
