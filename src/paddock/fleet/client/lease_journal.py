"""Leases on disk: what a process that was killed may have left running.

Each process has one file of JSON lines and holds an exclusive `flock` on it while it lives. The kernel releases the
lock however the process ends, so "the owner is dead" never depends on process ids or clocks. A line is written before
its request is sent. The file holds no key, only a fingerprint: recovering a lease needs the key. Knows no network.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddock.fleet.client.settings import leases_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paddock.fleet.client.settings import PlaneAddress

logger = logging.getLogger(__name__)

SUFFIX = ".leases"
REWRITE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease as a line of the file."""

    number: int
    plane: str
    key: str
    """The fingerprint of the key."""
    run: str
    is_own_run: bool
    env_key: str
    request: str
    instance: str | None = None

    def belongs_to(self, address: PlaneAddress) -> bool:
        return self.plane == address.base_url and self.key == fingerprint(address)


def fingerprint(address: PlaneAddress) -> str:
    return hashlib.sha256(address.api_key.encode()).hexdigest()[:16]


class LeaseJournal:
    """The file of this process. Where it cannot be written, leases live in memory only, with a warning."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._path: Path | None = None
        self._is_broken = False
        self._records: dict[int, LeaseRecord] = {}

    def write(self, record: LeaseRecord) -> None:
        """Write a lease as it is now."""
        self._records[record.number] = record
        self._append(_line(record))

    def remove(self, number: int) -> None:
        """The lease is gone. A journal without leases is truncated."""
        if self._records.pop(number, None) is None:
            return
        if self._records:
            self._append(json.dumps({"number": number, "gone": True}) + "\n")
        elif self._file is not None:
            with suppress(OSError):
                os.ftruncate(self._file, 0)

    def close(self) -> None:
        """Release the lock. The next process ends the leases that are still in the file."""
        if self._file is None:
            return
        if not self._records and self._path is not None:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None

    def drop(self) -> None:
        """In a forked child: close the descriptor. This does not release the lock, which is the parent's."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, line: str) -> None:
        if self._is_broken:
            return
        try:
            file = self._open() if self._file is None else self._file
            if os.write(file, line.encode()) and os.fstat(file).st_size > REWRITE_BYTES:
                self._rewrite()
        except OSError as error:
            self._is_broken = True
            logger.warning(
                "leases cannot be written to %s (%s): what this process leaves when it is killed cannot be recovered",
                leases_folder(),
                error,
            )

    def _open(self) -> int:
        folder = leases_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{os.getpid()}-{uuid.uuid4().hex}{SUFFIX}"
        # Locked under another name first: an unlocked file would mean that its owner is dead.
        temporary = path.with_suffix(".new")
        file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        temporary.rename(path)
        self._file, self._path = file, path
        return file

    def _rewrite(self) -> None:
        old, path = self._file, self._path
        lines = "".join(_line(record) for record in self._records.values())
        os.write(self._open(), lines.encode())
        if path is not None:
            path.unlink(missing_ok=True)
        if old is not None:
            os.close(old)


class DeadJournal:
    """The file of a process that has ended, locked by us."""

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file = file
        self.records = _read(path)

    def remove(self, number: int) -> None:
        self.records.pop(number, None)
        if self.records:
            os.write(self._file, (json.dumps({"number": number, "gone": True}) + "\n").encode())
        else:
            self._path.unlink(missing_ok=True)


@contextmanager
def dead_journals() -> Iterator[list[DeadJournal]]:
    """The journals whose owners are dead, locked until the block ends: each has one recoverer at a time."""
    journals: list[DeadJournal] = []
    files: list[int] = []
    try:
        for path in sorted(leases_folder().glob(f"*{SUFFIX}")):
            with suppress(OSError):
                file = os.open(path, os.O_RDWR | os.O_APPEND)
                files.append(file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file).st_nlink == 0:
                    continue
                journal = DeadJournal(path, file)
                if journal.records:
                    journals.append(journal)
                else:
                    path.unlink(missing_ok=True)
        yield journals
    finally:
        for file in files:
            os.close(file)


def journaled_instances(address: PlaneAddress) -> set[str]:
    """The instances of a plane in all journals of this machine, of living and dead processes."""
    instance_ids: set[str] = set()
    for path in leases_folder().glob(f"*{SUFFIX}"):
        records = _read(path).values()
        instance_ids |= {each.instance for each in records if each.instance and each.belongs_to(address)}
    return instance_ids


def _line(record: LeaseRecord) -> str:
    return json.dumps({name: getattr(record, name) for name in LeaseRecord.__slots__}) + "\n"


def _read(path: Path) -> dict[int, LeaseRecord]:
    """The leases in a file. A last line that is incomplete, after a kill or on a full disk, is skipped."""
    records: dict[int, LeaseRecord] = {}
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return records
    for line in lines:
        try:
            document: Any = json.loads(line)
            if document.get("gone"):
                records.pop(document["number"], None)
            else:
                record = LeaseRecord(**document)
                records[record.number] = record
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return records
