"""Jobs at the control plane: traces, which keep conversations, and evaluations, which run models on a task.

A trace that cannot be sent is counted and reported, never raised. Fleet has two hosts for traces: jobs are created at
its platform, conversations are stored by its orchestrator. Each has a variable of its own; `FLEET_TRACE_BASE_URL`
sets both. A plane in `FLEET_BASE_URL` serves both.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.config import (
    FLEET_BASE_URL,
    FLEET_TRACE_BASE_URL,
    FLEET_TRACE_INGEST_BASE_URL,
    FLEET_TRACE_JOBS_BASE_URL,
    Variable,
)
from paddock.errors import ConfigError
from paddock.fleet.client.errors import FleetError, FleetTimeout, ProtocolError
from paddock.fleet.client.events import TraceFailed, ambient_context
from paddock.fleet.client.plane_client import PlaneClient
from paddock.fleet.client.settings import plane_address
from paddock.fleet.client.tasks import TaskView
from paddock.retry import Deadline
from paddock.telemetry.bus import bus

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

TRACE_SECONDS = 30.0
JOBS_BASE_URL = "https://api.internal.fleet-platform.fleetai.com"
JOBS_VARIABLES = (FLEET_TRACE_JOBS_BASE_URL, FLEET_TRACE_BASE_URL, FLEET_BASE_URL)
INGEST_VARIABLES = (FLEET_TRACE_INGEST_BASE_URL, FLEET_TRACE_BASE_URL, FLEET_BASE_URL)
failures: Counter[str] = Counter()
"""How often each kind of upload failed in this process."""


async def create_trace_job(api_key: str | None, name: str, *, base_url: str | None = None) -> str | None:
    """The id of a new trace job; None if it could not be created."""
    host = base_url or _first_set(JOBS_VARIABLES) or JOBS_BASE_URL
    document = await _send_trace("create_trace_job", api_key, host, "/v1/traces/jobs", {"name": name})
    job_id = document.get("job_id") if document is not None else None
    return job_id if isinstance(job_id, str) else None


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
    """The id of the session that stores the conversation; None if it could not be sent."""
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
    fields = {key: value for key, value in body.items() if value is not None}
    host = base_url or _first_set(INGEST_VARIABLES)
    document = await _send_trace("upload_trace", api_key, host, "/v1/sessions/ingest", fields)
    session_id = document.get("session_id") if document is not None else None
    return session_id if isinstance(session_id, str) else None


def _first_set(variables: tuple[Variable[str | None], ...]) -> str | None:
    return next((value for variable in variables if (value := variable.read())), None)


async def _send_trace(
    what: str, api_key: str | None, base_url: str | None, path: str, body: dict[str, Any]
) -> dict[str, Any] | None:
    try:
        plane = PlaneClient(plane_address(api_key, base_url))
        document = await plane.post(path, body, seconds=TRACE_SECONDS)
        if not isinstance(document, dict):
            raise ProtocolError(f"{path} answered with something that is not an object")
    except (FleetError, ConfigError) as error:
        failures[what] += 1
        logger.warning("%s failed (%d so far): %s", what, failures[what], error)
        bus.emit(TraceFailed.of(ambient_context(), error))
        return None
    return document


REQUEST_SECONDS = 60.0
ENDED_STATUSES = frozenset(("completed", "cancelled", "errored"))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one job. A session without a verifier's score counts as None, never as 0."""

    job_id: str
    status: str
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    """By model, one score for each session."""

    @property
    def means(self) -> dict[str, float | None]:
        """The mean of the known scores by model; None where no score is known."""
        numbers = {model: [each for each in scores if each is not None] for model, scores in self.scores.items()}
        return {model: sum(scores) / len(scores) if scores else None for model, scores in numbers.items()}


class TaskEvaluator:
    """Evaluates tasks with `k_rollouts` rollouts of each model."""

    def __init__(
        self,
        api_key: str | None = None,
        k_rollouts: int = 4,
        models: Sequence[str] = (),
        max_steps: int = 30,
        poll_interval_s: float = 10.0,
        max_wait_s: float = 1800.0,
        *,
        base_url: str | None = None,
    ) -> None:
        """Raises ConfigError (a ValueError) without a key or without models."""
        if not models or isinstance(models, str):
            raise ConfigError("no models to evaluate", hint="pass models=[…], the names that the plane knows them by")
        self.k_rollouts = k_rollouts
        self.models = tuple(models)
        self.max_steps = max_steps
        self.poll_interval_s = poll_interval_s
        self.max_wait_s = max_wait_s
        self._plane = PlaneClient(plane_address(api_key, base_url))

    async def evaluate(self, task_config: dict[str, Any]) -> Evaluation:
        """Import the task, run a job on it and wait for its end.

        Raises FleetTimeout if the job has not ended within `max_wait_s`, PlaneError if the plane refuses.
        """
        deadline = Deadline(self.max_wait_s)
        view = TaskView(task_config)
        await self._plane.post("/v1/tasks", _task_body(view), seconds=REQUEST_SECONDS)
        job_id = await self._create_job(view)
        status = await self._wait(job_id, deadline)
        sessions = await self._plane.get_json(f"/v1/sessions/job/{job_id}", seconds=REQUEST_SECONDS)
        return Evaluation(job_id, status, self._scores(sessions))

    async def _create_job(self, view: TaskView) -> str:
        body = {
            "name": f"evaluate {view.task_key}",
            "models": list(self.models),
            "pass_k": self.k_rollouts,
            "task_keys": [view.task_key],
            "max_steps": self.max_steps,
            "mode": view.modality.replace("_", "-"),
        }
        document = await self._plane.post("/v1/jobs", body, seconds=REQUEST_SECONDS)
        job_id = document.get("job_id") if isinstance(document, dict) else None
        if not isinstance(job_id, str):
            raise ProtocolError("the control plane made a job without an id")
        return job_id

    async def _wait(self, job_id: str, deadline: Deadline) -> str:
        status = "unknown"
        while deadline.seconds_left > 0:
            try:
                document = await self._plane.get_json(
                    f"/v1/jobs/{job_id}", seconds=min(REQUEST_SECONDS, deadline.seconds_left)
                )
            except FleetError as error:
                if not error.transient:
                    raise
            else:
                status = str(document.get("status")) if isinstance(document, dict) else "unknown"
                if status in ENDED_STATUSES:
                    return status
            await asyncio.sleep(min(self.poll_interval_s, max(deadline.seconds_left, 0.0)))
        raise FleetTimeout(f"job {job_id} is {status} after {self.max_wait_s:g} s", hint="pass a longer max_wait_s")

    def _scores(self, document: Any) -> dict[str, list[float | None]]:
        groups = document.get("tasks") if isinstance(document, dict) else None
        if not isinstance(groups, list):
            raise ProtocolError("the control plane answered with something that is not a job's sessions")
        scores: dict[str, list[float | None]] = {model: [] for model in self.models}
        for session in (each for group in groups for each in group.get("sessions") or ()):
            scores.setdefault(self._requested_name(str(session.get("model"))), []).append(_score(session))
        return scores

    def _requested_name(self, model: str) -> str:
        """The name in `models`: a plane may add the provider in front of it, or omit it."""
        return next((name for name in self.models if name.rpartition("/")[2] == model.rpartition("/")[2]), model)


async def evaluate_task(task_config: dict[str, Any], api_key: str | None = None, **options: Any) -> Evaluation:
    """One task, once. `options` are those of `TaskEvaluator`."""
    return await TaskEvaluator(api_key, **options).evaluate(task_config)


def _task_body(view: TaskView) -> dict[str, Any]:
    task = view.task
    body = {
        "key": view.task_key,
        "prompt": view.prompt,
        "env_id": view.env_key,
        "version": view.env_version,
        "data_id": task.get("data_key") or task.get("data_id"),
        "data_version": task.get("data_version"),
        "env_variables": task.get("env_variables"),
        "verifier_func": task.get("verifier_code") or task.get("verifier_func"),
        "metadata": task.get("metadata"),
    }
    return {name: value for name, value in body.items() if value is not None}


def _score(session: dict[str, Any]) -> float | None:
    execution = session.get("verifier_execution")
    if not isinstance(execution, dict) or not execution.get("success"):
        return None
    score = execution.get("score", execution.get("result"))
    return float(score) if isinstance(score, int | float) else None
