"""The cache of fetched task sets: folders and small files, each complete or absent.

A folder is made beside its place and renamed when it is complete. A lock for each key lets one process fetch while
others wait for the result. What a killed process left is removed by the next one that makes the same folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.config import PADDOCK_TASKS, user_cache_folder
from paddock.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

KEY_CHARACTERS = 32


@dataclass(frozen=True, slots=True)
class DatasetCache:
    root: Path

    def folder(self, key: str, make: Callable[[Path], None]) -> Path:
        """The folder with this key. Where it is missing, `make` fills a new one. Raises TaskError."""
        place = self.root / key
        if place.is_dir():
            return place
        with self._lock(key):
            if place.is_dir():
                return place
            partial = place.with_name(f"{place.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            try:
                partial.mkdir(parents=True)
                make(partial)
                partial.rename(place)
            except OSError as error:
                raise self._unwritable(error) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return place

    def value(self, key: str, fetch: Callable[[], Any], *, refresh: bool = False) -> Any:
        """The stored JSON value with this key. `fetch` gives it where it is missing, or with `refresh`."""
        file = self.root / key
        if not refresh and (stored := self._read_value(file)) is not None:
            return stored
        value = fetch()
        with self._lock(key):
            partial = file.with_name(f"{file.name}.partial")
            try:
                partial.write_text(json.dumps(value))
                partial.replace(file)
            except OSError as error:
                raise self._unwritable(error) from error
        return value

    def _read_value(self, file: Path) -> Any:
        try:
            return json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise TaskError(f"{file} cannot be read: {error}", hint="remove it; it is fetched again") from error

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        file = self.root / f"{key}.lock"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _unwritable(self, error: OSError) -> TaskError:
        hint = "set PADDOCK_TASKS to a folder of your own"
        if error.errno == errno.ENOSPC:
            hint = "free space on the disk, or set PADDOCK_TASKS to a folder elsewhere"
        return TaskError(f"{self.root} cannot be written: {error.strerror}", hint=hint)


def default_cache() -> DatasetCache:
    return DatasetCache(PADDOCK_TASKS.read() or user_cache_folder() / "tasks")


def cache_key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:KEY_CHARACTERS]
