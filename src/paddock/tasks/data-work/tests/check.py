"""Compare summary.json with the known answer, key by key. Nothing of the agent's is run."""

import json
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))

from judge import conclude, read


def canonical(value):
    """As text, so that 5, 5.0, "5" and true all differ."""
    return json.dumps(value, sort_keys=True)


def answered():
    try:
        summary = json.loads(read("summary.json") or b"")
    except (ValueError, RecursionError):
        return {}
    return summary if isinstance(summary, dict) else {}


expected = json.loads((TESTS / "expected.json").read_text())
summary = answered()
extra = summary.keys() - expected.keys()
parts = {
    key: float(not extra and key in summary and canonical(summary[key]) == canonical(value))
    for key, value in expected.items()
}
conclude(round(sum(parts.values()) / len(parts), 4), parts)
