"""Call both functions with inputs that the agent has not seen. A function counts when every answer is right."""

import json
import os
import random
import stat
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parent
CALL = (TESTS / "call.py").read_text()
MOST_BYTES = 4_000_000


def apart(*words, stdin=b"", seconds=5.0):
    """Exit status (None if it took too long), output and errors of a command that can reach nothing of the tests."""
    words = ["paddock-run", "--max-output", "1000000", *words]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, b"", b""
    return done.returncode, done.stdout, done.stderr


def read(path):
    """The bytes of a plain file of reasonable size; None for anything else, such as a link or a pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return None
        return os.read(descriptor, MOST_BYTES)
    finally:
        os.close(descriptor)


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
    questions = json.dumps([call for call, _ in cases]).encode()
    status, output, _ = apart("python3", "-I", "-B", "-c", CALL, stdin=questions)
    try:
        return status == 0 and json.loads(output) == [{"result": expected} for _, expected in cases]
    except (ValueError, RecursionError):
        return False


# Without it nothing can be said about the program: then there is no reward.
subprocess.run(["paddock-run", "true"], check=True)
is_unchanged = read("test_intervals.py") == read(TESTS / "test_intervals.txt")
parts = {
    "tests_unchanged": float(is_unchanged),
    "merge": float(all_right(merge_cases())),
    "gaps": float(all_right(gaps_cases())),
}
reward = (parts["merge"] + parts["gaps"]) / 2 if is_unchanged else 0.0
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, "parts": parts}))
print("reward", reward, parts)
