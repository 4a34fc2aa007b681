"""Partial credit from what a verifier printed.

A verifier of several applications prints one block for each: its notes between `<<< VERIFY_name <<<` and
`>>> VERIFY_name >>>`, then `App name: 0` or `App name: 1`. The reward is the share of applications that passed. An
application whose notes say only that nothing was changed passes for an agent that does nothing, so it counts neither
as passed nor as an application. A verifier of one application prints two accumulator lists instead: what was wrong,
and what was right.
"""

from __future__ import annotations

import ast
import re

_BLOCK = r">>> {0}_ACCUMULATOR >>>\n(.+?)\n<<< {0}_ACCUMULATOR <<<"
_ERRORS = re.compile(_BLOCK.format("ERROR"), re.DOTALL)
_SUCCESSES = re.compile(_BLOCK.format("SUCCESS"), re.DOTALL)
_PASS_LINE = re.compile(r"^\s*PASS:\s*(.+)$", re.MULTILINE)
_APP = re.compile(r"^[ \t]*App[ \t]+(\S.*?)[ \t]*:[ \t]*([01])\b(.*)$", re.MULTILINE | re.IGNORECASE)
_UNTOUCHED = re.compile(
    r"\bno[ -](?:unexpected|unintended|unrelated|file[ -]?system|database)[ -]\w+|\bno changes\b", re.IGNORECASE
)
"""A note that nothing was changed: "no unexpected changes", "No filesystem changes", "No-unexpected-envelopes"."""
_JUDGE = re.compile(r"^JUDGE ERROR:.*$", re.MULTILINE)


def partial_reward(stdout: str) -> float | None:
    """The share that passed, between 0 and 1; None when nothing was printed to tell by."""
    apps = list(_APP.finditer(stdout))
    if apps:
        ends = [0, *(app.end() for app in apps)]
        sections = [stdout[start : app.start()] for start, app in zip(ends, apps, strict=False)]
        real = [app[2] == "1" for app, text in zip(apps, sections, strict=True) if not _is_untouched(app, text)]
        return sum(real) / len(real) if real else None
    errors, successes = _read(_ERRORS, stdout), _read(_SUCCESSES, stdout)
    if errors is None and successes is None:
        return None
    passed = len(successes or ())
    total = len(errors or ()) + passed
    return passed / total if total else None


def judge_error(stdout: str) -> str | None:
    """The line with which a verifier says that its judge, not the agent, failed."""
    found = _JUDGE.search(stdout)
    return found.group(0) if found else None


def _is_untouched(app: re.Match[str], section: str) -> bool:
    """Whether an application passed, and all that its notes say is that nothing was changed."""
    if app[2] != "1":
        return False
    block = re.search(
        rf"<<< VERIFY_{re.escape(app[1])} <<<(.*?)>>> VERIFY_{re.escape(app[1])} >>>", section, re.DOTALL
    )
    text = block[1] if block else section
    notes = [str(note) for listed in _SUCCESSES.finditer(text) for note in _literal(listed[1]) or ()]
    notes += [line[1] for line in _PASS_LINE.finditer(text)]
    if app[3].strip():
        notes.append(app[3])
    return bool(notes) and all(_UNTOUCHED.search(note) for note in notes)


def _read(block: re.Pattern[str], stdout: str) -> list[object] | None:
    found = block.search(stdout)
    return None if found is None else _literal(found[1])


def _literal(text: str) -> list[object] | None:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return list(value) if isinstance(value, list | tuple | dict | set) else None
