"""How well models do at a task, measured by the control plane: it runs the rollouts, we wait and read the scores."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError
from paddock.fleet.errors import FleetError, FleetTimeout, ProtocolError
from paddock.fleet.plane import Plane
from paddock.fleet.retry import Budget
from paddock.fleet.settings import plane_address
from paddock.fleet.task import TaskView

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUEST_SECONDS = 60.0
ENDED = frozenset(("completed", "cancelled", "errored"))


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
        self._plane = Plane(plane_address(api_key, base_url))

    async def evaluate(self, task_config: dict[str, Any]) -> Evaluation:
        """Import the task, run a job on it and wait for its end.

        Raises FleetTimeout if the job has not ended within `max_wait_s`, PlaneError if the plane refuses.
        """
        budget = Budget(self.max_wait_s)
        view = TaskView(task_config)
        await self._plane.post("/v1/tasks", _imported(view), seconds=REQUEST_SECONDS)
        job_id = await self._create_job(view)
        status = await self._wait(job_id, budget)
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

    async def _wait(self, job_id: str, budget: Budget) -> str:
        status = "unknown"
        while budget.left > 0:
            try:
                document = await self._plane.get_json(f"/v1/jobs/{job_id}", seconds=min(REQUEST_SECONDS, budget.left))
            except FleetError as error:
                if not error.transient:
                    raise
            else:
                status = str(document.get("status")) if isinstance(document, dict) else "unknown"
                if status in ENDED:
                    return status
            await asyncio.sleep(min(self.poll_interval_s, max(budget.left, 0.0)))
        raise FleetTimeout(f"job {job_id} is {status} after {self.max_wait_s:g} s", hint="pass a longer max_wait_s")

    def _scores(self, document: Any) -> dict[str, list[float | None]]:
        groups = document.get("tasks") if isinstance(document, dict) else None
        if not isinstance(groups, list):
            raise ProtocolError("the control plane answered with something that is not a job's sessions")
        scores: dict[str, list[float | None]] = {model: [] for model in self.models}
        for session in (each for group in groups for each in group.get("sessions") or ()):
            scores.setdefault(self._named(str(session.get("model"))), []).append(_score(session))
        return scores

    def _named(self, model: str) -> str:
        """The name we asked for: a plane may put the provider in front of it, or leave that out."""
        return next((name for name in self.models if name.rpartition("/")[2] == model.rpartition("/")[2]), model)


async def evaluate_task(task_config: dict[str, Any], api_key: str | None = None, **options: Any) -> Evaluation:
    """One task, once. `options` are those of `TaskEvaluator`."""
    return await TaskEvaluator(api_key, **options).evaluate(task_config)


def _imported(view: TaskView) -> dict[str, Any]:
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
