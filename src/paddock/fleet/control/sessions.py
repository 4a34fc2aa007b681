"""What agents did, as they report it: jobs, sessions and their messages.

Kept and given back; the plane runs no job. A message is kept as it was sent, with a role found for it.
Plain functions on a connection.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import orjson

from paddock.fleet.control import records
from paddock.fleet.control.answers import Refused, shown
from paddock.fleet.control.database import now_text
from paddock.fleet.control.executions import find_execution

if TYPE_CHECKING:
    import sqlite3

    from paddock.fleet.control.answers import Fields
    from paddock.fleet.control.settings import PlaneSettings

STATUSES = ("pending", "running", "completed", "failed", "cancelled")
ENDED = ("completed", "failed", "cancelled")
PASSING_SCORE = 1.0


# -- jobs ---------------------------------------------------------------------------------------------


def put_job(connection: sqlite3.Connection, name: str | None, body: dict[str, Any]) -> dict[str, Any]:
    """A new job. `{id}`, `{sid}` and a trailing `{i}` in its name are filled in."""
    job_id = str(uuid.uuid4())
    chosen = (name or "job-{sid}").replace("{id}", job_id).replace("{sid}", job_id[:8])
    if chosen.endswith("{i}"):
        stem = chosen.removesuffix("{i}")
        names = connection.execute("SELECT name FROM jobs WHERE substr(name, 1, ?) = ?", (len(stem), stem))
        ends = [row["name"][len(stem) :] for row in names]
        chosen = f"{stem}{1 + max((int(end) for end in ends if end.isdecimal()), default=0)}"
    connection.execute(
        "INSERT INTO jobs (job_id, name, created_at, body) VALUES (?, ?, ?, ?)",
        (job_id, chosen, now_text(), orjson.dumps(body).decode()),
    )
    return {"job_id": job_id, "workflow_job_id": None, "status": "pending", "name": chosen}


def find_jobs(connection: sqlite3.Connection, job_id: str | None = None) -> list[dict[str, Any]]:
    """All jobs, or the one, the latest first. Sessions tell how far a job is."""
    rows = connection.execute(
        "SELECT job_id, name, created_at, (SELECT group_concat(DISTINCT status) FROM sessions"
        " WHERE sessions.job_id = jobs.job_id) AS statuses FROM jobs WHERE ?1 IS NULL OR job_id = ?1"
        " ORDER BY rowid DESC",
        (job_id,),
    )
    return [
        {
            "id": row["job_id"],
            "name": row["name"],
            "created_at": row["created_at"],
            "status": _job_status(row["statuses"]),
        }
        for row in rows
    ]


def _job_status(statuses: str | None) -> str:
    if statuses is None:
        return "pending"
    return "completed" if set(statuses.split(",")) <= set(ENDED) else "running"


# -- sessions -----------------------------------------------------------------------------------------


def ingest(connection: sqlite3.Connection, given: Fields, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Begin a session or go on with one. Raises Refused when the session is unknown."""
    session_id = given.label("session_id")
    known = None if session_id is None else _row(connection, session_id)
    if session_id is not None and known is None:
        raise Refused(400, f"Session '{shown(session_id)}' not found. Leave 'session_id' out to begin one.")
    chosen = session_id or str(uuid.uuid4())
    if known is None:
        connection.execute(
            "INSERT INTO sessions (session_id, status, created_at) VALUES (?, 'running', ?)", (chosen, now_text())
        )
    for name in ("job_id", "model", "task_key", "instance_id", "verifier_execution_id", "started_at", "ended_at"):
        _set(connection, chosen, name, given.label(name))
    _set(connection, chosen, "status", given.choice("status", STATUSES))
    for name in ("metadata", "config"):
        value = given.values.get(name)
        _set(connection, chosen, name, None if value is None else orjson.dumps(value).decode())
    count = _count(connection, chosen)
    connection.executemany(
        "INSERT INTO messages (session_id, position, role, body) VALUES (?, ?, ?, ?)",
        [
            (chosen, count + place, message["role"], orjson.dumps(message).decode())
            for place, message in enumerate(messages)
        ],
    )
    return {
        "success": True,
        "session_id": chosen,
        "message_count": count + len(messages),
        "created_new_session": known is None,
    }


def normal_message(given: Any, role: str) -> dict[str, Any]:
    """A message of whatever shape as one with a role and a content. `role` is for one that names none."""
    if not isinstance(given, dict):
        return {"role": role, "content": given}
    choices = given.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        inner = choices[0].get("message")
        if isinstance(inner, dict):
            return normal_message(inner, role)
    named = given.get("role")
    if isinstance(named, str) and named:
        return {**given, "content": given.get("content", given.get("parts"))}
    return {**given, "role": role} if "content" in given else {"role": role, "content": given}


def transcript(connection: sqlite3.Connection, session_id: str, settings: PlaneSettings) -> dict[str, Any]:
    row = _row(connection, session_id)
    if row is None:
        raise Refused(404, f"Session '{shown(session_id)}' not found.")
    messages = connection.execute("SELECT body FROM messages WHERE session_id = ? ORDER BY position", (session_id,))
    return {
        "session_id": session_id,
        "status": row["status"],
        "model": row["model"],
        "task": _task(connection, row["task_key"]),
        "instance": _instance(connection, row["instance_id"], settings),
        "verifier_execution": _grade(connection, row["verifier_execution_id"]),
        "metadata": _loaded(row["metadata"]),
        "config": _loaded(row["config"]),
        "transcript": [orjson.loads(message["body"]) for message in messages],
    }


def job_sessions(connection: sqlite3.Connection, job_id: str, settings: PlaneSettings) -> dict[str, Any]:
    """The sessions of a job, grouped by task."""
    rows = connection.execute("SELECT * FROM sessions WHERE job_id = ? ORDER BY rowid", (job_id,)).fetchall()
    if not rows and not find_jobs(connection, job_id):
        raise Refused(404, f"Job '{shown(job_id)}' not found.")
    groups: dict[str | None, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["task_key"], []).append(_session(connection, row, settings))
    return {
        "job_id": job_id,
        "total_sessions": len(rows),
        "tasks": [_group(connection, task_key, sessions) for task_key, sessions in groups.items()],
    }


def _group(connection: sqlite3.Connection, task_key: str | None, sessions: list[dict[str, Any]]) -> dict[str, Any]:
    grades = [session["verifier_execution"] for session in sessions if session["verifier_execution"] is not None]
    scores = [grade["score"] for grade in grades if grade["success"] and grade["score"] is not None]
    passed = sum(score >= PASSING_SCORE for score in scores)
    return {
        "task_id": task_key,
        "task": _task(connection, task_key),
        "total_sessions": len(sessions),
        "passed_sessions": passed,
        "pass_rate": passed / len(sessions),
        "average_score": sum(scores) / len(scores) if scores else None,
        "sessions": sessions,
    }


def _session(connection: sqlite3.Connection, row: sqlite3.Row, settings: PlaneSettings) -> dict[str, Any]:
    steps = connection.execute(
        "SELECT count(*) FROM messages WHERE session_id = ? AND role = 'assistant'", (row["session_id"],)
    ).fetchone()[0]
    return {
        "session_id": row["session_id"],
        "instance": _instance(connection, row["instance_id"], settings),
        "model": row["model"] or "unknown",
        "status": row["status"],
        "created_at": row["created_at"],
        "started_at": row["started_at"],
        "ended_at": row["ended_at"],
        "step_count": steps,
        "verifier_execution": _grade(connection, row["verifier_execution_id"]),
    }


def _grade(connection: sqlite3.Connection, execution_id: str | None) -> dict[str, Any] | None:
    found = None if execution_id is None else find_execution(connection, execution_id)
    if found is None:
        return None
    result = found.get("result")
    score = result.get("score") if isinstance(result, dict) else result
    return {
        "success": found["success"],
        "score": float(score) if isinstance(score, int | float) and found["success"] else None,
        "stdout": found.get("stdout"),
        "execution_time_ms": found["execution_time_ms"],
        "result": result,
    }


def _task(connection: sqlite3.Connection, key: str | None) -> dict[str, Any] | None:
    row = connection.execute("SELECT * FROM tasks WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    body = orjson.loads(row["body"])
    return {
        "key": row["key"],
        "prompt": body["prompt"],
        "env_id": row["env_id"],
        "env_variables": body["env_variables"],
        "created_at": row["created_at"],
        "version": row["version"],
        "verifier_id": row["verifier_id"],
        "metadata": body["metadata"],
    }


def _instance(
    connection: sqlite3.Connection, instance_id: str | None, settings: PlaneSettings
) -> dict[str, Any] | None:
    found = None if instance_id is None else records.find(connection, instance_id)
    return None if found is None else records.on_the_wire(found, settings)


def _row(connection: sqlite3.Connection, session_id: str) -> sqlite3.Row | None:
    found: sqlite3.Row | None = connection.execute(
        "SELECT * FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    return found


def _set(connection: sqlite3.Connection, session_id: str, column: str, value: str | None) -> None:
    if value is not None:
        connection.execute(f"UPDATE sessions SET {column} = ? WHERE session_id = ?", (value, session_id))


def _count(connection: sqlite3.Connection, session_id: str) -> int:
    return int(
        connection.execute(
            "SELECT coalesce(max(position) + 1, 0) FROM messages WHERE session_id = ?", (session_id,)
        ).fetchone()[0]
    )


def _loaded(text: str | None) -> Any:
    return None if text is None else orjson.loads(text)
