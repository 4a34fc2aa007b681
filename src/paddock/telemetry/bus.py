"""An event bus: code emits an event once, and every subscribed sink gets it.

It does not know the events and the backends. A sink that raises is counted and logged. It never disturbs the code
that emitted the event.
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


class TelemetryEvent(Protocol):
    """A name, a log level, and plain values that describe what happened."""

    name: ClassVar[str]
    level: ClassVar[Level]

    def attributes(self) -> dict[str, Any]: ...


class Bus:
    """Passes every event to every sink, in the order of subscription. Safe to use from any thread."""

    def __init__(self) -> None:
        self._sinks: tuple[Callable[[Any], None], ...] = ()
        self._lock = threading.Lock()
        self.failures: Counter[str] = Counter()
        """How often each sink raised, by its name."""

    def subscribe(self, sink: Callable[[Any], None]) -> Callable[[], None]:
        """Send all further events to `sink`. The returned function ends the subscription."""
        with self._lock:
            self._sinks = (*self._sinks, sink)
        return lambda: self._unsubscribe(sink)

    def emit(self, event: TelemetryEvent) -> None:
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
            self._sinks = tuple(each for each in self._sinks if each is not sink)


bus = Bus()
"""The bus of this process, for code that gets no other as an argument."""
