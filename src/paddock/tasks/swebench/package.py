"""Calls the `swebench` package in a process of its own, in the Python that has it.

The package and its dependencies are heavy, and their versions would bind those of everything beside them. A log is
also foreign text: a parser that takes too long on it is ended with its process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.config import PADDOCK_SWEBENCH_PYTHON
from paddock.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.tasks.settings import LogGrader

PROGRAM = Path(__file__).with_name("package_program.py")
SECONDS = 300.0
SHOWN_CHARACTERS = 400
INSTALL_HINT = (
    "make a virtual environment, run `pip install --no-deps swebench unidiff` in it, and set "
    "PADDOCK_SWEBENCH_PYTHON to its python"
)


@dataclass(frozen=True, slots=True)
class RowDescription:
    """How a row is scored, as the package says."""

    script: str = ""
    parser: str = ""
    evaluation: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LogGrade:
    """What a log says about the tests of a row."""

    resolved: bool = False
    valid: bool = False
    """Whether the package takes the log for that of a whole test run."""
    passed: dict[str, int] = field(default_factory=dict)
    """How many tests passed, under FAIL_TO_PASS and PASS_TO_PASS."""
    failed: dict[str, list[str]] = field(default_factory=dict)
    """The names of those that did not."""
    problem: str = ""
    """Why the log cannot be graded; then nothing else is set."""


def describe_rows(rows: Sequence[dict[str, Any]]) -> list[RowDescription]:
    """One description for each row. Raises TaskError if the package cannot be used."""
    return [RowDescription(**answer) for answer in _call("describe", rows)]


def grade_log(grader: LogGrader, log: str) -> LogGrade:
    """Raises TaskError if the package cannot be used."""
    request = {
        "repository": grader.repository,
        "version": grader.version,
        "instance_id": grader.instance,
        "parser": grader.parser,
        "evaluation": grader.evaluation,
        "fail_to_pass": grader.fail_to_pass,
        "pass_to_pass": grader.pass_to_pass,
        "log": log,
    }
    (answer,) = _call("grade", [request])
    return LogGrade(**answer)


def _call(action: str, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    python = str(PADDOCK_SWEBENCH_PYTHON.read() or sys.executable)
    request = json.dumps({"action": action, "items": list(items)}).encode()
    try:
        done = subprocess.run([python, "-I", str(PROGRAM)], input=request, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise TaskError(
            f"swebench did not answer within {SECONDS:g} s", hint="look at the log of the tests"
        ) from None
    except OSError as error:
        raise TaskError(
            f"{python} cannot be run: {error.strerror}", hint="correct PADDOCK_SWEBENCH_PYTHON"
        ) from error
    if done.returncode != 0:
        output = done.stderr.decode(errors="replace").strip()[-SHOWN_CHARACTERS:]
        raise TaskError(f"swebench ended with exit code {done.returncode}: {output}", hint=INSTALL_HINT)
    reply = json.loads(done.stdout)
    if "missing" in reply:
        raise TaskError(f"{python} has no Python package {reply['missing']}", hint=INSTALL_HINT)
    answers: list[dict[str, Any]] = reply["answers"]
    return answers
