"""Folders that are made once for all processes of a machine, and removed when nobody has used them for a month.

A folder is complete or absent. Two lock files stand beside it: one is held while it is made or removed, the other is
shared by all processes that use it, until they end. So a folder that a running sandbox mounts is never removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

UNUSED_SECONDS = 30 * 86400.0
ABANDONED_SECONDS = 86400.0
"""After this, a scratch folder belongs to a process that was killed."""
SCRATCH = ".scratch-"

_used: dict[Path, int] = {}
"""The folders that this process uses, with the descriptors that hold their shared locks. They stay until it ends."""


def use_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder` with `fill` unless it exists, and keep it while this process runs. Raises OSError. Blocks."""
    if folder in _used and folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(_lock_file(folder)):
        if not folder.exists():
            _make(folder, fill)
        _hold(folder)
    remove_unused(folder.parent)


def remove_unused(parent: Path, *, now: float | None = None) -> list[Path]:
    """Remove the folders in `parent` that nobody uses and nobody has used lately. Returns what was removed."""
    present = time.time() if now is None else now
    removed = []
    for folder in parent.iterdir():
        if folder.name.startswith(SCRATCH):
            # Another process may remove its own meanwhile.
            with suppress(FileNotFoundError):
                if present - folder.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
        elif not folder.name.startswith(".") and folder not in _used and _remove_if_unused(folder, present):
            removed.append(folder)
    return removed


def _remove_if_unused(folder: Path, present: float) -> bool:
    users = _users_file(folder)
    try:
        if present - (users if users.exists() else folder).stat().st_mtime < UNUSED_SECONDS:
            return False
        with _locked(_lock_file(folder), fcntl.LOCK_NB), _locked(users, fcntl.LOCK_NB):
            shutil.rmtree(folder)
    except OSError:
        # It is in use, or was removed by another process.
        return False
    return True


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=SCRATCH) as scratch:
        ready = Path(scratch) / "ready"
        ready.mkdir(mode=0o755)
        fill(ready)
        ready.rename(folder)


def _hold(folder: Path) -> None:
    users = _users_file(folder)
    descriptor = os.open(users, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    os.utime(users)
    if folder in _used:
        os.close(_used.pop(folder))
    _used[folder] = descriptor


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _users_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.users")


@contextmanager
def _locked(path: Path, mode: int = 0) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | mode)
        yield
