import subprocess

import pytest


def run(*words):
    return subprocess.run(["python", "/app/schedule.py", *words], capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize(
    ("rule", "start", "lines"),
    [
        ("FREQ=MONTHLY;BYDAY=-1FR", "2026-02-03T09:30", ["2026-02-27 09:30", "2026-03-27 09:30", "2026-04-24 09:30"]),
        ("FREQ=DAILY;INTERVAL=10", "3 Feb 2026 9:30", ["2026-02-03 09:30", "2026-02-13 09:30"]),
        ("FREQ=YEARLY;BYMONTH=2;BYMONTHDAY=29", "Jan 1, 2025 00:00", ["2028-02-29 00:00", "2032-02-29 00:00"]),
    ],
)
def test_prints_the_times(rule, start, lines):
    assert run(rule, start, str(len(lines))).stdout.splitlines() == lines


@pytest.mark.parametrize(("rule", "start"), [("FREQ=SOMETIMES", "2026-01-01"), ("FREQ=DAILY", "the day after")])
def test_refuses_what_it_cannot_read(rule, start):
    done = run(rule, start, "1")
    assert done.returncode == 2
    assert done.stderr
    assert not done.stdout
