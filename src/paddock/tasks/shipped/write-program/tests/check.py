"""Run timesheet.py on inputs that the agent has not seen, and compare with what it should say."""

import json
import random
import re
import subprocess
import time
from pathlib import Path

PROGRAM = "timesheet.py"
END = time.monotonic() + 40
"""Of all runs together, so that a program that hangs is wrong, not unknown."""
NAMES = ["ada", "bob", "Carl", "dörte", "e.m", "zoe-2", "x"]
FIXED = [
    "",
    "# nothing\n\n   \n",
    "solo 0m\n",
    "a 60m\nb 1h\nB 1h\n",
    "late 100h75m\n   # skipped\nlate 5m",
    "tab\t \t2h05m  \n",
    "#x 1h\nx 0h1m\n",
]
WRONG = [
    ("ada 1h\nbob\n", 2),
    ("# note\n\nada 1h30\n", 3),
    ("ada 1.5h\n", 1),
    ("ada 1h 30m\n", 1),
    ("ada 30m1h\nbob x\n", 1),
    ("ada -5m\n", 1),
    ("ada 1h\nbob 2H\ncarl oops\n", 2),
    ("ada h\n", 1),
]


def apart(*words, stdin=b"", seconds=5.0):
    """Exit status (None if it took too long), output and errors of a command that can reach nothing of the tests."""
    seconds = min(seconds, END - time.monotonic())
    if seconds <= 0:
        return None, b"", b""
    words = ["paddock-run", "--max-output", "1000000", *words]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, b"", b""
    return done.returncode, done.stdout, done.stderr


def totals(text):
    people = {}
    for line in text.splitlines():
        if not line.strip() or line.strip().startswith("#"):
            continue
        name, duration = line.split()
        hours, minutes = re.fullmatch(r"(?:([0-9]+)h)?(?:([0-9]+)m)?", duration).groups()
        people[name] = people.get(name, 0) + 60 * int(hours or 0) + int(minutes or 0)
    return people


def clock(minutes):
    return f"{minutes // 60}:{minutes % 60:02d}"


def report(people):
    ordered = sorted(people.items(), key=lambda pair: (-pair[1], pair[0]))
    rows = [*ordered, ("total", sum(people.values()))]
    return "".join(f"{name} {clock(minutes)}\n" for name, minutes in rows)


def random_inputs(count):
    source = random.Random(20240501)
    for _ in range(count):
        lines = []
        for _ in range(source.randint(1, 30)):
            hours, minutes = source.randint(0, 30), source.randint(0, 99)
            duration = source.choice([f"{hours}h", f"{minutes}m", f"{hours}h{minutes}m", f"{hours}h{minutes:02d}m"])
            lines.append(source.choice(["", "", " "]) + source.choice(NAMES) + source.choice([" ", "\t"]) + duration)
            lines += source.choice([[], [], [], ["# break"], [""]])
        yield "\n".join(lines) + "\n"


def program(text, *arguments):
    status, output, errors = apart("python3", PROGRAM, *arguments, stdin=text.encode())
    return status, output.decode(errors="replace"), errors.decode(errors="replace")


def says_the_report(text):
    status, output, _ = program(text)
    return status == 0 and output.rstrip("\n") == report(totals(text)).rstrip("\n")


def says_the_json(text):
    status, output, _ = program(text, "--json")
    people = totals(text)
    try:
        return status == 0 and json.loads(output) == {"people": people, "total": sum(people.values())}
    except (ValueError, RecursionError):
        return False


def refuses(text, line, *arguments):
    status, output, errors = program(text, *arguments)
    return status == 2 and output == "" and errors.strip() == f"line {line}: invalid"


def refuses_arguments(*arguments):
    status, output, _ = program("ada 1h\n", *arguments)
    return status == 2 and output == ""


def share(results):
    return sum(results) / len(results)


def check():
    if apart("test", "-f", PROGRAM)[0] != 0:
        return {"report": 0.0, "json": 0.0, "errors": 0.0}
    inputs = [*FIXED, *random_inputs(4)]
    wrong = [refuses(text, line) for text, line in WRONG] + [refuses(*WRONG[0], "--json")]
    return {
        "report": share([says_the_report(text) for text in inputs]),
        "json": share([says_the_json(text) for text in inputs[::2]]),
        "errors": share([*wrong, refuses_arguments("--xml"), refuses_arguments("--json", "file")]),
    }


# Without it nothing can be said about the program: then there is no reward.
subprocess.run(["paddock-run", "true"], check=True)
parts = {name: round(value, 4) for name, value in check().items()}
reward = round(sum(parts.values()) / len(parts), 4)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, "parts": parts}))
print("reward", reward, parts)
