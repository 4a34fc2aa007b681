"""Counters and latency histograms of one server process, and their Prometheus text."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

BUCKET_SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    5.0,
    30.0,
)


class Histogram:
    """Counts of durations per bucket. The last bucket counts everything above the bounds."""

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKET_SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.buckets[bisect_left(BUCKET_SECONDS, seconds)] += 1
        self.total += seconds

    @property
    def count(self) -> int:
        return sum(self.buckets)


class Metrics:
    """The counters of one server process."""

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
    closed = [(f'{label},reason="{reason}"', count) for reason, count in metrics.sessions_closed.items()]
    errors = [(f'{label},code="{code}"', count) for code, count in metrics.errors.items()]
    families: list[tuple[str, str, str, float | list[tuple[str, int]]]] = [
        ("sessions", "gauge", "Sessions open now.", statistics.sessions),
        ("sessions_capacity", "gauge", "Sessions allowed at once, all workers together.", statistics.capacity),
        ("sessions_waiting", "gauge", "Clients waiting for a slot.", statistics.waiting),
        ("calls_running", "gauge", "Environment calls under way.", statistics.running),
        ("calls_hung", "gauge", "Environment calls past their deadline that still hold a thread.", statistics.hung),
        ("threads", "gauge", "Threads that run environments.", statistics.threads),
        ("sessions_opened_total", "counter", "Sessions opened.", metrics.sessions_opened),
        ("sessions_refused_total", "counter", "Clients refused for lack of a slot.", metrics.sessions_refused),
        ("sessions_resumed_total", "counter", "Sessions resumed after a dropped socket.", metrics.sessions_resumed),
        ("sessions_closed_total", "counter", "Sessions closed, by reason.", closed),
        ("errors_total", "counter", "Environment calls that failed, by code.", errors),
    ]
    lines: list[str] = []
    for name, kind, text, value in families:
        lines += [f"# HELP paddock_{name} {text}", f"# TYPE paddock_{name} {kind}"]
        samples = value if isinstance(value, list) else [(label, value)]
        lines += [f"paddock_{name}{{{labels}}} {sample}" for labels, sample in samples]
    lines += ["# HELP paddock_call_seconds Time of environment calls.", "# TYPE paddock_call_seconds histogram"]
    for method, histogram in metrics.calls.items():
        lines += _histogram_lines(f'{label},method="{method}"', histogram)
    return "\n".join(lines) + "\n"


def _histogram_lines(labels: str, histogram: Histogram) -> Iterable[str]:
    reached = 0
    for bound, number in zip((*BUCKET_SECONDS, "+Inf"), histogram.buckets, strict=True):
        reached += number
        yield f'paddock_call_seconds_bucket{{{labels},le="{bound}"}} {reached}'
    yield f"paddock_call_seconds_sum{{{labels}}} {histogram.total:.6f}"
    yield f"paddock_call_seconds_count{{{labels}}} {histogram.count}"


def merge_texts(texts: list[str]) -> str:
    """Merge the texts of several workers: all samples of a family under one heading, as the format requires."""
    families: dict[str, list[str]] = {}
    for text in texts:
        for block in text.split("# HELP ")[1:]:
            heading, kind, *samples = block.rstrip("\n").split("\n")
            families.setdefault(f"# HELP {heading}\n{kind}", []).extend(samples)
    return "".join(f"{heading}\n" + "".join(f"{line}\n" for line in lines) for heading, lines in families.items())
