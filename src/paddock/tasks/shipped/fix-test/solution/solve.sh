#!/bin/bash
set -e
python3 - <<'PYTHON'
from pathlib import Path

file = Path("intervals.py")
text = file.read_text()
for wrong, right in (
    ("(merged[-1][0], end)", "(merged[-1][0], max(merged[-1][1], end))"),
    ("    for left, right in merge(intervals):\n", "    for left, right in merge((max(a, start), min(b, end)) for a, b in intervals):\n"),
):
    assert text.count(wrong) == 1
    text = text.replace(wrong, right)
file.write_text(text)
PYTHON
python3 -m unittest test_intervals
