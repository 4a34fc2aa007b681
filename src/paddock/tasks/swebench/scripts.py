"""The shell scripts of a task that is made from a row. Runs nothing."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = "/testbed"
START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
PATCH_FAILED = ">>>>> Patch Apply Failed"
EXIT_CODE = ">>>>> Test Exit Code"
EVAL_SCRIPT = "eval.sh"
TEST_PATCH = "test.patch"
GOLD_PATCH = "gold.patch"
NO_TEST_FILES = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
CHANGED_FILE = re.compile(
    r"^--- (?:a/(?P<old>.+?)|/dev/null)\t?\n\+\+\+ (?:b/(?P<new>.+?)|/dev/null)\t?$", re.MULTILINE
)

# Both streams are one log: the markers of SWE-bench are printed by `set -x`, to stderr.
TEST_SCRIPT = f"exec bash /tests/{EVAL_SCRIPT} 2>&1\n"
ACTIVATE = "if [ -e /opt/miniconda3/bin/activate ]; then source /opt/miniconda3/bin/activate testbed; fi"


def solution_script(folder: str) -> str:
    patch = f"/solution/{GOLD_PATCH}"
    return (
        f"cd {shlex.quote(folder)}\ngit config --global --add safe.directory {shlex.quote(folder)}\n"
        f"git apply --verbose {patch} || patch --batch --fuzz=5 -p1 -i {patch}\n"
    )


def command_script(commands: str | Sequence[str], *, folder: str, commit: str, test_patch: str) -> str:
    """Applies the test patch and runs the row's own test command.

    A command that is one text gets the files of the test patch as arguments, as in SWE-bench. A list is run as it is.
    """
    old, new = changed_files(test_patch)
    if isinstance(commands, str):
        commands = [" ".join([commands, *map(shlex.quote, test_files(new))])]
    added = sorted(set(new) - set(old))
    quoted_folder = shlex.quote(folder)
    reset = f"git checkout {shlex.quote(commit)} -- {' '.join(map(shlex.quote, old))}" if old else "true"
    remove = f"rm -f -- {' '.join(map(shlex.quote, added))}" if added else "true"
    return "\n".join(
        [
            "#!/bin/bash",
            ACTIVATE,
            f"git config --global --add safe.directory {quoted_folder}",
            f"cd {quoted_folder} || exit 1",
            f"{reset} && {remove} && git apply --verbose /tests/{TEST_PATCH} || echo '{PATCH_FAILED}'",
            f"echo '{START}'",
            *commands,
            f"echo '{END}'",
            "",
        ]
    )


def record_exit_code(script: str) -> str:
    """The script, made to print the exit code of its last command before the end marker."""
    lines = script.splitlines()
    for number, line in enumerate(lines):
        if END in line and EXIT_CODE not in script:
            lines[number : number + 1] = ["paddock_exit_code=$?", line, f'echo "{EXIT_CODE}: $paddock_exit_code"']
            break
    return "\n".join([*lines, ""])


def changed_files(patch: str) -> tuple[list[str], list[str]]:
    """The files of a patch before it, and those after it."""
    matches = list(CHANGED_FILE.finditer(patch))
    return [match["old"] for match in matches if match["old"]], [match["new"] for match in matches if match["new"]]


def test_files(files: Sequence[str]) -> list[str]:
    return [name for name in files if not name.endswith(NO_TEST_FILES)]
