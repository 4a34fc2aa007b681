"""Events as Prometheus counters: how many of each name, by the few labels that stay small in number."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.telemetry.bus import Event

LABELS = ("env_key", "modality", "failure_reason", "tool_name")
"""A task key or an instance id as a label would make a new series for every rollout."""


class PrometheusSink:
    def __init__(self, labels: tuple[str, ...] = LABELS) -> None:
        self._labels = labels
        self._counts: Counter[tuple[tuple[str, str], ...]] = Counter()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        values = event.attributes()
        known = [(label, str(values[label])) for label in self._labels if values.get(label) is not None]
        with self._lock:
            self._counts[(("event", event.name), *known)] += 1

    def render(self) -> str:
        """The text that Prometheus scrapes."""
        with self._lock:
            counts = dict(self._counts)
        lines = ["# HELP paddock_events_total Events announced.", "# TYPE paddock_events_total counter"]
        for labels, count in sorted(counts.items()):
            written = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
            lines.append(f"paddock_events_total{{{written}}} {count}")
        return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
