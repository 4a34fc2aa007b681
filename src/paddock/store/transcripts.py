"""Full-text search: the words of each finished rollout in an FTS5 index, and its text to show where they are.

The text of a rollout is its instruction, what its agent and its tools said, and what the tests printed; without
system prompts, which all rollouts of an agent share. It is read from what the store holds, so secrets stay masked.
The index has no copy of the text (`content=''`): to delete a row, FTS5 gets the text again, from `transcripts`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import orjson

from paddock.store import blobs, partial_read, rows, sequences
from paddock.store.packing import compress, decode, decompress
from paddock.store.text_query import split_words

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator

    from paddock.sqlite import Database

_INDEX = (
    "CREATE VIRTUAL TABLE IF NOT EXISTS {schema}transcript_index USING"
    " fts5 (text, content='', tokenize='unicode61 remove_diacritics 2')"
)
TABLES = (
    """CREATE TABLE IF NOT EXISTS transcripts (
        rollout INTEGER PRIMARY KEY REFERENCES rollouts (id) ON DELETE CASCADE,
        text BLOB NOT NULL
    )""",
    # Counted in place of the rows, which have the texts.
    "CREATE INDEX IF NOT EXISTS transcripts_counted ON transcripts (rollout)",
    _INDEX.format(schema=""),
)
TEMPORARY_TABLES = (
    "CREATE TEMP TABLE transcripts (rollout INTEGER PRIMARY KEY, text BLOB NOT NULL)",
    _INDEX.format(schema="temp."),
)
"""Empty ones, for an older store that is only read."""
_PENDING = (
    "FROM rollouts WHERE finished_at IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM transcripts WHERE transcripts.rollout = rollouts.id)"
)
_ALL_KEYS = 2**62
PENDING_AT_ONCE = 20
"""How many rollouts one transaction adds: others wait for it."""
MAX_CHARACTERS = 1_000_000
"""Of one rollout; the rest is not indexed."""
MAX_TEXT_CHARACTERS = 100_000
MIN_DATA_CHARACTERS = 500
"""A text of this length without any space is data, such as an image."""
BODIES = ("instruction", "verifier_stdout", "verifier_stderr")
SYSTEM_ROLES = ("system", "developer")
_NAMES_WITHOUT_TEXT = frozenset(
    ("role", "type", "id", "call_id", "tool_call_id", "tool_use_id", "signature", "encrypted_content", "status")
)
SNIPPET_BEFORE, SNIPPET_AFTER = 60, 140


# -- writing --------------------------------------------------------------------------------------


def add_pending(database: Database, before: int | None) -> int | None:
    """Index some of the finished rollouts that are not, the latest first, from those with keys below `before`.

    Returns the `before` of the next call; None once all are indexed."""
    with database.read() as connection:
        pending = connection.execute(
            f"SELECT id {_PENDING} AND id < ? ORDER BY id DESC LIMIT ?", (before or _ALL_KEYS, PENDING_AT_ONCE)
        )
        keys = [key for (key,) in pending]
    add(database, keys)
    return keys[-1] if keys else None


def add(database: Database, keys: Iterable[int]) -> None:
    """Index those of these rollouts that have ended and are not indexed."""
    with database.read() as connection:
        texts = {key: collect(connection, key) for key in keys if _is_pending(connection, key)}
    # Compressed outside the write transaction, which blocks all other writers.
    compressed = {key: compress(text.encode()) for key, text in texts.items()}
    with database.write() as connection:
        for key, text in texts.items():
            if _is_pending(connection, key):
                connection.execute("INSERT INTO transcripts (rollout, text) VALUES (?, ?)", (key, compressed[key]))
                connection.execute("INSERT INTO transcript_index (rowid, text) VALUES (?, ?)", (key, text))


def _is_pending(connection: sqlite3.Connection, key: int) -> bool:
    return connection.execute(f"SELECT 1 {_PENDING} AND id = ?", (key,)).fetchone() is not None


def delete(connection: sqlite3.Connection, key: int) -> None:
    text = read(connection, key)
    if text is not None:
        command = "INSERT INTO transcript_index (transcript_index, rowid, text) VALUES ('delete', ?, ?)"
        connection.execute(command, (key, text))
        connection.execute("DELETE FROM transcripts WHERE rollout = ?", (key,))


def collect(connection: sqlite3.Connection, key: int) -> str:
    """The text of a rollout, each different part of it once."""
    parts: dict[str, None] = {}
    left = MAX_CHARACTERS
    for text in _texts(connection, key):
        part = text[: min(MAX_TEXT_CHARACTERS, left)].strip()
        if part and part not in parts:
            parts[part] = None
            left -= len(part)
        if left <= 0:
            break
    # SQLite ends a text at a NUL, and takes no lone surrogates.
    return "\n".join(parts).replace("\0", " ").encode(errors="replace").decode()


def _texts(connection: sqlite3.Connection, key: int) -> Iterator[str]:
    record = rows.read(connection, key, names=BODIES)
    yield record.instruction
    read_blob, conversations = blobs.Reader(connection), sequences.ConversationReader()
    middles = connection.execute(
        "SELECT middle FROM sequences WHERE rollout = ? AND kind = ? ORDER BY id", (key, sequences.MESSAGES)
    )
    for (middle,) in middles.fetchall():
        data = sequences.decompress_middle(middle, lambda base: conversations.get(connection, base)[0])
        for item in sequences.decode_items(data, read_blob):
            yield from texts_of(decode(item))
    for head in partial_read.heads(connection, key):
        yield from texts_of(head.values.get("message") or {})
    yield record.verifier_stdout
    yield record.verifier_stderr


def texts_of(message: Any) -> Iterator[str]:
    """All texts of a message of any dialect, also those inside of the arguments of its tool calls."""
    if isinstance(message, dict):
        if message.get("role") in SYSTEM_ROLES:
            return
        for name, value in message.items():
            if name == "arguments" and isinstance(value, str):
                yield from texts_of(_parse(value))
            elif name not in _NAMES_WITHOUT_TEXT:
                yield from texts_of(value)
    elif isinstance(message, list):
        for value in message:
            yield from texts_of(value)
    elif isinstance(message, str) and not _is_data(message):
        yield message


def _parse(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


def _is_data(text: str) -> bool:
    if text.startswith("data:"):
        return True
    beginning = text[:MIN_DATA_CHARACTERS]
    return len(beginning) == MIN_DATA_CHARACTERS and not any(character.isspace() for character in beginning)


# -- reading --------------------------------------------------------------------------------------


def count_pending(connection: sqlite3.Connection) -> int:
    """How many finished rollouts are not indexed yet."""
    finished, indexed = connection.execute(
        "SELECT (SELECT count(*) FROM rollouts WHERE finished_at IS NOT NULL), (SELECT count(*) FROM transcripts)"
    ).fetchone()
    return max(0, int(finished) - int(indexed))


def read(connection: sqlite3.Connection, key: int) -> str | None:
    """The text of a rollout; None if it is not indexed."""
    row = connection.execute("SELECT text FROM transcripts WHERE rollout = ?", (key,)).fetchone()
    return None if row is None else decompress(row[0]).decode()


def snippet(connection: sqlite3.Connection, key: int, query: str) -> str | None:
    """The text around the first place that fits the query best; None if there is none."""
    text = read(connection, key)
    at = None if text is None else _find(text, query)
    if text is None or at is None:
        return None
    start, end = max(0, at - SNIPPET_BEFORE), min(len(text), at + SNIPPET_AFTER)
    words = text[start:end].split()
    # Not in the middle of a word.
    if start and len(words) > 1:
        words = ["…", *words[1:]]
    return " ".join([*words, "…"] if end < len(text) else words)


def _find(text: str, query: str) -> int | None:
    """Where the whole query stands, or else its longest word, which is the rarest as a rule."""
    words, lower = split_words(query), text.lower()
    for wanted in ([" ".join(words)] if words else []) + sorted(words, key=len, reverse=True):
        names = re.findall(r"[^\W_]+", wanted)
        # Quicker than the expression, which most texts do not match.
        if not all(name.lower() in lower for name in names):
            continue
        parts = r"[\W_]+".join(names)
        if match := re.search(rf"(?<![^\W_]){parts}", text, re.IGNORECASE):
            return match.start()
    return None
