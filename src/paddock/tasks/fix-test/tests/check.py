"""Call both functions with inputs that the agent has not seen. A function counts when every answer is right."""

import json
import random
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

from judge import conclude, read, run


def numbers(intervals):
    return {number for start, end in intervals for number in range(start, end)}


def as_intervals(held):
    """The shortest list of intervals for a set of numbers."""
    starts = sorted(number for number in held if number - 1 not in held)
    ends = sorted(number + 1 for number in held if number + 1 not in held)
    return [[start, end] for start, end in zip(starts, ends, strict=True)]


def merge_cases():
    source = random.Random(77)
    cases = [[], [[4, 4]], [[0, 10], [2, 3]], [[0, 9], [1, 2], [3, 20], [4, 5]], [[5, 1], [1, 5]]]
    for _ in range(60):
        cases.append([[source.randint(-9, 20), source.randint(-9, 20)] for _ in range(source.randint(1, 7))])
    return [(["intervals", "merge", [case]], as_intervals(numbers(case))) for case in cases]


def gaps_cases():
    source = random.Random(78)
    cases = [([[-4, -1], [0, 2], [9, 12]], 0, 6), ([[-5, 50]], 0, 6), ([[-3, 2], [5, 9]], 0, 6), ([], 3, 3)]
    for _ in range(60):
        intervals = [[source.randint(-9, 20), source.randint(-9, 20)] for _ in range(source.randint(0, 6))]
        start = source.randint(-6, 8)
        cases.append((intervals, start, start + source.randint(0, 12)))
    return [
        (["intervals", "gaps", [intervals, start, end]], as_intervals(set(range(start, end)) - numbers(intervals)))
        for intervals, start, end in cases
    ]


def all_right(cases):
    asked = json.dumps([call for call, _ in cases]).encode()
    status, output, _ = run([sys.executable, "-I", "-B", str(TESTS / "call.py")], asked)
    try:
        return status == 0 and json.loads(output) == [{"result": expected} for _, expected in cases]
    except (ValueError, RecursionError):
        return False


kept = read("test_intervals.py") == read(TESTS / "test_intervals.py")
parts = {
    "tests_unchanged": float(kept),
    "merge": float(all_right(merge_cases())),
    "gaps": float(all_right(gaps_cases())),
}
conclude((parts["merge"] + parts["gaps"]) / 2 if kept else 0.0, parts)
