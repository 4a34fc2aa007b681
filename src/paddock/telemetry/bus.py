"""A bus: code announces an event once, and whoever subscribed hears of it.

Knows no event and no backend. A sink that raises is counted and logged; it never disturbs the code that
announced the event.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

Level = Literal["debug", "info", "warning", "error"]


class Event(Protocol):
    """Something that happened: a name, how much it matters, and plain values that describe it."""

    name: ClassVar[str]
    level: ClassVar[Level]

    def attributes(self) -> dict[str, Any]: ...


class Bus:
    """Hands every event to every sink, in the order in which they subscribed. Safe to use from any thread."""

    def __init__(self) -> None:
        self._sinks: tuple[Callable[[Any], None], ...] = ()
        self._lock = threading.Lock()
        self.failures: Counter[str] = Counter()
        """How often each sink raised, by its name."""

    def subscribe(self, sink: Callable[[Any], None]) -> Callable[[], None]:
        """Send all further events to `sink`. Call what comes back to end that."""
        with self._lock:
            self._sinks = (*self._sinks, sink)
        return lambda: self._unsubscribe(sink)

    def emit(self, event: Event) -> None:
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:
                name = getattr(sink, "__qualname__", type(sink).__qualname__)
                with self._lock:
                    self.failures[name] += 1
                logger.exception("telemetry sink %s failed on %s", name, event.name)

    def _unsubscribe(self, sink: Callable[[Any], None]) -> None:
        with self._lock:
            self._sinks = tuple(known for known in self._sinks if known is not sink)


bus = Bus()
"""The bus of this process, for code that was not handed another."""
