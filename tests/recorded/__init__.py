"""A small store with rollouts of every kind, recorded once.

    from recorded import unpack
    unpack(folder)          # a store with branches, sub-agents, compactions, retries, drift, failures, images …

The agents are a few lines of Python and the model is scripted, but everything else was real: sandboxes, the
capture of every call, verifiers. `PYTHONPATH=tests python -m recorded` records it again.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import zstandard

from paddock.store import Store

FILE = Path(__file__).parent / "store.db.zst"


def unpack(folder: Path) -> Path:
    """Put the recorded store into a folder, which is made, and bring it up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "store.db"
    file.write_bytes(zstandard.ZstdDecompressor().decompress(FILE.read_bytes()))
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    Store.open(folder).close()
    return folder
