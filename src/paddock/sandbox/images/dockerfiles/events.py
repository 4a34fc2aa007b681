"""What a build reports while it runs, and its log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.sandbox.network.connections import ConnectionRecord

MAX_LOG_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """One report. A step is `started`, then `cached`, `done` or `failed`; `output` and `connection` come between."""

    kind: Literal["started", "output", "connection", "cached", "done", "failed"]
    step: int
    steps: int
    line: int
    text: str
    """The instruction, or a piece of its output."""
    stage: str = ""
    seconds: float = 0.0
    connection: ConnectionRecord | None = None
    """Of a `connection`: what a command connected to, or tried to."""


class BuildLog:
    """Collects the events of a build as a text that a record can keep. Long output loses its middle."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def add(self, event: BuildEvent) -> None:
        if event.kind == "started":
            self._parts.append(f"[{event.step}/{event.steps}] line {event.line}: {event.text}\n")
        elif event.kind == "output":
            self._parts.append(event.text)
        elif event.kind != "connection":
            note = event.kind if event.kind == "cached" else f"{event.kind} in {event.seconds:.1f} s"
            newline = "" if not self._parts or self._parts[-1].endswith("\n") else "\n"
            self._parts.append(f"{newline}[{event.step}/{event.steps}] {note}\n")

    def recorder(self, on_event: Callable[[BuildEvent], None] | None) -> Callable[[BuildEvent], None]:
        """A function that adds an event to the log, then passes it to `on_event`."""

        def record(event: BuildEvent) -> None:
            self.add(event)
            if on_event is not None:
                on_event(event)

        return record

    @property
    def text(self) -> str:
        text = "".join(self._parts)
        if len(text) <= MAX_LOG_CHARACTERS:
            return text
        half = MAX_LOG_CHARACTERS // 2
        return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"
