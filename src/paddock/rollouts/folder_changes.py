"""What a call changed in the work folder, with the texts before and after, for people.

The command line and the page show the same changes. What git keeps for itself is one entry for each repository.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.store.snapshots import SnapshotHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from paddock.sandbox.folder_scan import FileState
    from paddock.store.snapshots import FileChange

LARGEST_TEXT_BYTES = 128 * 1024
"""Only the beginning of a larger file is compared."""
MOST_CHANGES = 500
REPOSITORY = ".git"
GENERATED_FOLDERS = frozenset(
    (REPOSITORY, "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", "node_modules")
)
GENERATED_ENDINGS = (".pyc", ".pyo", ".o", ".class")


@dataclass(frozen=True, slots=True)
class ShownChange:
    """One changed entry. `before` and `after` are None where there is no text."""

    path: str
    kind: str
    """`added`, `removed` or `changed`."""
    before: str | None = None
    after: str | None = None
    is_binary: bool = False
    note: str = ""
    """What the texts do not say."""
    entries: int = 1
    """How many changed entries it stands for."""

    def count_lines(self) -> tuple[int, int]:
        """How many lines are new, and how many are gone."""
        before, after = (self.before or "").splitlines(), (self.after or "").splitlines()
        added = removed = 0
        for tag, old, old_end, new, new_end in difflib.SequenceMatcher(None, before, after).get_opcodes():
            if tag != "equal":
                added, removed = added + new_end - new, removed + old_end - old
        return added, removed

    def to_json(self) -> dict[str, Any]:
        added, removed = self.count_lines()
        return {
            "path": self.path,
            "kind": self.kind,
            "before": self.before,
            "after": self.after,
            "binary": self.is_binary,
            "note": self.note,
            "added": added,
            "removed": removed,
        }


def make_history(
    snapshots: Iterable[tuple[str, Mapping[str, Any]]], about: Mapping[str, Any], read_blob: Callable[[str], bytes]
) -> SnapshotHistory:
    """The snapshots of a rollout: those of its calls, and those that its record has (`RolloutRecord.snapshots`)."""
    return SnapshotHistory([*snapshots, *(about.get("ends") or {}).items()], read_blob)


def read_changes(
    history: SnapshotHistory, call: str, read_blob: Callable[[str], bytes], *, most: int = MOST_CHANGES
) -> list[ShownChange] | None:
    """What changed between a call and the next snapshot; None if that is not known. Raises StoreError for snapshots
    that were deleted."""
    changes = history.changes(call)
    if changes is None:
        return None
    own = [change for change in changes if repository_of(change.path) is None]
    listed = [make_change(change, read_blob) for change in own[:most]]
    if len(own) > most:
        left = len(own) - most
        listed.append(ShownChange("…", "changed", note=f"{left} more", entries=left))
    return listed + describe_repositories(changes)


def describe_repositories(changes: Iterable[FileChange]) -> list[ShownChange]:
    counts: dict[str, int] = {}
    for change in changes:
        if (folder := repository_of(change.path)) is not None:
            counts[folder] = counts.get(folder, 0) + 1
    return [ShownChange(folder, "changed", note=f"{count} entries of git") for folder, count in counts.items()]


def is_generated(path: str) -> bool:
    """Whether a program wrote this file beside the work: compiled code, a cache, installed packages."""
    return not GENERATED_FOLDERS.isdisjoint(path.split("/")) or path.endswith(GENERATED_ENDINGS)


def repository_of(path: str) -> str | None:
    """The folder in which git keeps what this path is a part of."""
    parts = path.split("/")
    return "/".join(parts[: parts.index(REPOSITORY) + 1]) + "/" if REPOSITORY in parts else None


def make_change(change: FileChange, read_blob: Callable[[str], bytes]) -> ShownChange:
    sides = (change.before, change.after)
    texts, notes, is_binary = [], [], False
    for state in sides:
        content = read_content(state, read_blob)
        text = None if content is None else decode_text(content[:LARGEST_TEXT_BYTES])
        is_binary |= content is not None and text is None
        texts.append(text)
        if state is not None and state.reason:
            notes.append(state.reason)
        if content is not None and len(content) > LARGEST_TEXT_BYTES:
            notes.append(f"only the first {LARGEST_TEXT_BYTES} bytes are compared")
    is_folder = any(state is not None and state.kind == "folder" for state in sides)
    notes += describe_entries(*sides)
    if None not in texts and texts[0] != texts[1] and str(texts[0]).splitlines() == str(texts[1]).splitlines():
        notes.append("only the ends of lines differ")
    path = readable_path(change.path) + ("/" if is_folder else "")
    return ShownChange(path, change.kind, texts[0], texts[1], is_binary, "; ".join(dict.fromkeys(notes)))


def describe_entries(before: FileState | None, after: FileState | None) -> list[str]:
    """What is new about an entry beside its content."""
    if before is None or after is None:
        kind = (before or after).kind  # type: ignore[union-attr]
        return [] if kind == "file" else ["a special file" if kind == "other" else kind]
    notes = []
    if before.kind != after.kind:
        notes.append(f"{before.kind} became {after.kind}")
    if before.mode != after.mode:
        notes.append(f"mode {before.mode:o} became {after.mode:o}")
    if None in (before.digest, after.digest) and before.size != after.size:
        notes.append(f"{before.size} bytes became {after.size}")
    return notes


def read_content(state: FileState | None, read_blob: Callable[[str], bytes]) -> bytes | None:
    """The content of a file, or the target of a link; None where it is not saved."""
    if state is None:
        return None
    if state.kind == "link":
        return f"{state.target}\n".encode("utf-8", "surrogateescape")
    return None if state.digest is None else read_blob(state.digest)


def readable_path(path: str) -> str:
    """A path without the stand-ins for bytes that are no text, which JSON cannot hold."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def decode_text(content: bytes) -> str | None:
    """Bytes as text, also if they were cut within a character; None if they are no text."""
    if b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return content[: error.start].decode() if error.start >= len(content) - 3 else None
