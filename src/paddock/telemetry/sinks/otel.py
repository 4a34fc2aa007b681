"""Events on the current OpenTelemetry span, or as a span of no length where there is none.

Needs the `opentelemetry-api` package; where spans go is decided by whoever set up the SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from paddock.telemetry.bus import Event

PLAIN = (str, bool, int, float)


class OtelSink:
    def __init__(self, tracer_name: str = "paddock") -> None:
        try:
            self._trace: Any = importlib.import_module("opentelemetry.trace")
        except ImportError as error:
            raise ConfigError("opentelemetry is not installed", hint="pip install opentelemetry-api") from error
        self._tracer = self._trace.get_tracer(tracer_name)

    def __call__(self, event: Event) -> None:
        values = {
            key: value if isinstance(value, PLAIN) else str(value)
            for key, value in event.attributes().items()
            if value is not None
        }
        span = self._trace.get_current_span()
        if span.is_recording():
            span.add_event(event.name, values)
        else:
            self._tracer.start_span(event.name, attributes=values).end()
