"""The sealed work folder of a rollout: which files it holds, what is in them, and what the agent changed."""

from __future__ import annotations

import base64
import io
import tarfile
from typing import TYPE_CHECKING, Any

from paddock.rollouts.store.packing import unsqueeze
from paddock.web.answers import NotFound

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.record import RolloutRecord
    from paddock.web.trail import Trail

SHOWN_BYTES = 512 * 1024
CHANGED_BYTES = 128 * 1024
MOST_FILES = 2000
LARGEST_ARCHIVE = 256 * 1024 * 1024


def listed(connection: sqlite3.Connection, trail: Trail, record: RolloutRecord) -> list[dict[str, Any]]:
    """Files with their sizes; the size is None where the folder itself was not kept, or is too large to look into."""
    if record.workdir_blob is None or _size(connection, record.workdir_blob) > LARGEST_ARCHIVE:
        return [{"path": path, "size": None} for path in record.workdir_files[:MOST_FILES]]
    members = _members(connection, trail, record.workdir_blob)
    return [{"path": path, "size": member.size} for path, member in sorted(members.items())[:MOST_FILES]]


def one(connection: sqlite3.Connection, trail: Trail, path: str) -> dict[str, Any]:
    """A file as text, or as base64 if it is none."""
    digest = trail.head.get("workdir_blob")
    member = None if digest is None else _members(connection, trail, str(digest)).get(path)
    if member is None:
        raise NotFound(f"rollout {trail.id} has no file {path[:200]!r}", hint="its files are listed with it")
    size, start = member.size, member.offset_data
    content = _archive(connection, str(digest))[start : start + min(SHOWN_BYTES, size)]
    text = _text(content)
    return {
        "path": path,
        "text": text,
        "base64": base64.b64encode(content).decode() if text is None else None,
        "size": size,
        "truncated": size > len(content),
    }


def changes(connection: sqlite3.Connection, trail: Trail) -> list[dict[str, Any]]:
    """The folder against the files that the task brought; where those are not known, all of it as `present`."""
    digest = trail.head.get("workdir_blob")
    if digest is None:
        return []
    given = _task_files(connection, trail.head)
    found = []
    members = _members(connection, trail, str(digest))
    names = sorted(members)[:MOST_FILES]
    archive = memoryview(_archive(connection, str(digest)))
    for path in names:
        start = members[path].offset_data
        after = bytes(archive[start : start + min(CHANGED_BYTES, members[path].size)])
        before = None if given is None else given.get(path)
        if before is not None and before[:CHANGED_BYTES] == after:
            continue
        kind = "present" if given is None else "added" if before is None else "changed"
        found.append(_change(path, before, after, kind))
    gone = sorted(set(given or ()) - set(names))
    return found + [_change(path, (given or {})[path], None, "removed") for path in gone]


def _change(path: str, before: bytes | None, after: bytes | None, kind: str) -> dict[str, Any]:
    return {
        "path": path,
        "before": None if before is None else _text(before[:CHANGED_BYTES]),
        "after": None if after is None else _text(after),
        "kind": kind,
        "binary": any(side is not None and _text(side[:CHANGED_BYTES]) is None for side in (before, after)),
    }


def _task_files(connection: sqlite3.Connection, head: dict[str, Any]) -> dict[str, bytes] | None:
    """The files that the task brought, if the store holds them or the task comes with Paddock."""
    if (digest := head.get("task_blob")) is None:
        return _shipped_files(str(head["task_id"]), str(head.get("task_hash") or ""))
    try:
        packed = _archive(connection, str(digest))
    except NotFound:
        return None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        plain = (member for member in archive if member.isreg())
        return {member.name: packed[member.offset_data : member.offset_data + member.size] for member in plain}


def _shipped_files(task_id: str, task_hash: str) -> dict[str, bytes] | None:
    """The files of a task that comes with Paddock, if it is still the same."""
    from paddock.errors import PaddockError
    from paddock.rollouts.task_folder import read_task_folder
    from paddock.tasks import shipped

    folder = shipped().get(task_id)
    if folder is None:
        return None
    try:
        task = read_task_folder(folder)
    except (PaddockError, OSError):
        return None
    return dict(task.files) if task.hash == task_hash else None


def _members(connection: sqlite3.Connection, trail: Trail, digest: str) -> dict[str, tarfile.TarInfo]:
    """Plain files only: links lead nowhere here."""
    if trail.cache.get("members", (None,))[0] != digest:
        with tarfile.open(fileobj=io.BytesIO(_archive(connection, digest))) as packed:
            plain = {_clean(member.name): member for member in packed if member.isreg() and not member.issparse()}
        trail.cache["members"] = (digest, plain)
    found: dict[str, tarfile.TarInfo] = trail.cache["members"][1]
    return found


def _archive(connection: sqlite3.Connection, digest: str) -> bytes:
    row = connection.execute("SELECT data FROM blobs WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        raise NotFound("the work folder is no longer in the store", hint="its rollout may have been pruned")
    return unsqueeze(row[0])


def _size(connection: sqlite3.Connection, digest: str) -> int:
    """Of the archive as it is kept."""
    row = connection.execute("SELECT length(data) FROM blobs WHERE digest = ?", (digest,)).fetchone()
    return 0 if row is None else int(row[0])


def _clean(name: str) -> str:
    return name.removeprefix("./")


def _text(content: bytes) -> str | None:
    if b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        # A file may have been cut within a character.
        return content[: error.start].decode() if error.start >= len(content) - 3 else None
