"""Server-sent events as bytes: a reader that is fed piece by piece, and a writer.

Does no IO, and knows nothing about what the data of an event means. All three line ends of the specification are
accepted (`\\n`, `\\r\\n` and `\\r`), also when a piece ends between `\\r` and `\\n`.
"""

from __future__ import annotations

from typing import NamedTuple

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: it has no meaning, and it keeps proxies and clients from closing a silent connection."""
DONE = b"[DONE]"
"""The data of the last event of a model's stream."""
MAX_EVENT_BYTES = 256 * 1024 * 1024


class SseEvent(NamedTuple):
    data: bytes
    name: str = ""
    """The `event:` field; empty if the event has none."""


class EventTooLong(ValueError):
    """A single event is longer than the reader accepts."""


class EventReader:
    """Turns the pieces of a stream into its events."""

    __slots__ = (
        "_data",
        "_ends_in_cr",
        "_id",
        "_max_bytes",
        "_name",
        "_partial_line",
        "_size",
        "last_id",
        "only_comments",
    )

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.only_comments = True
        """Whether the last piece held only comments, which keep a connection open and are no answer."""
        self.last_id: str | None = None
        """The id of the last event, with which a client resumes the stream (`Last-Event-ID`)."""
        self._max_bytes = max_event_bytes
        self._partial_line: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0
        self._name = ""
        self._id: str | None = None
        self._ends_in_cr = False

    def feed(self, piece: bytes) -> list[SseEvent]:
        """The events that end in this piece. Events without data are left out. Raises EventTooLong."""
        if self._ends_in_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        if b"\r" in piece:
            self._ends_in_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        elif piece:
            self._ends_in_cr = False
        lines = [piece]
        if b"\n" in piece:
            lines = (b"".join(self._partial_line) + piece).split(b"\n")
            self._partial_line.clear()
            self._size = sum(map(len, self._data))
        self._keep(lines.pop())
        self.only_comments = self._is_in_comment and all(map(_is_comment, lines))
        events: list[SseEvent] = []
        for line in lines:
            if line:
                self._read_field(line)
            elif (event := self._end_event()) is not None:
                events.append(event)
        return events

    def _keep(self, partial_line: bytes) -> None:
        self._count(len(partial_line))
        if partial_line:
            self._partial_line.append(partial_line)

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._max_bytes:
            raise EventTooLong(f"an event is longer than {self._max_bytes} bytes")

    @property
    def _is_in_comment(self) -> bool:
        return _is_comment(self._partial_line[0] if self._partial_line else b"")

    def _read_field(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._data.append(value)
            self._count(len(value))
            return
        name, _, value = line.partition(b":")
        if name == b"event":
            self._name = value.removeprefix(b" ").decode(errors="replace")
        elif name == b"id":
            self._id = value.removeprefix(b" ").decode(errors="replace")
        elif name == b"data":
            self._data.append(b"")

    def _end_event(self) -> SseEvent | None:
        if self._id is not None:
            self.last_id = self._id
        name, self._name = self._name, ""
        if not self._data:
            return None
        event = SseEvent(self._data[0] if len(self._data) == 1 else b"\n".join(self._data), name)
        self._data.clear()
        self._size = sum(map(len, self._partial_line))
        return event


def write_event(data: bytes, name: str = "", *, id: int | str | None = None) -> bytes:
    """One event. Data of several lines is written as several `data` fields."""
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    event = b"data: " + data + b"\n\n"
    if name:
        event = b"event: " + name.encode() + b"\n" + event
    return event if id is None else b"id: %s\n" % str(id).encode() + event


def _is_comment(line: bytes) -> bool:
    """Also true for a blank line, which only ends an event."""
    return line[:1] in (b":", b"")
