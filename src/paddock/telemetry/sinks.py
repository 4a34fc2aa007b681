"""Where events go: log lines, Prometheus counters, Logfire, OpenTelemetry.

Each sink is a callable for `Bus.subscribe`. Packages of a backend are imported when its sink is made.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from paddock.telemetry.bus import TelemetryEvent

LOG_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
SPAN_VALUE_TYPES = (str, bool, int, float)
LABELS = ("env_key", "modality", "failure_reason", "tool_name")
"""Labels with few values. A task key or an instance id as a label would make a new series for every rollout."""


class LogSink:
    """Log lines: the name of the event, then its values as `key=value`."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("paddock.events")

    def __call__(self, event: TelemetryEvent) -> None:
        level = LOG_LEVELS[event.level]
        if self._logger.isEnabledFor(level):
            values = " ".join(f"{key}={value!r}" for key, value in event.attributes().items() if value is not None)
            self._logger.log(level, "%s %s", event.name, values)


class PrometheusSink:
    """Counters of events by name and by `labels`. `render` returns the text for a scrape."""

    def __init__(self, labels: tuple[str, ...] = LABELS) -> None:
        self._labels = labels
        self._counts: Counter[tuple[tuple[str, str], ...]] = Counter()
        self._lock = threading.Lock()

    def __call__(self, event: TelemetryEvent) -> None:
        values = event.attributes()
        labels = [(label, str(values[label])) for label in self._labels if values.get(label) is not None]
        with self._lock:
            self._counts[(("event", event.name), *labels)] += 1

    def render(self) -> str:
        with self._lock:
            counts = dict(self._counts)
        lines = ["# HELP paddock_events_total Events announced.", "# TYPE paddock_events_total counter"]
        for labels, count in sorted(counts.items()):
            text = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
            lines.append(f"paddock_events_total{{{text}}} {count}")
        return "\n".join(lines) + "\n"


class LogfireSink:
    """Logfire. Raises ConfigError without the `logfire` package."""

    def __init__(self, token: str | None, *, environment: str, service_name: str) -> None:
        try:
            self._logfire: Any = importlib.import_module("logfire")
        except ImportError as error:
            raise ConfigError("logfire is not installed", hint="pip install logfire") from error
        self._logfire.configure(
            token=token,
            send_to_logfire="if-token-present",
            environment=environment,
            service_name=service_name,
            console=False,
        )

    def __call__(self, event: TelemetryEvent) -> None:
        level = "warn" if event.level == "warning" else event.level
        self._logfire.log(level, event.name, event.attributes())


class OtelSink:
    """Events on the current OpenTelemetry span, or a span of no length if there is none.

    The SDK that the application has set up decides where spans go. Raises ConfigError without `opentelemetry-api`.
    """

    def __init__(self, tracer_name: str = "paddock") -> None:
        try:
            self._trace: Any = importlib.import_module("opentelemetry.trace")
        except ImportError as error:
            raise ConfigError("opentelemetry is not installed", hint="pip install opentelemetry-api") from error
        self._tracer = self._trace.get_tracer(tracer_name)

    def __call__(self, event: TelemetryEvent) -> None:
        values = {
            key: value if isinstance(value, SPAN_VALUE_TYPES) else str(value)
            for key, value in event.attributes().items()
            if value is not None
        }
        span = self._trace.get_current_span()
        if span.is_recording():
            span.add_event(event.name, values)
        else:
            self._tracer.start_span(event.name, attributes=values).end()


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
