"""Compare summary.json with the known answer, key by key. Nothing of the agent's is run.

The answer is read apart: there, a link to the known answer leads nowhere.
"""

import json
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def apart(*words, stdin=b"", seconds=5.0):
    """Exit status (None if it took too long), output and errors of a command that can reach nothing of the tests."""
    words = ["paddock-run", "--max-output", "1000000", *words]
    try:
        done = subprocess.run(words, input=stdin, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, b"", b""
    return done.returncode, done.stdout, done.stderr


def canonical(value):
    """As text, so that 5, 5.0, "5" and true all differ."""
    return json.dumps(value, sort_keys=True)


def answered():
    try:
        summary = json.loads(apart("cat", "summary.json")[1])
    except (ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


# Without it nothing can be said about the program: then there is no reward.
subprocess.run(["paddock-run", "true"], check=True)
expected = json.loads((TESTS / "expected.json").read_text())
summary = answered()
extra = summary.keys() - expected.keys()
parts = {
    key: float(not extra and key in summary and canonical(summary[key]) == canonical(value))
    for key, value in expected.items()
}
reward = round(sum(parts.values()) / len(parts), 4)
Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": reward, "parts": parts}))
print("reward", reward, parts)
