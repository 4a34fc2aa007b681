"""Tasks and their verifiers as the database keeps them.

A verifier is kept in versions: another code under the same key is the next version. Plain functions on
a connection; knows nothing of HTTP, and runs no verifier.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import TYPE_CHECKING, Any

import orjson

from paddock.fleet.control.answers import Refused, shown
from paddock.fleet.control.database import now_text

if TYPE_CHECKING:
    import sqlite3

    from paddock.fleet.control.answers import Fields

MOST_CODE = 1024 * 1024
MOST_PROMPT = 1024 * 1024
FILTERS = ("env_key", "project_key", "task_project_key", "data_id", "data_version")


def put_task(connection: sqlite3.Connection, given: Fields, project_key: str | None, team_id: str) -> dict[str, Any]:
    """Store a task, or store it anew under its key. Raises Refused."""
    key = given.needed_text("key")
    env_id = given.text("env_id") or given.text("environment_id") or given.text("env_key")
    if not env_id:
        raise Refused(400, "'env_id' is missing. Send the key of the environment that the task is for.")
    prompt = given.needed_text("prompt", MOST_PROMPT)
    code = given.text("verifier_func", MOST_CODE)
    before = _row(connection, key)
    verifier_id = None
    if code:
        verifier_id = put_verifier(connection, key, code)
    elif (named := given.text("verifier_id")) is not None:
        if find_verifier(connection, named) is None:
            raise Refused(400, f"'verifier_id' is unknown: '{shown(named)}'. Send 'verifier_func' with the code.")
        verifier_id = named
    body = {
        "prompt": prompt,
        "env_variables": given.mapping("env_variables"),
        "metadata": given.mapping("metadata"),
        "output_json_schema": given.mapping("output_json_schema"),
        "verifier_runtime_version": given.text("verifier_runtime_version"),
    }
    connection.execute(
        "INSERT OR REPLACE INTO tasks (key, env_id, version, data_id, data_version, project_key, task_project_key,"
        " verifier_id, created_at, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            key,
            env_id,
            given.text("version"),
            given.text("data_id"),
            given.text("data_version"),
            project_key,
            given.text("task_project_key"),
            verifier_id,
            before["created_at"] if before is not None else given.text("created_at") or now_text(),
            orjson.dumps(body).decode(),
        ),
    )
    return needed_task(connection, key, team_id)


def change_task(connection: sqlite3.Connection, key: str, given: Fields, team_id: str) -> dict[str, Any]:
    """Change the prompt, the verifier's code or the metadata of a task. Raises Refused."""
    row = _row(connection, key)
    if row is None:
        raise _unknown(key)
    body = orjson.loads(row["body"])
    body["prompt"] = given.text("prompt", MOST_PROMPT) or body["prompt"]
    metadata = given.mapping("metadata")
    body["metadata"] = body["metadata"] if metadata is None else metadata
    code = given.text("verifier_code", MOST_CODE)
    verifier_id = put_verifier(connection, key, code) if code else row["verifier_id"]
    connection.execute(
        "UPDATE tasks SET body = ?, verifier_id = ? WHERE key = ?", (orjson.dumps(body).decode(), verifier_id, key)
    )
    return needed_task(connection, key, team_id)


def needed_task(connection: sqlite3.Connection, key: str, team_id: str, version: str | None = None) -> dict[str, Any]:
    row = _row(connection, key)
    if row is None or (version is not None and row["version"] != version):
        raise _unknown(key)
    return _on_the_wire(connection, row, team_id)


def find_tasks(
    connection: sqlite3.Connection, filters: dict[str, str], keys: list[str], team_id: str
) -> list[dict[str, Any]]:
    """The tasks that match all filters, in the order they came. `keys` empty means any."""
    columns = {"env_key": "env_id"}
    conditions = [f"{columns.get(name, name)} = :{name}" for name in filters]
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = connection.execute(f"SELECT * FROM tasks {where} ORDER BY created_at, key", filters).fetchall()
    wanted = set(keys)
    return [_on_the_wire(connection, row, team_id) for row in rows if not wanted or row["key"] in wanted]


def put_verifier(connection: sqlite3.Connection, key: str, code: str, comment: str | None = None) -> str:
    """The id of the verifier with this key and code, stored if it is new."""
    digest = hashlib.sha256(code.encode()).hexdigest()
    same = connection.execute(
        "SELECT verifier_id FROM verifiers WHERE key = ? AND sha256 = ?", (key, digest)
    ).fetchone()
    if same is not None:
        return str(same["verifier_id"])
    last = connection.execute("SELECT max(version) FROM verifiers WHERE key = ?", (key,)).fetchone()[0] or 0
    verifier_id = str(uuid.uuid4())
    connection.execute(
        "INSERT INTO verifiers (verifier_id, key, version, sha256, code, created_at, comment)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (verifier_id, key, last + 1, digest, code, now_text(), comment),
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
    connection.execute("INSERT OR REPLACE INTO bundles (sha256, verifier_id) VALUES (?, ?)", (sha256, verifier_id))


def _row(connection: sqlite3.Connection, key: str) -> sqlite3.Row | None:
    found: sqlite3.Row | None = connection.execute("SELECT * FROM tasks WHERE key = ?", (key,)).fetchone()
    return found


def _on_the_wire(connection: sqlite3.Connection, row: sqlite3.Row, team_id: str) -> dict[str, Any]:
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


def _unknown(key: str) -> Refused:
    return Refused(404, f"Task '{shown(key)}' not found. GET /v1/tasks lists them.")
