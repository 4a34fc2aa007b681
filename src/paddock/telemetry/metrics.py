"""Counters and latency histograms of one server process, and their Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)


class Histogram:
    """Counts of durations per bucket. The last bucket is everything above."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Metrics:
    def __init__(self) -> None:
        self.calls: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Time of environment calls, by method."""
        self.errors: Counter[str] = Counter()
        """Environment calls that failed, by error code."""
        self.sessions_opened = 0
        self.sessions_refused = 0
        self.sessions_closed: Counter[str] = Counter()
        self.sessions_resumed = 0
        self.hung_calls = 0

    def count_closed(self, reason: str) -> None:
        self.sessions_closed[reason] += 1


def prometheus(metrics: Metrics, statistics: Any, worker: int = 0) -> str:
    """The text that Prometheus scrapes."""
    label = f'worker="{worker}"'
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[tuple[str, float]]) -> None:
        lines.extend((f"# HELP paddock_{name} {text}", f"# TYPE paddock_{name} {kind}"))
        lines.extend(f"paddock_{name}{{{labels}}} {value}" for labels, value in samples)

    family("sessions", "gauge", "Sessions open now.", [(label, statistics.sessions)])
    family(
        "sessions_capacity",
        "gauge",
        "Sessions allowed at once, all workers together.",
        [(label, statistics.capacity)],
    )
    family("sessions_waiting", "gauge", "Newcomers waiting for a slot.", [(label, statistics.waiting)])
    family("calls_running", "gauge", "Environment calls under way.", [(label, statistics.running)])
    family(
        "calls_hung",
        "gauge",
        "Environment calls past their deadline that still hold a thread.",
        [(label, statistics.hung)],
    )
    family("threads", "gauge", "Threads that run environments.", [(label, statistics.threads)])
    family("sessions_opened_total", "counter", "Sessions opened.", [(label, metrics.sessions_opened)])
    family(
        "sessions_refused_total",
        "counter",
        "Newcomers refused for lack of a slot.",
        [(label, metrics.sessions_refused)],
    )
    family(
        "sessions_resumed_total",
        "counter",
        "Sessions taken up again after a dropped socket.",
        [(label, metrics.sessions_resumed)],
    )
    family(
        "sessions_closed_total", "counter", "Sessions closed, by reason.",
        [(f'{label},reason="{reason}"', number) for reason, number in metrics.sessions_closed.items()],
    )  # fmt: skip
    family(
        "errors_total", "counter", "Environment calls that failed, by code.",
        [(f'{label},code="{code}"', number) for code, number in metrics.errors.items()],
    )  # fmt: skip
    lines.extend(("# HELP paddock_call_seconds Time of environment calls.", "# TYPE paddock_call_seconds histogram"))
    for method, histogram in metrics.calls.items():
        lines.extend(_histogram_lines(f'{label},method="{method}"', histogram))
    return "\n".join(lines) + "\n"


def _histogram_lines(labels: str, histogram: Histogram) -> Iterable[str]:
    reached = 0
    for bound, number in zip((*BOUNDS, "+Inf"), histogram.buckets, strict=True):
        reached += number
        yield f'paddock_call_seconds_bucket{{{labels},le="{bound}"}} {reached}'
    yield f"paddock_call_seconds_sum{{{labels}}} {histogram.total:.6f}"
    yield f"paddock_call_seconds_count{{{labels}}} {histogram.count}"


def merge_texts(texts: list[str]) -> str:
    """The texts of several workers as one: the samples of a family stand together under one heading."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for block in text.split("# HELP ")[1:]:
            heading, kind, *samples = block.rstrip("\n").split("\n")
            families.setdefault(f"# HELP {heading}\n{kind}", []).extend(samples)
    return "".join(f"{heading}\n" + "".join(f"{line}\n" for line in lines) for heading, lines in families.items())
