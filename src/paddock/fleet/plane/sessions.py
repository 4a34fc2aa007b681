"""Jobs, sessions and their messages, as agents report them: the tables and the routes.

They are stored and returned; the plane runs no job. A message is stored as it was sent, with a role. A request that
comes twice with one request id counts once.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from paddock.fleet.plane import instance_records
from paddock.fleet.plane.database import now_text, run_once
from paddock.fleet.plane.http import (
    HttpError,
    RequestFields,
    json_response,
    printable,
    raw_json_response,
    read_object,
    read_request_id,
)
from paddock.fleet.plane.verifiers import find_execution

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.plane.http import RequestFields
    from paddock.fleet.plane.plane import Plane
    from paddock.fleet.plane.settings import PlaneSettings

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
    """All jobs, or one, the latest first. The status of a job follows from its sessions."""
    rows = connection.execute(
        "SELECT job_id, name, created_at, (SELECT group_concat(DISTINCT status) FROM sessions"
        " WHERE sessions.job_id = jobs.job_id) AS statuses FROM jobs"
        " WHERE :job_id IS NULL OR job_id = :job_id ORDER BY rowid DESC",
        {"job_id": job_id},
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


def ingest(connection: sqlite3.Connection, fields: RequestFields, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Begin a session or go on with one. Raises HttpError when the session is unknown."""
    session_id = fields.label("session_id")
    row = None if session_id is None else _row(connection, session_id)
    if session_id is not None and row is None:
        raise HttpError(400, f"Session '{printable(session_id)}' not found. Leave 'session_id' out to begin one.")
    session_id = session_id or str(uuid.uuid4())
    if row is None:
        connection.execute(
            "INSERT INTO sessions (session_id, status, created_at) VALUES (?, 'running', ?)", (session_id, now_text())
        )
    for name in ("job_id", "model", "task_key", "instance_id", "verifier_execution_id", "started_at", "ended_at"):
        _set(connection, session_id, name, fields.label(name))
    _set(connection, session_id, "status", fields.choice("status", STATUSES))
    for name in ("metadata", "config"):
        value = fields.values.get(name)
        _set(connection, session_id, name, None if value is None else orjson.dumps(value).decode())
    count = _count(connection, session_id)
    connection.executemany(
        "INSERT INTO messages (session_id, position, role, body) VALUES (?, ?, ?, ?)",
        [
            (session_id, count + place, message["role"], orjson.dumps(message).decode())
            for place, message in enumerate(messages)
        ],
    )
    return {
        "success": True,
        "session_id": session_id,
        "message_count": count + len(messages),
        "created_new_session": row is None,
    }


def normalize_message(message: Any, role: str) -> dict[str, Any]:
    """A message of any shape as one with a role and a content. `role` is the default."""
    if not isinstance(message, dict):
        return {"role": role, "content": message}
    choices = message.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        inner = choices[0].get("message")
        if isinstance(inner, dict):
            return normalize_message(inner, role)
    own_role = message.get("role")
    if isinstance(own_role, str) and own_role:
        return {**message, "content": message.get("content", message.get("parts"))}
    return {**message, "role": role} if "content" in message else {"role": role, "content": message}


def transcript(connection: sqlite3.Connection, session_id: str, settings: PlaneSettings) -> dict[str, Any]:
    row = _row(connection, session_id)
    if row is None:
        raise HttpError(404, f"Session '{printable(session_id)}' not found.")
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
        raise HttpError(404, f"Job '{printable(job_id)}' not found.")
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
    execution = None if execution_id is None else find_execution(connection, execution_id)
    if execution is None:
        return None
    result = execution.get("result")
    score = result.get("score") if isinstance(result, dict) else result
    return {
        "success": execution["success"],
        "score": float(score) if isinstance(score, int | float) and execution["success"] else None,
        "stdout": execution.get("stdout"),
        "execution_time_ms": execution["execution_time_ms"],
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
    record = None if instance_id is None else instance_records.find(connection, instance_id)
    return None if record is None else instance_records.to_json(record, settings)


def _row(connection: sqlite3.Connection, session_id: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute(
        "SELECT * FROM sessions WHERE session_id = ?", (session_id,)
    ).fetchone()
    return row


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


class SessionRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        return [
            Route("/v1/jobs", self.jobs, methods=["GET"]),
            Route("/v1/jobs", self.create_job, methods=["POST"]),
            Route("/v1/jobs/{job_id}", self.job, methods=["GET"]),
            Route("/v1/sessions/job/{job_id}", self.job_sessions, methods=["GET"]),
            Route("/v1/sessions/{session_id}/transcript", self.transcript, methods=["GET"]),
            Route("/v1/sessions/ingest", self.ingest, methods=["POST"]),
            Route("/v1/traces/jobs", self.trace_job, methods=["POST"]),
            Route("/v1/traces/logs", self.log, methods=["POST"]),
        ]

    async def jobs(self, request: Request) -> Response:
        jobs = await self.plane.database.run(find_jobs)
        return json_response({"jobs": jobs, "total": len(jobs)})

    async def create_job(self, request: Request) -> Response:
        fields = await read_object(request)
        models = fields.items("models", min_count=1)
        if not all(isinstance(model, str) for model in models or []):
            raise HttpError(400, "'models' holds something else than strings. Send the names of models.")
        # The plane runs no model, so it does not store keys of model providers.
        body = {name: value for name, value in fields.values.items() if name != "byok_keys"}
        name = fields.label("name")
        return await self._once(request, lambda connection: put_job(connection, name, body))

    async def trace_job(self, request: Request) -> Response:
        name = (await read_object(request)).label("name")

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            job = put_job(connection, name, {"source": "trace"})
            return {"job_id": job["job_id"], "name": job["name"], "status": "running"}

        return await self._once(request, work)

    async def job(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        jobs = await self.plane.database.run(find_jobs, job_id)
        if not jobs:
            raise HttpError(404, f"Job '{printable(job_id)}' not found.")
        return json_response(jobs[0])

    async def job_sessions(self, request: Request) -> Response:
        job_id = request.path_params["job_id"]
        return json_response(await self.plane.database.run(job_sessions, job_id, self.plane.settings))

    async def transcript(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        return json_response(await self.plane.database.run(transcript, session_id, self.plane.settings))

    async def ingest(self, request: Request) -> Response:
        fields = await read_object(request)
        messages = fields.items("messages", min_count=1) or []
        for place, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise HttpError(400, f"'messages[{place}]' has no 'role'. Send objects with 'role' and 'content'.")
        return await self._ingest(request, fields, [normalize_message(one, "user") for one in messages])

    async def log(self, request: Request) -> Response:
        fields = await read_object(request)
        history = fields.items("history") or []
        messages = [normalize_message(message, "user") for message in history]
        response = fields.values.get("response")
        if response is not None:
            messages.append(normalize_message(response, "assistant"))
        if not messages and fields.text("session_id") is None:
            raise HttpError(
                400, "'history' and 'response' are missing. Send messages, or the 'session_id' to change."
            )
        return await self._ingest(request, fields, messages)

    async def _ingest(self, request: Request, fields: RequestFields, messages: list[dict[str, Any]]) -> Response:
        return await self._once(request, lambda connection: ingest(connection, fields, messages))

    async def _once(self, request: Request, work: Callable[[sqlite3.Connection], dict[str, Any]]) -> Response:
        request_id = read_request_id(request)
        key = None if request_id is None else f"{request.url.path} {request_id}"

        def respond(connection: sqlite3.Connection) -> str:
            return run_once(connection, key, lambda: orjson.dumps(work(connection)).decode())

        return raw_json_response(await self.plane.database.run(respond))
