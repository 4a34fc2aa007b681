"""The patterns of a `.harborignore` file, with the rules of `.gitignore`. Knows paths only, and reads nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

IGNORE_FILE = ".harborignore"


@dataclass(frozen=True, slots=True)
class IgnorePattern:
    expression: re.Pattern[str]
    folders_only: bool = False
    includes: bool = False
    """Begins with `!`: what an earlier pattern left out is taken in again."""


def parse_patterns(text: str) -> list[IgnorePattern]:
    patterns: list[IgnorePattern] = []
    for line in text.splitlines():
        pattern = line.rstrip()
        if not pattern or pattern.startswith("#"):
            continue
        includes = pattern.startswith("!")
        pattern = pattern.removeprefix("!").removeprefix("\\")
        folders_only = pattern.endswith("/")
        pattern = pattern.rstrip("/")
        # A slash inside the pattern anchors it at the folder of the file.
        anchored = "/" in pattern
        prefix = "" if anchored else r"(?:.*/)?"
        patterns.append(
            IgnorePattern(re.compile(prefix + _expression(pattern.removeprefix("/"))), folders_only, includes)
        )
    return patterns


def is_ignored(path: str, patterns: Iterable[IgnorePattern]) -> bool:
    """Whether the file, or a folder that it is in, is left out."""
    every = list(patterns)
    parents = [str(folder) for folder in reversed(PurePosixPath(path).parents) if str(folder) != "."]
    return any(_matches(folder, every, is_folder=True) for folder in parents) or _matches(
        path, every, is_folder=False
    )


def without_ignored(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that the `.harborignore` files among them do not leave out."""
    rules = [
        (str(PurePosixPath(path).parent), parse_patterns(data.decode("utf-8", "replace")))
        for path, data in sorted(files.items(), key=lambda item: item[0].count("/"))
        if PurePosixPath(path).name == IGNORE_FILE
    ]
    return {
        path: data
        for path, data in files.items()
        if PurePosixPath(path).name != IGNORE_FILE and not any(_applies(path, *rule) for rule in rules)
    }


def _applies(path: str, folder: str, patterns: list[IgnorePattern]) -> bool:
    if folder == ".":
        return is_ignored(path, patterns)
    return path.startswith(f"{folder}/") and is_ignored(path.removeprefix(f"{folder}/"), patterns)


def _matches(path: str, patterns: list[IgnorePattern], *, is_folder: bool) -> bool:
    ignored = False
    for pattern in patterns:
        if (is_folder or not pattern.folders_only) and pattern.expression.fullmatch(path):
            ignored = not pattern.includes
    return ignored


def _expression(pattern: str) -> str:
    expression, position = "", 0
    for match in re.finditer(r"\*\*/|/\*\*$|\*\*|\*|\?|\[[^]]+\]", pattern):
        expression += re.escape(pattern[position : match.start()])
        token = match[0]
        if token.startswith("["):
            expression += f"[{token[1:-1].replace('!', '^', 1) if token[1] == '!' else token[1:-1]}]"
        else:
            expression += {"**/": "(?:.*/)?", "/**": "/.*", "**": ".*", "*": "[^/]*", "?": "[^/]"}[token]
        position = match.end()
    return expression + re.escape(pattern[position:])
