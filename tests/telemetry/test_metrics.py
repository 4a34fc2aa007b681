import math

import pytest

from paddock.errors import StepTimeout
from paddock.sessions.manager import Statistics
from paddock.telemetry.metrics import BUCKET_SECONDS, Histogram, Metrics, prometheus

IDLE = Statistics(
    sessions=1, capacity=4, waiting=0, running=0, hung=0, threads=2, draining=False, builds_ok=True
)  # fmt: skip


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0), (BUCKET_SECONDS[0], 0), (0.0002, 1), (1e9, len(BUCKET_SECONDS))]
)
def test_a_duration_falls_into_its_bucket(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    histogram.observe(seconds)
    assert histogram.buckets[bucket] == 1
    assert (histogram.count, histogram.total) == (1, seconds)


def test_buckets_add_up_in_the_text() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.003, 2.0, 100.0):
        metrics.calls["step"].observe(seconds)
    values = samples(prometheus(metrics, IDLE))
    reached = [value for name, value in values.items() if "_bucket" in name and 'method="step"' in name]
    assert reached == sorted(reached)
    assert reached[-1] == values['paddock_call_seconds_count{worker="0",method="step"}'] == 4
    assert math.isclose(values['paddock_call_seconds_sum{worker="0",method="step"}'], 102.003)


def test_every_family_says_what_it_is() -> None:
    text = prometheus(Metrics(), IDLE, worker=3)
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families)) == text.count("# HELP")
    assert samples(text)['paddock_sessions_capacity{worker="3"}'] == 4
    assert text.endswith("\n")


def test_large_counts_keep_every_digit() -> None:
    metrics = Metrics()
    metrics.sessions_opened = 12_345_678
    assert samples(prometheus(metrics, IDLE))['paddock_sessions_opened_total{worker="0"}'] == 12_345_678


def test_errors_and_reasons_are_labels() -> None:
    metrics = Metrics()
    metrics.errors[StepTimeout.code] += 2
    metrics.count_closed("its client left")
    values = samples(prometheus(metrics, IDLE))
    assert values['paddock_errors_total{worker="0",code="STEP_TIMEOUT"}'] == 2
    assert values['paddock_sessions_closed_total{worker="0",reason="its client left"}'] == 1
