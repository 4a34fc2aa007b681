"""One rollout without its calls: the record, its timeline, the command that repeats it, and the files it left."""

from __future__ import annotations

import base64
import io
import shlex
import tarfile
from typing import TYPE_CHECKING, Any

from paddock.errors import StoreError
from paddock.rollouts.folder_changes import decode_text, is_generated
from paddock.store import blobs, rows, search, tags
from paddock.web.read_store import summaries, summarize_head
from paddock.web.responses import PageNotFound

if TYPE_CHECKING:
    import sqlite3

    from paddock.store.record import RolloutRecord
    from paddock.web.loaded_rollout import LoadedRollout

FILE_ARCHIVES = ("workdir", "artifacts")
MAX_SIBLINGS = 200
MAX_FILE_BYTES = 512 * 1024
MAX_DIFF_BYTES = 128 * 1024
MAX_FILES = 2000
MAX_ARCHIVE_BYTES = 256 * 1024 * 1024


def describe(connection: sqlite3.Connection, rollout: LoadedRollout) -> dict[str, Any]:
    record = rows.read(connection, rollout.key)
    return {
        **summarize_head(rollout.head),
        "tags": tags.read(connection, [rollout.key]).get(rollout.key, []),
        "task_hash": record.task_hash,
        "instruction": record.instruction,
        "config": record.config,
        "metadata": record.metadata,
        "agent_session": record.agent_session,
        "usage": record.usage,
        "timeline": timeline(rollout, record),
        "verifier": {
            "stdout": record.verifier_stdout,
            "stderr": record.verifier_stderr,
            "exit_code": record.test_exit_code,
            **record.verifier,
            "image": record.verifier_image,
        },
        "image": record.image,
        "user_ids": record.user_ids,
        "steps": record.steps,
        "limits": record.limits,
        "connections": record.connections,
        "logs": {
            "agent": record.agent_log,
            "proxy": record.proxy_log,
            "install": record.install_log,
            "build": record.build_log,
            "verifier_build": record.verifier_build_log,
        },
        "files": list_files(connection, rollout, record),
        "has_workdir": record.workdir_blob is not None,
        "has_snapshots": bool(record.snapshots),
        "fork": record.fork,
        "artifacts": record.artifacts[:MAX_FILES],
        "scores": rows.read_scores(connection, rollout.key),
        "rerun": rerun_command(record),
        "siblings": siblings(connection, rollout),
        "live": rollout.is_live,
        "orphan": rollout.is_orphan and not rollout.is_finished,
    }


def timeline(rollout: LoadedRollout, record: RolloutRecord) -> list[dict[str, Any]]:
    """When each stage began and ended; None for one that is running."""
    spans = []
    names = [name for name, _ in rollout.stages]
    for at, (name, start) in enumerate(rollout.stages):
        following = rollout.stages[at + 1][1] if at + 1 < len(rollout.stages) else record.finished_at
        # With steps, the record has the sum of a stage that was repeated.
        seconds = record.stages.get(name) if names.count(name) == 1 else None
        end = following if seconds is None else start + seconds
        spans.append({"name": name, "start": start, "end": end})
    return spans


def siblings(connection: sqlite3.Connection, rollout: LoadedRollout) -> list[dict[str, Any]]:
    """The other rollouts of its group."""
    batch = rollout.head.get("batch_id")
    if not batch:
        return []
    keys = search.members(connection, str(batch), str(rollout.head["task_id"]), MAX_SIBLINGS)
    return summaries(connection, [key for key in keys if key != rollout.key])


def rerun_command(record: RolloutRecord) -> str:
    """The command that runs the same again, without options that have their default."""
    config = record.config
    command = config.get("command")
    agent = f"command:{shlex.join(map(str, command))}" if isinstance(command, list) else record.agent
    words = [
        "paddock",
        "rollout",
        record.task_id,
        "--agent",
        agent,
        "--model",
        str(config.get("model") or record.model),
    ]
    for option, value, default in (
        ("--model-name", config.get("model_name"), None),
        ("--sandbox", record.sandbox, "bwrap"),
        ("--mode", record.mode, "transparent_proxy"),
        ("--temperature", config.get("temperature"), 1.0),
        ("--top-logprobs", config.get("top_logprobs"), 1),
        ("--tokenizer", config.get("tokenizer"), None),
        ("--renderer", config.get("renderer"), None),
        ("--agent-timeout", config.get("agent_timeout"), None),
    ):
        if value is not None and value != default and value != "":
            words += [option, str(value)]
    if config.get("token_mode"):
        words.append("--tokens")
    return shlex.join(words)


# -- files ----------------------------------------------------------------------------------------


def list_files(connection: sqlite3.Connection, rollout: LoadedRollout, record: RolloutRecord) -> list[dict[str, Any]]:
    """Files with their sizes; the size is None where the folder was not stored, or is too large to read."""
    if record.workdir_blob is None or blobs.stored_bytes(connection, record.workdir_blob) > MAX_ARCHIVE_BYTES:
        return [{"path": path, "size": None} for path in record.workdir_files[:MAX_FILES]]
    members = _members(connection, rollout, record.workdir_blob)
    return [{"path": path, "size": member.size} for path, member in sorted(members.items())[:MAX_FILES]]


def read_file(
    connection: sqlite3.Connection, rollout: LoadedRollout, path: str, archive: str = FILE_ARCHIVES[0]
) -> dict[str, Any]:
    """A file as text, or as base64 if it is none. `archive` is one of FILE_ARCHIVES."""
    digest = rollout.head.get("artifact_blob" if archive == "artifacts" else "workdir_blob")
    member = None if digest is None else _members(connection, rollout, str(digest)).get(path)
    if member is None:
        raise PageNotFound(f"rollout {rollout.id} has no file {path[:200]!r}", hint="its files are listed with it")
    size, start = member.size, member.offset_data
    content = read_blob(connection, str(digest))[start : start + min(MAX_FILE_BYTES, size)]
    text = decode_text(content)
    return {
        "path": path,
        "text": text,
        "base64": base64.b64encode(content).decode() if text is None else None,
        "size": size,
        "truncated": size > len(content),
    }


def file_changes(connection: sqlite3.Connection, rollout: LoadedRollout) -> list[dict[str, Any]]:
    """The folder compared with the files of the task; where those are unknown, all of it as `present`."""
    folder = read_folder(connection, rollout)
    if folder is None:
        return []
    task_files = _task_files(connection, rollout.head)
    if task_files is None:
        return [describe_change(path, None, after, "present") for path, after in folder.items()]
    return compare_folders(task_files, folder)


def read_folder(connection: sqlite3.Connection, rollout: LoadedRollout) -> dict[str, bytes] | None:
    """The files that the agent left, of large ones the beginning. None if the folder was not stored."""
    digest = rollout.head.get("workdir_blob")
    if digest is None:
        return None
    members = _members(connection, rollout, str(digest))
    archive = memoryview(read_blob(connection, str(digest)))
    files = {}
    for path in sorted(members)[:MAX_FILES]:
        start = members[path].offset_data
        files[path] = bytes(archive[start : start + min(MAX_DIFF_BYTES, members[path].size)])
    return files


def compare_folders(before: dict[str, bytes], after: dict[str, bytes]) -> list[dict[str, Any]]:
    """What was added and changed, then what was removed."""
    changes = []
    for path, content in after.items():
        old = before.get(path)
        if old is None or old[:MAX_DIFF_BYTES] != content:
            changes.append(describe_change(path, old, content, "added" if old is None else "changed"))
    removed = sorted(set(before) - set(after))
    return changes + [describe_change(path, before[path], None, "removed") for path in removed]


def describe_change(path: str, before: bytes | None, after: bytes | None, kind: str) -> dict[str, Any]:
    return {
        "path": path,
        "before": None if before is None else decode_text(before[:MAX_DIFF_BYTES]),
        "after": None if after is None else decode_text(after),
        "kind": kind,
        "generated": is_generated(path),
        "binary": any(side is not None and decode_text(side[:MAX_DIFF_BYTES]) is None for side in (before, after)),
    }


def _task_files(connection: sqlite3.Connection, head: dict[str, Any]) -> dict[str, bytes] | None:
    """The files that the task brought, if the store holds them or the task comes with Paddock."""
    if (digest := head.get("task_blob")) is None:
        return _shipped_files(str(head["task_id"]), str(head.get("task_hash") or ""))
    try:
        packed = read_blob(connection, str(digest))
    except PageNotFound:
        return None
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        plain = (member for member in archive if member.isreg())
        return {member.name: packed[member.offset_data : member.offset_data + member.size] for member in plain}


def _shipped_files(task_id: str, task_hash: str) -> dict[str, bytes] | None:
    """The files of a task that comes with Paddock, if it is still the same."""
    from paddock.errors import PaddockError
    from paddock.tasks.shipped import shipped
    from paddock.tasks.task_folder import read_task_folder

    folder = shipped().get(task_id)
    if folder is None:
        return None
    try:
        task = read_task_folder(folder)
    except (PaddockError, OSError):
        return None
    return dict(task.files) if task.hash == task_hash else None


def _members(connection: sqlite3.Connection, rollout: LoadedRollout, digest: str) -> dict[str, tarfile.TarInfo]:
    """Regular files only: links are not followed."""
    key = f"members {digest}"
    if key not in rollout.cache:
        with tarfile.open(fileobj=io.BytesIO(read_blob(connection, digest))) as packed:
            plain = {_clean(member.name): member for member in packed if member.isreg() and not member.issparse()}
        rollout.cache[key] = plain
    members: dict[str, tarfile.TarInfo] = rollout.cache[key]
    return members


def read_blob(connection: sqlite3.Connection, digest: str) -> bytes:
    """Raises PageNotFound."""
    try:
        return blobs.read(connection, digest)
    except StoreError:
        raise PageNotFound(
            "these files are no longer in the store", hint="its rollout may have been pruned"
        ) from None


def _clean(name: str) -> str:
    return name.removeprefix("./")
