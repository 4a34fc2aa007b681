"""Server-sent events as bytes: a reader fed piece by piece, and a writer. No IO, no knowledge of what they say.

Lines end with `\\n` or `\\r\\n`, as every model server writes them.
"""

from __future__ import annotations

DONE = b"[DONE]"
KEEP_ALIVE = b": keep-alive\n\n"
LONGEST_EVENT = 256 * 1024 * 1024


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class EventTooLong(ValueError):
    """A single event outgrew all reason."""


class EventReader:
    """Turns pieces of a stream into the data of its events."""

    __slots__ = ("_data", "_pieces", "_size", "only_comments")

    def __init__(self) -> None:
        self.only_comments = True
        """Whether the last piece held nothing but comments, which keep a connection open and are no answer."""
        self._pieces: list[bytes] = []
        self._size = 0
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ends in this piece. Comments and event names are left out."""
        if b"\n" not in piece:
            self._keep(piece)
            self.only_comments = self._is_in_comment
            return []
        lines = (b"".join(self._pieces) + piece).split(b"\n")
        self._pieces.clear()
        self._size = 0
        self._keep(lines.pop())
        self.only_comments = self._is_in_comment and all(is_comment(line) for line in lines)
        found: list[bytes] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    found.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        return found

    @property
    def _is_in_comment(self) -> bool:
        return is_comment(self._pieces[0] if self._pieces else b"")

    def _keep(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > LONGEST_EVENT:
            raise EventTooLong(f"an event is longer than {LONGEST_EVENT} bytes")
        if piece:
            self._pieces.append(piece)


def is_comment(line: bytes) -> bool:
    """Also true for a blank line, which ends an event and is none."""
    return line[:1] in (b":", b"\r", b"")
