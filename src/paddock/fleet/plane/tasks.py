"""Tasks and the code of their verifiers: the tables and the routes.

Verifiers have versions: other code with the same key is the next version. Runs no verifier.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from paddock.fleet.plane.database import insert_row, now_text
from paddock.fleet.plane.http import HttpError, json_response, printable, read_object

if TYPE_CHECKING:
    import sqlite3

    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.plane.http import RequestFields
    from paddock.fleet.plane.plane import Plane

MAX_CODE_CHARS = 1024 * 1024
MAX_PROMPT_CHARS = 1024 * 1024
FILTERS = ("env_key", "project_key", "task_project_key", "data_id", "data_version")


def put_task(
    connection: sqlite3.Connection, fields: RequestFields, project_key: str | None, team_id: str
) -> dict[str, Any]:
    """Store a task, or replace the one with its key. Raises HttpError."""
    key = fields.require_text("key")
    env_id = fields.text("env_id") or fields.text("environment_id") or fields.text("env_key")
    if not env_id:
        raise HttpError(400, "'env_id' is missing. Send the key of the environment that the task is for.")
    prompt = fields.require_text("prompt", MAX_PROMPT_CHARS)
    code = fields.text("verifier_func", MAX_CODE_CHARS)
    previous = _row(connection, key)
    verifier_id: str | None
    if code:
        verifier_id = put_verifier(connection, key, code)
    elif (verifier_id := fields.text("verifier_id")) is not None and find_verifier(connection, verifier_id) is None:
        raise HttpError(
            400, f"'verifier_id' is unknown: '{printable(verifier_id)}'. Send 'verifier_func' with the code."
        )
    body = {
        "prompt": prompt,
        "env_variables": fields.mapping("env_variables"),
        "metadata": fields.mapping("metadata"),
        "output_json_schema": fields.mapping("output_json_schema"),
        "verifier_runtime_version": fields.text("verifier_runtime_version"),
    }
    insert_row(
        connection,
        "tasks",
        replace=True,
        key=key,
        env_id=env_id,
        version=fields.text("version"),
        data_id=fields.text("data_id"),
        data_version=fields.text("data_version"),
        project_key=project_key,
        task_project_key=fields.text("task_project_key"),
        verifier_id=verifier_id,
        created_at=previous["created_at"] if previous is not None else fields.text("created_at") or now_text(),
        body=orjson.dumps(body).decode(),
    )
    return require_task(connection, key, team_id)


def change_task(connection: sqlite3.Connection, key: str, fields: RequestFields, team_id: str) -> dict[str, Any]:
    """Change the prompt, the verifier's code or the metadata of a task. Raises HttpError."""
    row = _row(connection, key)
    if row is None:
        raise _task_not_found(key)
    body = orjson.loads(row["body"])
    body["prompt"] = fields.text("prompt", MAX_PROMPT_CHARS) or body["prompt"]
    metadata = fields.mapping("metadata")
    body["metadata"] = body["metadata"] if metadata is None else metadata
    code = fields.text("verifier_code", MAX_CODE_CHARS)
    verifier_id = put_verifier(connection, key, code) if code else row["verifier_id"]
    connection.execute(
        "UPDATE tasks SET body = ?, verifier_id = ? WHERE key = ?", (orjson.dumps(body).decode(), verifier_id, key)
    )
    return require_task(connection, key, team_id)


def require_task(
    connection: sqlite3.Connection, key: str, team_id: str, version: str | None = None
) -> dict[str, Any]:
    row = _row(connection, key)
    if row is None or (version is not None and row["version"] != version):
        raise _task_not_found(key)
    return _to_json(connection, row, team_id)


def find_tasks(
    connection: sqlite3.Connection, filters: dict[str, str], keys: list[str], team_id: str
) -> list[dict[str, Any]]:
    """The tasks that match all filters, in the order they came. `keys` empty means any."""
    columns = {"env_key": "env_id"}
    conditions = [f"{columns.get(name, name)} = :{name}" for name in filters]
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = connection.execute(f"SELECT * FROM tasks {where} ORDER BY created_at, key", filters).fetchall()
    return [_to_json(connection, row, team_id) for row in rows if not keys or row["key"] in keys]


def put_verifier(connection: sqlite3.Connection, key: str, code: str, comment: str | None = None) -> str:
    """The id of the verifier with this key and code, stored if it is new."""
    digest = hashlib.sha256(code.encode()).hexdigest()
    existing = connection.execute(
        "SELECT verifier_id FROM verifiers WHERE key = ? AND sha256 = ?", (key, digest)
    ).fetchone()
    if existing is not None:
        return str(existing["verifier_id"])
    last = connection.execute("SELECT max(version) FROM verifiers WHERE key = ?", (key,)).fetchone()[0] or 0
    verifier_id = str(uuid.uuid4())
    insert_row(
        connection,
        "verifiers",
        verifier_id=verifier_id,
        key=key,
        version=last + 1,
        sha256=digest,
        code=code,
        created_at=now_text(),
        comment=comment,
    )
    return verifier_id


def find_verifier(connection: sqlite3.Connection, verifier_id: str) -> dict[str, Any] | None:
    row = connection.execute("SELECT * FROM verifiers WHERE verifier_id = ?", (verifier_id,)).fetchone()
    return None if row is None else dict(row)


def verifier_by_content(connection: sqlite3.Connection, sha256: str) -> dict[str, Any] | None:
    """The verifier that a bundle with this digest holds, or whose code itself has it."""
    row = connection.execute(
        "SELECT verifiers.* FROM verifiers JOIN bundles USING (verifier_id) WHERE bundles.sha256 = :sha"
        " UNION ALL SELECT * FROM verifiers WHERE sha256 = :sha LIMIT 1",
        {"sha": sha256},
    ).fetchone()
    return None if row is None else dict(row)


def put_bundle(connection: sqlite3.Connection, sha256: str, key: str, code: str, comment: str | None) -> None:
    verifier_id = put_verifier(connection, key, code, comment)
    insert_row(connection, "bundles", replace=True, sha256=sha256, verifier_id=verifier_id)


def _row(connection: sqlite3.Connection, key: str) -> sqlite3.Row | None:
    row: sqlite3.Row | None = connection.execute("SELECT * FROM tasks WHERE key = ?", (key,)).fetchone()
    return row


def _to_json(connection: sqlite3.Connection, row: sqlite3.Row, team_id: str) -> dict[str, Any]:
    verifier = None if row["verifier_id"] is None else find_verifier(connection, row["verifier_id"])
    return {
        "key": row["key"],
        "team_id": team_id,
        "environment_id": row["env_id"],
        "version": row["version"],
        "data_id": row["data_id"],
        "data_version": row["data_version"],
        "project_key": row["project_key"],
        "created_at": row["created_at"],
        "verifier_id": row["verifier_id"],
        "verifier_func": None if verifier is None else verifier["code"],
        "verifier": verifier,
        **orjson.loads(row["body"]),
    }


def _task_not_found(key: str) -> HttpError:
    return HttpError(404, f"Task '{printable(key)}' not found. GET /v1/tasks lists them.")


class TaskRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.team_id = plane.settings.team_id

    def routes(self) -> list[Route]:
        return [
            Route("/v1/tasks", self.list_all, methods=["GET"]),
            Route("/v1/tasks", self.put, methods=["POST"]),
            Route("/v1/tasks/{key:path}", self.get, methods=["GET"]),
            Route("/v1/tasks/{key:path}", self.change, methods=["PUT"]),
            Route("/v1/verifiers/{verifier_id}", self.verifier, methods=["GET"]),
        ]

    async def list_all(self, request: Request) -> Response:
        query = request.query_params
        filters = {name: query[name] for name in FILTERS if query.get(name)}
        keys = query.getlist("task_keys")
        tasks = []
        if query.get("team_id", self.team_id) == self.team_id:
            tasks = await self.plane.database.run(find_tasks, filters, keys, self.team_id)
        return json_response({"tasks": tasks, "total": len(tasks)})

    async def put(self, request: Request) -> Response:
        fields = await read_object(request)
        project_key = request.query_params.get("project_key") or fields.text("project_key")
        return json_response(await self.plane.database.run(put_task, fields, project_key, self.team_id))

    async def get(self, request: Request) -> Response:
        version = request.query_params.get("version_id")
        key = request.path_params["key"]
        return json_response(await self.plane.database.run(require_task, key, self.team_id, version))

    async def change(self, request: Request) -> Response:
        fields = await read_object(request)
        return json_response(
            await self.plane.database.run(change_task, request.path_params["key"], fields, self.team_id)
        )

    async def verifier(self, request: Request) -> Response:
        verifier_id = request.path_params["verifier_id"]
        verifier = await self.plane.database.run(find_verifier, verifier_id)
        if verifier is None:
            raise HttpError(404, f"Verifier '{printable(verifier_id)}' not found.")
        return json_response(verifier)
