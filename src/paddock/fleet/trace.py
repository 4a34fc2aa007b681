"""Conversations as traces at the control plane. One that cannot be sent is counted and announced, never raised.

Fleet keeps the two halves on two hosts: jobs are made at its platform, conversations are taken by its orchestrator.
Each half has a variable of its own; `FLEET_TRACE_BASE_URL` moves both. A plane named by `FLEET_BASE_URL` serves both.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

from paddock.errors import ConfigError
from paddock.fleet.errors import FleetError, ProtocolError
from paddock.fleet.events import TraceFailed, ambient_context
from paddock.fleet.plane import Plane
from paddock.fleet.settings import plane_address
from paddock.telemetry.bus import bus

logger = logging.getLogger(__name__)

SECONDS = 30.0
JOBS_BASE_URL = "https://api.internal.fleet-platform.fleetai.com"
JOBS_VARIABLES = ("FLEET_TRACE_JOBS_BASE_URL", "FLEET_TRACE_BASE_URL", "FLEET_BASE_URL")
INGEST_VARIABLES = ("FLEET_TRACE_INGEST_BASE_URL", "FLEET_TRACE_BASE_URL", "FLEET_BASE_URL")
failures: Counter[str] = Counter()
"""How often each kind of upload failed in this process."""


async def create_trace_job(api_key: str | None, name: str, *, base_url: str | None = None) -> str | None:
    """The id of a new trace job; None if it could not be made."""
    host = base_url or _first_set(JOBS_VARIABLES) or JOBS_BASE_URL
    document = await _sent("create_trace_job", api_key, host, "/v1/traces/jobs", {"name": name})
    found = document.get("job_id") if document is not None else None
    return found if isinstance(found, str) else None


async def upload_trace(
    api_key: str | None,
    job_id: str,
    task_key: str,
    model: str,
    chat_history: list[dict[str, Any]],
    reward: float | None = None,
    instance_id: str | None = None,
    metadata: dict[str, Any] | None = None,
    verifier_execution_id: str | None = None,
    *,
    base_url: str | None = None,
) -> str | None:
    """The id of the session that the conversation became; None if it could not be sent."""
    body: dict[str, Any] = {
        "messages": chat_history,
        "job_id": job_id,
        "task_key": task_key,
        "model": model,
        "instance_id": instance_id,
        "status": "completed",
        "metadata": {**(metadata or {}), **({} if reward is None else {"score": reward})},
        "verifier_execution_id": verifier_execution_id,
    }
    known = {key: value for key, value in body.items() if value is not None}
    host = base_url or _first_set(INGEST_VARIABLES)
    document = await _sent("upload_trace", api_key, host, "/v1/sessions/ingest", known)
    found = document.get("session_id") if document is not None else None
    return found if isinstance(found, str) else None


def _first_set(variables: tuple[str, ...]) -> str | None:
    return next((value for name in variables if (value := os.environ.get(name))), None)


async def _sent(
    what: str, api_key: str | None, base_url: str | None, path: str, body: dict[str, Any]
) -> dict[str, Any] | None:
    try:
        plane = Plane(plane_address(api_key, base_url))
        document = await plane.post(path, body, seconds=SECONDS)
        if not isinstance(document, dict):
            raise ProtocolError(f"{path} answered with something that is not an object")
    except (FleetError, ConfigError) as error:
        failures[what] += 1
        logger.warning("%s failed (%d so far): %s", what, failures[what], error)
        bus.emit(TraceFailed(context=ambient_context(), error_type=type(error).__name__, error_message=str(error)))
        return None
    return document
