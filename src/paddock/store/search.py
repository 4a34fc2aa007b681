"""The search index, and queries over many rollouts: pages of a table, filter values, counts and sums.

The table `figures` has one narrow row per rollout with all that is searched, sorted or summed. It is written in the
same transaction as the record, and its column `changed` counts all changes of the store's rollouts, so that a watcher
asks for what is above the number that it saw last. Records are not read here.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from paddock.sqlite import read_pragma
from paddock.store import tags
from paddock.store.packing import decode, decompress
from paddock.store.reward_sums import SUMS, RewardSums
from paddock.store.text_query import MATCHING, match_expression

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping

Order = Literal["asc", "desc"]
SORTS = {
    "started": "started_at",
    "reward": "reward",
    "wall": "wall",
    "tokens": "tokens",
    "calls": "calls",
    "task": "task_id",
    "outcome": "outcome",
}
RUNNING = ""
"""The outcome of a rollout that has none yet."""
MAX_FACETS = 200
MAX_WORDS = 8
MAX_TASKS = 500
REWARDS_PER_TASK = 40
LATEST_ROLLOUTS = 20_000
MAX_ERROR_CHARACTERS = 300
MAX_CAUSE_CHARACTERS = 200

# -- the index ------------------------------------------------------------------------------------

_COLUMNS = """
    rollout INTEGER PRIMARY KEY{reference},
    changed INTEGER NOT NULL,
    rollout_id TEXT NOT NULL,
    task_id TEXT NOT NULL,
    agent TEXT NOT NULL,
    model TEXT NOT NULL,
    batch_id TEXT NOT NULL,
    member INTEGER NOT NULL,
    weights TEXT NOT NULL,
    outcome TEXT NOT NULL,
    cause TEXT NOT NULL,
    started_at REAL NOT NULL,
    wall REAL,
    reward REAL,
    calls INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    words TEXT NOT NULL
"""
_NAMES = tuple(line.split()[0] for line in _COLUMNS.strip().splitlines())
_VARIABLE_PART = re.compile(r"0x[0-9a-f]+|\b(?=[a-z]*[0-9])[0-9a-z]{8,}\b|\d+(?:[.,]\d+)*", re.IGNORECASE)
"""A part of an error that differs from rollout to rollout: an id, an address, a number."""
_SEARCHED_TEXTS = ("rollout_id", "task_id", "model", "agent", "batch_id", "error")

IN_TIME = (
    "CREATE INDEX figures_in_time ON figures (started_at, rollout, task_id, reward, outcome, agent, model, batch_id)"
)
"""Has the order of lists, and all that they are filtered by."""
TABLES = (
    f"CREATE TABLE figures ({_COLUMNS.format(reference=' REFERENCES rollouts (id) ON DELETE CASCADE')})",
    "CREATE INDEX figures_changed ON figures (changed)",
    # Covering indexes: sums and filters are answered without reading the rows.
    "CREATE INDEX figures_of_task ON figures (task_id, outcome, reward, wall, prompt_tokens, completion_tokens,"
    " started_at, agent, model, batch_id)",
    IN_TIME,
    "CREATE INDEX figures_of_group ON figures (batch_id, task_id, started_at, reward)",
    "CREATE INDEX figures_of_kind ON figures (agent, model, outcome)",
    # One for each column that a page can be sorted by.
    "CREATE INDEX figures_by_reward ON figures (reward)",
    "CREATE INDEX figures_by_wall ON figures (wall)",
    "CREATE INDEX figures_by_tokens ON figures (tokens)",
    "CREATE INDEX figures_by_calls ON figures (calls)",
)
TEMPORARY_TABLE = f"CREATE TEMP TABLE figures ({_COLUMNS.format(reference='')})"
_SAVE = f"INSERT OR REPLACE INTO figures ({', '.join(_NAMES)}) VALUES ({', '.join('?' * len(_NAMES))})"
_SELECT = f"SELECT {', '.join(_NAMES[2:])} FROM figures WHERE rollout = ?"
_REBUILD_ROWS = 1000


def save(connection: sqlite3.Connection, rollout: int, values: Mapping[str, Any]) -> None:
    """Write the index row of a rollout, from the values of its record."""
    row = _row(values)
    change = latest_change(connection) + 1
    if connection.execute(_SELECT, (rollout,)).fetchone() == row:
        # Nothing that is searched: only one of the many indexes has to be updated.
        connection.execute("UPDATE figures SET changed = ? WHERE rollout = ?", (change, rollout))
    else:
        connection.execute(_SAVE, (rollout, change, *row))


def latest_change(connection: sqlite3.Connection) -> int:
    """The number of the last change."""
    return int(connection.execute("SELECT coalesce(max(changed), 0) FROM figures").fetchone()[0])


def changed_since(connection: sqlite3.Connection, change: int, limit: int) -> list[tuple[int, int]]:
    """The key and the change number of the rollouts that changed after `change`, the earliest first."""
    rows = connection.execute(
        "SELECT rollout, changed FROM figures WHERE changed > ? ORDER BY changed LIMIT ?", (change, limit)
    )
    return list(rows)


def touch(connection: sqlite3.Connection, rollout: int) -> None:
    """Count a change of something that is kept elsewhere, such as tags."""
    connection.execute("UPDATE figures SET changed = ? WHERE rollout = ?", (latest_change(connection) + 1, rollout))


def rebuild(connection: sqlite3.Connection) -> None:
    """Fill the index from the records."""
    connection.execute("DELETE FROM figures")
    last = 0
    while rows := connection.execute(
        "SELECT id, head FROM rollouts WHERE id > ? AND length(head) > 0 ORDER BY id LIMIT ?", (last, _REBUILD_ROWS)
    ).fetchall():
        last = rows[-1][0]
        connection.executemany(_SAVE, ((key, key, *_row(decode(decompress(head)))) for key, head in rows))


def refresh_emulated(connection: sqlite3.Connection) -> None:
    """Rebuild the temporary index of an older store that is only read, if another process wrote to the store."""
    if connection.execute("SELECT 1 FROM temp.sqlite_master WHERE name = 'figures'").fetchone() is None:
        return
    version = read_pragma(connection, "data_version")
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS rebuilt (version INTEGER)")
    row = connection.execute("SELECT version FROM rebuilt").fetchone()
    if row is None or row[0] != version:
        rebuild(connection)
        connection.execute("DELETE FROM rebuilt")
        connection.execute("INSERT INTO rebuilt VALUES (?)", (version,))


def _row(values: Mapping[str, Any]) -> tuple[Any, ...]:
    finished = values["finished_at"]
    words = "\n".join(str(values[name] or "")[:MAX_ERROR_CHARACTERS] for name in _SEARCHED_TEXTS)
    return (
        values["rollout_id"],
        values["task_id"],
        values["agent"],
        values["model"],
        values["batch_id"] or "",
        values["member"],
        values.get("weight_version") or "",
        str(values["outcome"] or RUNNING),
        cause_of(values["outcome"], values["error"]),
        values["started_at"],
        None if finished is None else finished - values["started_at"],
        values["reward"],
        values["calls"],
        values["prompt_tokens"],
        values["completion_tokens"],
        values["prompt_tokens"] + values["completion_tokens"],
        words.lower(),
    )


def cause_of(outcome: str | None, error: str | None) -> str:
    """The error of a rollout that broke, without what differs between rollouts: the same cause has one text."""
    if outcome in (None, "ok") or not error:
        return ""
    return " ".join(_VARIABLE_PART.sub("…", error[: 2 * MAX_CAUSE_CHARACTERS]).split())[:MAX_CAUSE_CHARACTERS]


# -- queries --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Search:
    """Which rollouts; None leaves a condition out."""

    task: str | None = None
    agent: str | None = None
    model: str | None = None
    batch: str | None = None
    outcomes: tuple[str, ...] = ()
    min_reward: float | None = None
    max_reward: float | None = None
    since: float | None = None
    until: float | None = None
    """Both in seconds since the epoch, by when a rollout began."""
    words: str | None = None
    """All of them, anywhere in id, task, model, agent, batch or error, or all of them in the transcript."""
    running: bool | None = None
    weights: str | None = None
    """The weight version that it began with."""
    cause: str | None = None
    """See `cause_of`."""
    tag: str | None = None
    is_found: bool = False
    """Those whose words `find` has found."""

    @classmethod
    def of(
        cls,
        task_id: str | None = None,
        agent: str | None = None,
        model: str | None = None,
        outcome: str | None = None,
        batch_id: str | None = None,
        finished: bool | None = None,
        since: float | None = None,
        tag: str | None = None,
    ) -> Search:
        """A search by the names of a record."""
        outcomes = () if outcome is None else (str(outcome),)
        running = None if finished is None else not finished
        return cls(task_id, agent, model, batch_id, outcomes, since=since, running=running, tag=tag)

    def where(self, *, in_order: bool = False) -> tuple[str, list[Any]]:
        """The WHERE clause and its values. With `in_order`, the index of agents and models is not used: they have few
        values each, so scanning an ordered index up to the limit is faster than sorting."""
        scan = "+" if in_order else ""
        conditions: list[str] = []
        values: list[Any] = []

        def add(condition: str, *operands: Any) -> None:
            conditions.append(condition)
            values.extend(operands)

        for column, value in (
            ("task_id", self.task),
            (f"{scan}agent", self.agent),
            (f"{scan}model", self.model),
            ("batch_id", self.batch),
            ("weights", self.weights),
            ("cause", self.cause),
        ):
            if value is not None:
                add(f"{column} = ?", value)
        if self.tag is not None:
            add("rollout IN (SELECT rollout FROM tags WHERE tag = ?)", self.tag)
        if self.outcomes:
            add(f"outcome IN ({', '.join('?' * len(self.outcomes))})", *self.outcomes)
        if self.running is not None:
            add("outcome = ''" if self.running else "outcome <> ''")
        for condition, number in (
            ("reward >= ?", self.min_reward),
            ("reward <= ?", self.max_reward),
            ("started_at >= ?", self.since),
            ("started_at <= ?", self.until),
        ):
            if number is not None:
                add(condition, number)
        if self.is_found:
            add("rollout IN (SELECT rollout FROM found)")
        if words := (self.words or "").lower().split()[:MAX_WORDS]:
            named = " AND ".join(["instr(words, ?) > 0"] * len(words))
            expression = match_expression(self.words or "")
            if expression is None:
                add(named, *words)
            else:
                add(f"({named} OR rollout IN ({MATCHING}))", *words, expression)
        return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), values


def find(connection: sqlite3.Connection, search: Search) -> Search:
    """The same search, with its words looked up. Several queries then need not do that again, nor do later searches
    for the same words, until something is written."""
    if search.words is None:
        return search
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS found (rollout INTEGER PRIMARY KEY)")
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS found_words (words TEXT, version INTEGER, changes INTEGER)")
    version = read_pragma(connection, "data_version")
    row = connection.execute("SELECT words, version, changes FROM found_words").fetchone()
    if row != (search.words, version, connection.total_changes):
        where, values = Search(words=search.words).where()
        connection.execute("DELETE FROM found")
        connection.execute(f"INSERT INTO found SELECT rollout FROM figures {where}", values)
        connection.execute("DELETE FROM found_words")
        # One more change than there were: this row.
        changes = connection.total_changes + 1
        connection.execute("INSERT INTO found_words VALUES (?, ?, ?)", (search.words, version, changes))
    return replace(search, words=None, is_found=True)


@dataclass(frozen=True, slots=True)
class TaskTotals:
    """What the rollouts of one task add up to."""

    task_id: str
    outcomes: dict[str, int]
    rewards: RewardSums
    prompt_tokens: int
    completion_tokens: int
    wall_sum: float
    walls: int

    @property
    def count(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task in one batch."""

    batch_id: str
    task_id: str
    count: int
    scored: int
    mean: float | None
    members: list[int]


def page(
    connection: sqlite3.Connection,
    search: Search,
    *,
    sort: str = "started",
    order: Order = "desc",
    offset: int = 0,
    limit: int | None = None,
) -> array[int]:
    """Keys of rollouts, all of them without a limit. Those without the value that is sorted by come last."""
    where, values = search.where(in_order=True)
    direction = "ASC" if order == "asc" else "DESC"
    # In SQLite NULL is the smallest value, so it is last only in descending order.
    nulls = " NULLS LAST" if order == "asc" else ""
    rows = connection.execute(
        f"SELECT rollout FROM figures {where} ORDER BY {SORTS[sort]} {direction}{nulls}, rollout {direction}"
        " LIMIT ? OFFSET ?",
        (*values, -1 if limit is None else limit, offset),
    )
    return array("q", (key for (key,) in rows))


def count(connection: sqlite3.Connection, search: Search) -> int:
    where, values = search.where()
    return int(connection.execute(f"SELECT count(*) FROM figures {where}", values).fetchone()[0])


def recent_batches(connection: sqlite3.Connection, limit: int) -> list[str]:
    """The names of the batches that began last, the newest first."""
    rows = connection.execute(
        "SELECT batch_id FROM figures WHERE batch_id <> '' GROUP BY batch_id ORDER BY min(started_at) DESC LIMIT ?",
        (limit,),
    )
    return [name for (name,) in rows]


def facets(connection: sqlite3.Connection) -> dict[str, list[dict[str, Any]]]:
    """The values there are to filter by, each with how many rollouts have it, the most frequent first."""
    kinds: dict[str, Counter[str]] = {"agents": Counter(), "models": Counter(), "outcomes": Counter()}
    for *names, number in connection.execute(
        "SELECT agent, model, outcome, count(*) FROM figures GROUP BY agent, model, outcome"
    ):
        for counter, name in zip(kinds.values(), names, strict=True):
            counter[name] += number
    counts = {
        "tasks": _count_by(connection, "task_id"),
        **kinds,
        "batches": _count_by(connection, "batch_id"),
        "weights": _count_by(connection, "weights"),
        "tags": tags.counts(connection),
    }
    return {
        name: [
            {"name": value, "count": number}
            for value, number in sorted(counter.items(), key=lambda each: (-each[1], each[0]))
            if value
        ][:MAX_FACETS]
        for name, counter in counts.items()
    }


def _count_by(connection: sqlite3.Connection, column: str) -> dict[str, int]:
    return dict(connection.execute(f"SELECT {column}, count(*) FROM figures GROUP BY {column}"))


def by_task(connection: sqlite3.Connection, search: Search) -> list[TaskTotals]:
    """Sums for each task, those with the most rollouts first."""
    where, values = search.where()
    rows = connection.execute(
        "SELECT task_id, outcome, sum(prompt_tokens), sum(completion_tokens), total(wall), count(wall),"
        f" {SUMS} FROM figures {where} GROUP BY task_id, outcome",
        values,
    )
    tasks: dict[str, tuple[dict[str, int], list[Any], RewardSums]] = {}
    for task, outcome, prompt, completion, wall, walls, *sums in rows:
        outcomes, totals, rewards = tasks.setdefault(task, ({}, [0] * 4, RewardSums()))
        added = RewardSums(*sums)
        outcomes[outcome] = added.count
        rewards.add(added)
        totals[:] = [before + new for before, new in zip(totals, (prompt, completion, wall, walls), strict=True)]
    result = [TaskTotals(task, outcomes, rewards, *totals) for task, (outcomes, totals, rewards) in tasks.items()]
    return sorted(result, key=lambda each: (-each.count, each.task_id))


def wall_quantiles(
    connection: sqlite3.Connection, search: Search, fractions: tuple[float, ...]
) -> list[float | None]:
    """How long that share of the finished rollouts took at most."""
    where, values = search.where()
    finished = f"FROM figures {where} {'AND' if where else 'WHERE'} wall IS NOT NULL"
    if where:
        # Ordered by the index on `wall`, SQLite would read every row to test the other conditions.
        walls = sorted(wall for (wall,) in connection.execute(f"SELECT wall {finished}", values))
        return [walls[min(len(walls) - 1, int(fraction * len(walls)))] if walls else None for fraction in fractions]
    number = connection.execute(f"SELECT count(*) {finished}", values).fetchone()[0]

    def quantile(fraction: float) -> float:
        place = min(number - 1, int(fraction * number))
        # From the nearer end.
        order, offset = ("ASC", place) if place <= number // 2 else ("DESC", number - 1 - place)
        row = connection.execute(f"SELECT wall {finished} ORDER BY wall {order} LIMIT 1 OFFSET ?", (*values, offset))
        return float(row.fetchone()[0])

    return [quantile(fraction) if number else None for fraction in fractions]


def latest_rewards(connection: sqlite3.Connection, search: Search) -> dict[str, list[float]]:
    """The last rewards of each task that has any among the latest rollouts, in the order of time."""
    where, values = search.where()
    latest: dict[str, list[float]] = {}
    for task, reward in connection.execute(
        f"SELECT task_id, reward FROM figures {where} {'AND' if where else 'WHERE'} reward IS NOT NULL"
        " ORDER BY started_at DESC LIMIT ?",
        (*values, LATEST_ROLLOUTS),
    ):
        rewards = latest.setdefault(task, [])
        if len(rewards) < REWARDS_PER_TASK:
            rewards.append(reward)
    return {task: rewards[::-1] for task, rewards in latest.items()}


def groups(
    connection: sqlite3.Connection, *, task: str | None, batch: str | None, offset: int, limit: int, max_members: int
) -> tuple[int, list[Group]]:
    """How many groups there are, and some of them with their members, the latest first."""
    where, values = Search(task=task, batch=batch).where()
    where = f"{where} {'AND' if where else 'WHERE'} batch_id <> ''"
    rows = connection.execute(
        "SELECT batch_id, task_id, count(*), count(reward), avg(reward), max(started_at)"
        f" FROM figures {where} GROUP BY batch_id, task_id",
        values,
    ).fetchall()
    rows.sort(key=lambda row: (-row[5], row[1]))
    return len(rows), [
        Group(batch_id, task_id, number, scored, mean, members(connection, batch_id, task_id, max_members))
        for batch_id, task_id, number, scored, mean, _ in rows[offset : offset + limit]
    ]


def members(connection: sqlite3.Connection, batch: str, task: str, limit: int) -> list[int]:
    """Keys of the rollouts of a group, in the order in which they began."""
    rows = connection.execute(
        "SELECT rollout FROM figures WHERE batch_id = ? AND task_id = ? ORDER BY started_at, rollout LIMIT ?",
        (batch, task, limit),
    )
    return [key for (key,) in rows]
