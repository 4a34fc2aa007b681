"""Partial credit from what a verifier printed: the accumulator blocks, and lines of the form `App <n>: <0|1>`."""

from __future__ import annotations

import ast
import re

_BLOCK = r">>> {0}_ACCUMULATOR >>>\n(.+?)\n<<< {0}_ACCUMULATOR <<<"
_ERRORS = re.compile(_BLOCK.format("ERROR"), re.DOTALL)
_SUCCESSES = re.compile(_BLOCK.format("SUCCESS"), re.DOTALL)
_APP = re.compile(r"^\s*App\s+(\S+?)\s*:\s*([01])\b(.*)$", re.MULTILINE | re.IGNORECASE)
_UNTOUCHED = re.compile(r"\bno (?:unexpected|unintended) changes\b", re.IGNORECASE)
_JUDGE = re.compile(r"^JUDGE ERROR:.*$", re.MULTILINE)


def partial_reward(stdout: str) -> float | None:
    """The share that passed, between 0 and 1; None when nothing was printed to tell by."""
    apps = _APP.findall(stdout)
    if apps:
        # An application that passes only because nobody touched it says nothing about the agent.
        real = [passed == "1" for _, passed, note in apps if not (passed == "1" and _UNTOUCHED.search(note))]
        return sum(real) / len(real) if real else None
    errors, successes = _count(_ERRORS, stdout), _count(_SUCCESSES, stdout)
    if errors is None and successes is None:
        return None
    total = (errors or 0) + (successes or 0)
    return (successes or 0) / total if total else None


def judge_error(stdout: str) -> str | None:
    """The line with which a verifier says that its judge, not the agent, failed."""
    found = _JUDGE.search(stdout)
    return found.group(0) if found else None


def _count(block: re.Pattern[str], stdout: str) -> int | None:
    found = block.search(stdout)
    if found is None:
        return None
    try:
        value = ast.literal_eval(found.group(1))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return len(value) if isinstance(value, list | tuple | dict | set) else None
