"""Server-sent events from bytes: takes pieces as they come, gives whole events. Does no IO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class ServerEvent:
    data: str
    id: str | None = None


class EventReader:
    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._id: str | None = None
        self.last_id: str | None = None
        """From where the stream can be taken up again."""

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """The events that are complete with this piece."""
        whole = self._rest + piece
        # A line may end in CR LF, and the LF may come with the next piece.
        held = whole.endswith(b"\r")
        lines = whole.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + (b"\r" if held else b"")
        for line in lines:
            if line:
                self._take(line.decode(errors="replace"))
                continue
            if self._id is not None:
                self.last_id = self._id
            if self._data:
                yield ServerEvent("\n".join(self._data), self.last_id)
            self._data = []

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = value
