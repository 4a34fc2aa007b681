import sqlite3


class MemoryDatabase(sqlite3.Connection):
    """Closed with its last reference. Otherwise Python 3.13 and later warn."""

    def __init__(self) -> None:
        super().__init__(":memory:", check_same_thread=False)

    def __del__(self) -> None:
        self.close()
