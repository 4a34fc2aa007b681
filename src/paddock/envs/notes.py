"""Notes in a SQLite table: the smallest environment whose state can be looked at from outside.

Served alone it keeps its table in memory. A host that wants the table in a file calls `open_database`
before a reset, and shows `page` to agents that use a screen.
"""

from __future__ import annotations

import html
import sqlite3
from pathlib import Path
from string import Template
from typing import Any

from paddock.env import ToolEnvironment, tool
from paddock.types import Observation

SCHEMA = "CREATE TABLE notes (id INTEGER PRIMARY KEY, title TEXT NOT NULL, body TEXT NOT NULL DEFAULT '')"
WELCOME = ("welcome", "This is your first note.")
PAGE = Path(__file__).with_suffix(".html")


class Notes(ToolEnvironment):
    """A list of notes that can be read and added to."""

    concurrent_sessions = True

    def __init__(self) -> None:
        super().__init__()
        self._connection = _connect(":memory:")
        self._seed()

    def open_database(self, path: str) -> None:
        """Keep the notes in the SQLite file at `path` from the next reset on. The file may be new or empty."""
        self._connection.close()
        self._connection = _connect(path)

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self._seed()
        return Observation(metadata={"status": "ready", "notes": 1})

    @tool
    def add_note(self, title: str, body: str = "") -> dict[str, int]:
        """Add a note.

        Args:
            title: What the note is called.
            body: What it says.
        """
        added = self._connection.execute("INSERT INTO notes (title, body) VALUES (?, ?)", (title, body))
        assert added.lastrowid is not None
        return {"id": added.lastrowid}

    @tool(read_only=True, idempotent=True)
    def list_notes(self) -> list[dict[str, Any]]:
        """All notes, the oldest first."""
        return [dict(row) for row in self._connection.execute("SELECT id, title, body FROM notes ORDER BY id")]

    def page(self) -> str:
        """The notes as a web page, with a form that adds one."""
        items = [
            f"<li><b>{html.escape(note['title'])}</b> {html.escape(note['body'])}</li>" for note in self.list_notes()
        ]
        return Template(PAGE.read_text()).substitute(notes="\n".join(items))

    def close(self) -> None:
        self._connection.close()

    def _seed(self) -> None:
        with self._connection as connection:
            connection.execute("BEGIN")
            connection.execute("DROP TABLE IF EXISTS notes")
            connection.execute(SCHEMA)
            connection.execute("INSERT INTO notes (title, body) VALUES (?, ?)", WELCOME)


def _connect(path: str) -> sqlite3.Connection:
    """Calls come one at a time, but each may come on another thread."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    # The notes live as long as the process: nothing is gained by waiting for the disk.
    connection.execute("PRAGMA synchronous = OFF")
    return connection
