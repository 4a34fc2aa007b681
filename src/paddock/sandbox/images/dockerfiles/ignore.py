"""`.dockerignore`: which files of a build context are left out. The last pattern that matches decides."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from functools import cached_property

from paddock.errors import ImageError


@dataclass(frozen=True)
class DockerIgnorePattern:
    """One line of the file. `!` takes files in again."""

    pattern: str
    is_exception: bool

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(path_regex(self.pattern))


@dataclass(frozen=True)
class IgnoreRules:
    """The lines of a `.dockerignore`, in their order."""

    patterns: tuple[DockerIgnorePattern, ...] = ()

    def ignores(self, path: str) -> bool:
        """Whether a file or folder is left out: itself, or because of a folder above it."""
        parts = path.split("/")
        prefixes = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        is_ignored = False
        for pattern in self.patterns:
            if pattern.is_exception == is_ignored and any(pattern.regex.fullmatch(prefix) for prefix in prefixes):
                is_ignored = not pattern.is_exception
        return is_ignored

    @property
    def has_exceptions(self) -> bool:
        """Then a folder that is left out may still have files that are not."""
        return any(pattern.is_exception for pattern in self.patterns)


def parse_ignore_file(text: str, name: str = ".dockerignore") -> IgnoreRules:
    patterns = []
    for number, line in enumerate(text.removeprefix("\ufeff").splitlines(), 1):
        if line.startswith("#"):
            continue
        pattern = line.strip()
        is_exception = pattern.startswith("!")
        pattern = pattern.removeprefix("!").strip()
        if not pattern:
            if is_exception:
                raise ImageError(f"{name} line {number}: ! without a pattern", hint="write one after it")
            continue
        pattern = posixpath.normpath(pattern).lstrip("/")
        if pattern in ("", "."):
            continue
        try:
            patterns.append(DockerIgnorePattern(pattern, is_exception))
            _ = patterns[-1].regex
        except re.error as error:
            raise ImageError(f"{name} line {number}: {line!r} is no pattern: {error}", hint="correct it") from error
    return IgnoreRules(tuple(patterns))


def path_regex(pattern: str, *, double_star: bool = True) -> str:
    """A pattern as a regular expression: `*` and `?` within a name, `[a-z]`, and `**` over any number of folders."""
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        character = pattern[position]
        position += 1
        if character == "*" and double_star and pattern[position : position + 1] == "*":
            position += 1
            if pattern[position : position + 1] == "/":
                position += 1
                parts.append("(?:.*/)?")
            else:
                parts.append(".*")
        elif character == "*":
            parts.append("[^/]*")
        elif character == "?":
            parts.append("[^/]")
        elif character == "[":
            end = pattern.find("]", position + 1)
            if end < 0:
                raise re.error("[ is not closed")
            inner = pattern[position:end]
            position = end + 1
            negation = "^/" if inner.startswith("^") else ""
            parts.append(f"[{negation}{inner.removeprefix('^').replace('[', chr(92) + '[')}]")
        elif character == "\\" and position < len(pattern):
            parts.append(re.escape(pattern[position]))
            position += 1
        else:
            parts.append(re.escape(character))
    return "(?s:" + "".join(parts) + ")"


def has_wildcards(text: str) -> bool:
    return re.search(r"(?<!\\)[*?\[]", text) is not None
