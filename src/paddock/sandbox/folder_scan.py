"""What a folder of a sandbox holds, looked at again and again while programs may write to it.

A scan takes the status of every entry, and reads only those files whose status has changed since the scan before. No
link is followed, and nothing is changed. A file that is written to meanwhile is read as it is at that moment.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.sandbox.guest.files import DEEPEST_FOLDER, READ_FILE, READ_FOLDER, kind_of, read_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Set

LEFT_OUT = frozenset(
    ("node_modules", ".venv", "venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox")
)
"""Names of folders that tools fill with what can be made again."""
MOST_ENTRIES = 20_000
"""A folder with more is not saved: the scan is bounded."""
SETTLED_NS = 50_000_000
"""A file whose status changed this shortly before a scan is read again by the next one: the file system's clock is
coarse, so it may change again without a new status."""

Stamp = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileState:
    """One entry of a folder, as it is compared and stored."""

    kind: str
    """`file`, `folder`, `link` or `other`."""
    mode: int
    size: int = 0
    digest: str | None = None
    """SHA-256 of the content of a file; None if it was not read."""
    target: str | None = None
    """Where a link leads."""
    reason: str | None = None
    """Why the content was not read."""
    modified: int | None = None
    """When a file was written whose content was not read, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class ScannedEntry:
    state: FileState
    stamp: Stamp | None
    """Its status. None: it must be read again."""


@dataclass(slots=True)
class FolderScan:
    """The result of a scan."""

    entries: dict[str, ScannedEntry] = field(default_factory=dict)
    """By the path below the folder."""
    contents: dict[str, bytes] = field(default_factory=dict)
    """The contents that were not known before, by their digest."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Paths that were not looked into, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    file_bytes: int
    """Larger files are not read."""
    total_bytes: int
    """The most new content of one scan."""
    stored: Set[str] = frozenset()
    """Digests of contents that need not be returned."""
    refuse: Callable[[bytes], str | None] = lambda content: None
    """Why a content must not be kept; None if it may."""
    most_entries: int = MOST_ENTRIES


def scan_folder(folder: int, earlier: FolderScan, options: ScanOptions) -> FolderScan:
    """The content of a folder, from a descriptor of it. Raises SandboxError if it has too many entries. Blocks."""
    scanner = _Scanner(earlier, options)
    with _reopened(folder) as top:
        scanner.scan(top, "", os.fstat(top).st_dev, 0)
    return scanner.result


class _Scanner:
    def __init__(self, earlier: FolderScan, options: ScanOptions) -> None:
        self.result = FolderScan()
        self._earlier = earlier
        self._options = options
        self._bytes_left = options.total_bytes
        self._settled = time.time_ns() - SETTLED_NS

    def scan(self, folder: int, prefix: str, device: int, depth: int) -> None:
        with os.scandir(folder) as listing:
            for entry in listing:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                path = prefix + entry.name
                if len(self.result.entries) >= self._options.most_entries:
                    raise SandboxError(f"the folder has more than {self._options.most_entries} entries")
                if stat.S_ISDIR(status.st_mode):
                    self._add_folder(folder, entry.name, path, status, device, depth)
                else:
                    self._add(folder, entry.name, path, status)

    def _add_folder(self, parent: int, name: str, path: str, status: os.stat_result, device: int, depth: int) -> None:
        reason = None
        if name in LEFT_OUT:
            reason = "its content can be made again"
        elif status.st_dev != device:
            reason = "it is a mount"
        elif depth >= DEEPEST_FOLDER:
            reason = "it is nested too deeply"
        state = FileState("folder", stat.S_IMODE(status.st_mode), reason=reason)
        self.result.entries[path] = ScannedEntry(self._same_object(path, state), None)
        if reason is not None:
            self.result.left_out[path] = reason
            return
        try:
            with _opened(name, READ_FOLDER, parent) as folder:
                self.scan(folder, f"{path}/", device, depth + 1)
        except FileNotFoundError:
            del self.result.entries[path]
        except OSError as error:
            self.result.left_out[path] = f"it cannot be read: {error.strerror}"
            # What is in it is as unknown as before, and not deleted.
            earlier = self._earlier.entries.items()
            self.result.entries.update((inner, each) for inner, each in earlier if inner.startswith(f"{path}/"))

    def _add(self, parent: int, name: str, path: str, status: os.stat_result) -> None:
        stamp = _stamp(status)
        earlier = self._earlier.entries.get(path)
        if earlier is not None and earlier.stamp == stamp:
            self.result.entries[path] = earlier
            return
        try:
            state, is_whole = self._read(parent, name, status)
        except FileNotFoundError:
            return
        is_settled = is_whole and status.st_ctime_ns < self._settled
        self.result.entries[path] = ScannedEntry(self._same_object(path, state), stamp if is_settled else None)

    def _same_object(self, path: str, state: FileState) -> FileState:
        """The state of the scan before if it is equal: then scans are compared by identity."""
        earlier = self._earlier.entries.get(path)
        return earlier.state if earlier is not None and earlier.state == state else state

    def _read(self, parent: int, name: str, status: os.stat_result) -> tuple[FileState, bool]:
        """The state of an entry that is no folder, and whether its status was the same after it was read."""
        kind, mode = kind_of(status), stat.S_IMODE(status.st_mode)
        if kind == "link":
            return FileState(kind, mode, target=os.readlink(name, dir_fd=parent)), True
        if kind != "file":
            return FileState("other", mode), True
        content, reason, is_whole = b"", self._reason_against(status.st_size), True
        if reason is None:
            try:
                with _opened(name, READ_FILE, parent) as descriptor:
                    content = read_regular(descriptor, name, self._options.file_bytes)
                    is_whole = _stamp(os.fstat(descriptor)) == _stamp(status)
                reason = self._options.refuse(content)
            except FileNotFoundError:
                raise
            except OSError as error:
                reason = f"it cannot be read: {error.strerror}"
            except SandboxError as error:
                reason, is_whole = str(error), False
        if reason is not None:
            state = FileState(kind, mode, status.st_size, reason=reason, modified=status.st_mtime_ns)
            return state, is_whole
        digest = hashlib.sha256(content).hexdigest()
        if digest not in self._options.stored and digest not in self.result.contents:
            self.result.contents[digest] = content
            self._bytes_left -= len(content)
        return FileState(kind, mode, len(content), digest), is_whole

    def _reason_against(self, size: int) -> str | None:
        """Why a file of this size is not read."""
        if size > self._options.file_bytes:
            return f"it is larger than {self._options.file_bytes} bytes"
        if size > self._bytes_left:
            return "the snapshots of the rollout have reached their size limit"
        return None


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_mode)


@contextmanager
def _opened(name: str, flags: int, parent: int) -> Iterator[int]:
    """Unlike `files.opened`, this never changes the mode of a file: its programs are running."""
    descriptor = os.open(name, flags, dir_fd=parent)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _reopened(folder: int) -> Iterator[int]:
    with _opened(".", READ_FOLDER, folder) as descriptor:
        yield descriptor
