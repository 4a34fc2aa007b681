"""What rollouts are searched, sorted and counted by, in a slim table of its own.

A row here follows its rollout's head in the same transaction. `changed` counts all changes of the store's
rollouts, so that whoever watches asks for what is above the number it saw last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.store.packing import decode, unsqueeze

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping

_COLUMNS = """
    rollout INTEGER PRIMARY KEY{reference},
    changed INTEGER NOT NULL,
    rollout_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    started_at REAL NOT NULL,
    wall REAL,
    reward REAL,
    calls INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    words TEXT NOT NULL
"""
NAMES = tuple(line.split()[0] for line in _COLUMNS.strip().splitlines())
RUNNING = ""
"""The outcome of a rollout that has none yet."""
_WORDS = ("rollout_id", "task_id", "model", "agent", "batch_id", "error")
_LONGEST_ERROR = 300

TABLES = (
    f"CREATE TABLE figures ({_COLUMNS.format(reference=' REFERENCES rollouts (id) ON DELETE CASCADE')})",
    "CREATE INDEX figures_changed ON figures (changed)",
    # Everything that is added up or asked for, in the order of tasks: sums need not look at the rows.
    "CREATE INDEX figures_of_task ON figures (task_id, outcome, reward, wall, prompt_tokens, completion_tokens,"
    " started_at, agent, model, batch_id)",
    "CREATE INDEX figures_in_time ON figures (started_at, task_id, reward, outcome, agent, model, batch_id)",
    "CREATE INDEX figures_of_group ON figures (batch_id, task_id, started_at, reward)",
    "CREATE INDEX figures_of_kind ON figures (agent, model, outcome)",
    # What the table is sorted by.
    "CREATE INDEX figures_by_reward ON figures (reward)",
    "CREATE INDEX figures_by_wall ON figures (wall)",
    "CREATE INDEX figures_by_tokens ON figures (tokens)",
    "CREATE INDEX figures_by_calls ON figures (calls)",
)
STAND_IN = f"CREATE TEMP TABLE figures ({_COLUMNS.format(reference='')})"
_SAVE = f"INSERT OR REPLACE INTO figures ({', '.join(NAMES)}) VALUES ({', '.join('?' * len(NAMES))})"
_FOUND = f"SELECT {', '.join(NAMES[2:])} FROM figures WHERE rollout = ?"
_BATCH = 1000


def save(connection: sqlite3.Connection, rollout: int, values: Mapping[str, Any]) -> None:
    """Write what is known of a rollout, by the names of its record."""
    row = _row(values)
    if connection.execute(_FOUND, (rollout,)).fetchone() == row:
        # Nothing that is searched by: the many indexes are left alone.
        connection.execute("UPDATE figures SET changed = ? WHERE rollout = ?", (latest(connection) + 1, rollout))
    else:
        connection.execute(_SAVE, (rollout, latest(connection) + 1, *row))


def latest(connection: sqlite3.Connection) -> int:
    """The number of the last change."""
    return int(connection.execute("SELECT coalesce(max(changed), 0) FROM figures").fetchone()[0])


def changed_since(connection: sqlite3.Connection, number: int, most: int) -> list[tuple[int, int]]:
    """The key and the number of the rollouts that changed after `number`, the earliest change first."""
    found = connection.execute(
        "SELECT rollout, changed FROM figures WHERE changed > ? ORDER BY changed LIMIT ?", (number, most)
    )
    return list(found)


def fill(connection: sqlite3.Connection) -> None:
    """Work out the figures of all rollouts from their heads."""
    connection.execute("DELETE FROM figures")
    last = 0
    while rows := connection.execute(
        "SELECT id, head FROM rollouts WHERE id > ? ORDER BY id LIMIT ?", (last, _BATCH)
    ).fetchall():
        last = rows[-1][0]
        connection.executemany(_SAVE, ((key, key, *_row(decode(unsqueeze(head)))) for key, head in rows))


def follow(connection: sqlite3.Connection) -> None:
    """Fill the figures that stand in for those of an older store, if something was written since."""
    now = connection.execute("PRAGMA data_version").fetchone()[0]
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS followed (version INTEGER)")
    seen = connection.execute("SELECT version FROM followed").fetchone()
    if seen is None or seen[0] != now:
        fill(connection)
        connection.execute("DELETE FROM followed")
        connection.execute("INSERT INTO followed VALUES (?)", (now,))


def _row(values: Mapping[str, Any]) -> tuple[Any, ...]:
    finished = values["finished_at"]
    words = "\n".join(str(values[name] or "")[:_LONGEST_ERROR] for name in _WORDS)
    return (
        values["rollout_id"],
        values["task_id"],
        values["agent"],
        values["model"],
        values["batch_id"] or "",
        str(values["outcome"] or RUNNING),
        values["started_at"],
        None if finished is None else finished - values["started_at"],
        values["reward"],
        values["calls"],
        values["prompt_tokens"],
        values["completion_tokens"],
        values["prompt_tokens"] + values["completion_tokens"],
        words.lower(),
    )
