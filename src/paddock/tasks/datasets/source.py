"""What a user calls a task set, as a value. Reads no file and no network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit, urlunsplit

from paddock.errors import TaskError

GIT = "git+"
GIT_SCHEMES = ("https", "http", "ssh", "file", "git")
SWEBENCH = "swebench:"
GIT_HINT = "write git+https://HOST/REPOSITORY.git@REV#FOLDER; @REV and #FOLDER may be left out"
DATASET_NAME = re.compile(r"(?P<name>[\w][\w.+-]*(?:/[\w][\w.+-]*)*)(?:@(?P<version>[\w][\w.+:-]*))?")


@dataclass(frozen=True, slots=True)
class GitSource:
    """Tasks in a git repository."""

    url: str
    """May contain a password: show `public_url`."""
    revision: str = ""
    """A branch, a tag or a commit. Empty: the default branch."""
    path: str = ""
    """A folder or a .jsonl or .json file in it. Empty: the whole repository."""

    @property
    def public_url(self) -> str:
        return without_credentials(self.url)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{GIT}{self.public_url}{revision}{f'#{self.path}' if self.path else ''}"


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A dataset of a registry or of the package store."""

    name: str
    version: str = ""
    """A version of the registry; a tag, a revision number or a digest of the store. Empty: the newest."""

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True)
class SwebenchSource:
    """A file with rows like those of SWE-bench."""

    file: Path

    def __str__(self) -> str:
        return f"{SWEBENCH}{self.file}"


def parse_source(text: str) -> GitSource | SwebenchSource | None:
    """What a prefix says the set is; None without a prefix. Raises TaskError."""
    if text.startswith(GIT):
        return parse_git(text)
    if text.startswith(SWEBENCH):
        name = text.removeprefix(SWEBENCH)
        if not name:
            raise TaskError(f"{text!r} names no file", hint="write swebench:ROWS.jsonl or swebench:ROWS.parquet")
        return SwebenchSource(Path(name).expanduser())
    return None


def parse_git(text: str) -> GitSource:
    """`git+URL@REV#PATH`. Raises TaskError."""
    address, _, path = text.removeprefix(GIT).partition("#")
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise TaskError(f"{text!r} is not an address: {error}", hint=GIT_HINT) from None
    if parts.scheme not in GIT_SCHEMES or (not parts.netloc and parts.scheme != "file"):
        raise TaskError(f"{text!r} is not the address of a git repository", hint=GIT_HINT)
    repository, at, revision = parts.path.rpartition("@") if "@" in parts.path else (parts.path, "", "")
    if not repository.strip("/") or (at and not revision):
        raise TaskError(f"{without_credentials(text)!r} lacks a repository or a revision", hint=GIT_HINT)
    if revision.startswith("-") or any(character.isspace() or character in "~^:?*[\\" for character in revision):
        raise TaskError(f"{revision!r} is no branch, tag or commit", hint=GIT_HINT)
    return GitSource(urlunsplit(parts._replace(path=repository)), revision, _checked_path(path, text))


def parse_dataset_name(text: str) -> DatasetSource | None:
    """`NAME@VERSION` or `NAME`. None for what cannot be the name of a dataset."""
    match = DATASET_NAME.fullmatch(text)
    return None if match is None else DatasetSource(match["name"], match["version"] or "")


def without_credentials(url: str) -> str:
    """The address without a name and a password of its user."""
    return re.sub(r"(?<=://)[^/@]*@", "", url, count=1)


def _checked_path(path: str, text: str) -> str:
    pure = PurePosixPath(path.strip("/"))
    if ".." in pure.parts or ".git" in pure.parts:
        raise TaskError(f"{without_credentials(text)!r}: {path!r} is not a folder of the repository", hint=GIT_HINT)
    return "" if str(pure) == "." else str(pure)
