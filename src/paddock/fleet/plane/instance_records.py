"""The table of instances: one row each, kept after the instance has ended.

Functions on a connection; every change of status is here. Knows nothing of processes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import orjson

from paddock.errors import PaddockError
from paddock.fleet.plane.database import format_time, insert_row, now_text

if TYPE_CHECKING:
    import sqlite3

    from paddock.fleet.plane.settings import PlaneSettings

ALIVE = ("pending", "running")
STATUSES = (*ALIVE, "stopped", "error")
_ALIVE = "status IN ('pending', 'running')"


class LimitReached(PaddockError):
    """The plane runs as many instances as its limit allows. `data` has both numbers."""

    code = "INSTANCE_LIMIT"


class DuplicateRequest(PaddockError):
    """A request with this id has created an instance already: `data["instance_id"]`."""

    code = "DUPLICATE_REQUEST"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRequest:
    """A validated request to create an instance."""

    instance_id: str
    env_key: str
    version: str
    region: str
    ttl_seconds: int
    max_wait_seconds: float
    request_id: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    env_variables: dict[str, Any] | None = None
    image_type: str | None = None
    run_id: str | None = None
    heartbeat_interval: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRecord:
    instance_id: str
    request_id: str | None
    env_key: str
    version: str
    status: str
    reason: str | None
    port: int | None
    pid: int | None
    started_ticks: int | None
    region: str
    env_variables: str | None
    data_key: str | None
    data_version: str | None
    image_type: str | None
    run_id: str | None
    created_at: str
    updated_at: str
    running_at: str | None
    terminated_at: str | None
    expires_at: float
    heartbeat_interval: int | None
    heartbeat_region: str | None
    last_heartbeat: float | None
    stop_request_id: str | None
    address: str | None
    """The machine it runs on; None for the plane's own."""

    @property
    def is_alive(self) -> bool:
        return self.status in ALIVE


_COLUMNS = ", ".join(field.name for field in fields(InstanceRecord))
_COMPUTED = {"ttl_seconds", "max_wait_seconds", "env_variables"}
_REQUEST_COLUMNS = [field.name for field in fields(InstanceRequest) if field.name not in _COMPUTED]
"""The fields of a request that are columns as they are."""


def insert(connection: sqlite3.Connection, request: InstanceRequest, limit: int) -> InstanceRecord:
    """A new pending instance. Raises DuplicateRequest before anything else, then LimitReached."""
    if request.request_id is not None:
        row = connection.execute(
            "SELECT instance_id FROM instances WHERE request_id = ?", (request.request_id,)
        ).fetchone()
        if row is not None:
            raise DuplicateRequest("this request has made an instance already", instance_id=row["instance_id"])
    alive = count_alive(connection)
    if alive >= limit:
        raise LimitReached(f"{alive} of {limit} instances live", running_instances=alive, instance_limit=limit)
    now = time.time()
    insert_row(
        connection,
        "instances",
        status="pending",
        **{name: getattr(request, name) for name in _REQUEST_COLUMNS},
        env_variables=None if request.env_variables is None else orjson.dumps(request.env_variables).decode(),
        created_at=format_time(now),
        updated_at=format_time(now),
        expires_at=now + request.ttl_seconds,
    )
    return require(connection, request.instance_id)


def find(connection: sqlite3.Connection, instance_id: str) -> InstanceRecord | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM instances WHERE instance_id = ?", (instance_id,)).fetchone()
    return None if row is None else InstanceRecord(**dict(row))


def require(connection: sqlite3.Connection, instance_id: str) -> InstanceRecord:
    record = find(connection, instance_id)
    if record is None:
        raise LookupError(instance_id)
    return record


def select(
    connection: sqlite3.Connection,
    *,
    status: str | None = None,
    region: str | None = None,
    run_id: str | None = None,
    alive: bool = False,
) -> list[InstanceRecord]:
    """The instances that match, the newest first."""
    values = {"status": status, "region": region, "run_id": run_id}
    filters = {name: value for name, value in values.items() if value is not None}
    conditions = [f"{name} = :{name}" for name in filters] + ([_ALIVE] if alive else [])
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM instances {where} ORDER BY rowid DESC", filters)
    return [InstanceRecord(**dict(row)) for row in rows]


def count_alive(connection: sqlite3.Connection) -> int:
    return int(connection.execute(f"SELECT count(*) FROM instances WHERE {_ALIVE}").fetchone()[0])


def mark_process(
    connection: sqlite3.Connection, instance_id: str, pid: int | None, started_ticks: int | None
) -> None:
    """Store the process of the instance, if it is one of this machine."""
    connection.execute(
        "UPDATE instances SET pid = ?, started_ticks = ? WHERE instance_id = ?", (pid, started_ticks, instance_id)
    )


def mark_running(
    connection: sqlite3.Connection, instance_id: str, port: int, address: str | None = None
) -> InstanceRecord | None:
    """Mark the instance as running; None if it was ended meanwhile."""
    now = time.time()
    changed = connection.execute(
        "UPDATE instances SET status = 'running', port = ?, address = ?, running_at = ?, updated_at = ?,"
        " last_heartbeat = CASE WHEN heartbeat_interval IS NULL THEN NULL ELSE ? END"
        " WHERE instance_id = ? AND status = 'pending'",
        (port, address, format_time(now), format_time(now), now, instance_id),
    ).rowcount
    return require(connection, instance_id) if changed else None


def mark_ended(
    connection: sqlite3.Connection, instance_id: str, status: str, reason: str, stop_request_id: str | None = None
) -> bool:
    """Mark the instance as ended. Whether this call did: an instance ends once."""
    now = now_text()
    return bool(
        connection.execute(
            "UPDATE instances SET status = ?, reason = ?, port = NULL, terminated_at = ?, updated_at = ?,"
            f" stop_request_id = ? WHERE instance_id = ? AND {_ALIVE}",
            (status, reason, now, now, stop_request_id, instance_id),
        ).rowcount
    )


def mark_heartbeat(connection: sqlite3.Connection, instance_id: str, region: str | None) -> InstanceRecord | None:
    """Store a heartbeat; the instance, or None if it does not run."""
    now = time.time()
    changed = connection.execute(
        "UPDATE instances SET last_heartbeat = CASE WHEN heartbeat_interval IS NULL THEN NULL ELSE ? END,"
        " heartbeat_region = coalesce(?, heartbeat_region), updated_at = ?"
        " WHERE instance_id = ? AND status = 'running'",
        (now, region, format_time(now), instance_id),
    ).rowcount
    return require(connection, instance_id) if changed else None


def end_orphans(connection: sqlite3.Connection, reason: str) -> list[InstanceRecord]:
    """Mark the instances of an earlier plane as ended, and return them."""
    orphans = select(connection, alive=True)
    for instance in orphans:
        mark_ended(connection, instance.instance_id, "stopped", reason)
    return orphans


def count_runs(connection: sqlite3.Connection, active: str, profile_id: str) -> list[dict[str, Any]]:
    """Runs with their instances, the latest first. `active` is 'active', 'inactive' or 'all'."""
    having = {"active": "HAVING running_count > 0", "inactive": "HAVING running_count = 0", "all": ""}[active]
    rows = connection.execute(
        f"SELECT run_id, sum({_ALIVE}) AS running_count, count(*) AS total_count,"
        " min(created_at) AS first_created_at, max(created_at) AS last_created_at"
        f" FROM instances WHERE run_id IS NOT NULL GROUP BY run_id {having} ORDER BY last_created_at DESC, run_id"
    )
    return [{**dict(row), "profile_id": profile_id} for row in rows]


def count_statuses(connection: sqlite3.Connection) -> dict[str, int]:
    rows = connection.execute("SELECT status, count(*) AS number FROM instances GROUP BY status")
    counts = {row["status"]: row["number"] for row in rows}
    return {status: counts.get(status, 0) for status in STATUSES}


def to_json(instance: InstanceRecord, settings: PlaneSettings) -> dict[str, Any]:
    """An instance as clients read it. Only a running one has addresses: ports are reused."""
    return {
        "instance_id": instance.instance_id,
        # A client that lost the response to its create finds its instance by this id.
        "request_id": instance.request_id,
        "env_key": instance.env_key,
        "version": instance.version,
        "status": instance.status,
        "reason": instance.reason,
        "subdomain": instance.instance_id,
        "created_at": instance.created_at,
        "updated_at": instance.updated_at,
        "terminated_at": instance.terminated_at,
        "expires_at": format_time(instance.expires_at),
        "team_id": settings.team_id,
        "region": instance.region,
        "env_variables": None if instance.env_variables is None else orjson.loads(instance.env_variables),
        "data_key": instance.data_key,
        "data_version": instance.data_version,
        "image_type": instance.image_type,
        "urls": None if instance.port is None else _urls(instance, settings),
        "health": instance.status == "running",
        "run_id": instance.run_id,
        "profile_id": settings.profile_id,
        "heartbeat_interval": instance.heartbeat_interval,
        "heartbeat_region": instance.heartbeat_region,
    }


def _urls(instance: InstanceRecord, settings: PlaneSettings) -> dict[str, Any]:
    root = f"http://{instance.address or settings.instance_host}:{instance.port}/"
    # The manager's address contains the app: the SDK replaces that part to switch apps.
    manager = f"{root}{instance.env_key}/api/v1/env"
    return {
        "root": root,
        "app": [root],
        "api": f"{root}raw",
        "health": f"{manager}/health",
        "api_docs": f"{root}docs",
        "manager": {
            "api": manager,
            "docs": f"{manager}/docs",
            "reset": f"{manager}/reset",
            "diff": f"{manager}/diff",
            "snapshot": f"{manager}/snapshot",
            "execute_verifier_function": f"{manager}/execute_verifier_function",
            "execute_verifier_function_with_upload": f"{manager}/execute_verifier_function_with_upload",
        },
    }
