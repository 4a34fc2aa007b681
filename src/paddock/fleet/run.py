"""Rollouts of fleet tasks: an instance of the task's environment, the tool-calling loop, the task's verifier.

What is kept is what every rollout keeps, in the same store. A task that broke outside the policy is tried again; an
instance is ended whatever happens, and all of them carry the batch's id as their run id.
"""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.errors import TaskError
from paddock.fleet import leases
from paddock.fleet.events import MakeWaiting
from paddock.fleet.scene import FleetScene
from paddock.fleet.task import read_document
from paddock.rollouts.batch import RETRIES, BatchResult, new_batch_id
from paddock.rollouts.limits import Budget, Timeouts
from paddock.rollouts.loop.agent import SYSTEM, LoopAgent, LoopLimits
from paddock.rollouts.loop.batch import LoopBatch
from paddock.rollouts.loop.plan import LoopPlan
from paddock.rollouts.runs import opened
from paddock.rollouts.task import Task
from paddock.rollouts.unhurried import unhurried
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from paddock.fleet.settings import PlaneAddress
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.rollout import Rollout
    from paddock.rollouts.store import Store

logger = logging.getLogger(__name__)

SPARE_SECONDS = 60
OTHER_NAMES = {"key": "task_key", "env_id": "env_key", "environment_id": "env_key", "version": "env_version"}
"""What exports of Fleet call the fields of a task."""
FORM = 'a list of tasks, or {"tasks": […]}, each with task_key, prompt, env_key and verifier_code'
LIMITS = Timeouts(install=900.0, setup=120.0, agent=900.0, verifier=300.0)


def read_tasks(path: str | Path) -> list[dict[str, Any]]:
    """The tasks in a JSON or JSONL file, under the names that `FleetTaskEnv` knows. Raises TaskError."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}", hint=f"give a file with {FORM}") from None
    try:
        document = read_document(text)
    except ValueError as error:
        raise TaskError(f"{path} is not JSON: {error}", hint=f"give a file with {FORM}") from None
    listed = document.get("tasks", [document]) if isinstance(document, dict) else document
    if not isinstance(listed, list) or not listed:
        raise TaskError(f"{path} holds no tasks", hint=f"write {FORM}")
    return [read_task(task, f"{path}: task {number}") for number, task in enumerate(listed)]


def read_task(given: Any, where: str = "task") -> dict[str, Any]:
    """One task under the usual names. Raises TaskError when something is missing."""
    if not isinstance(given, dict):
        raise TaskError(f"{where} is {type(given).__name__}, not an object", hint=f"write {FORM}")
    task = dict(given)
    for other, name in OTHER_NAMES.items():
        if other in task and not task.get(name):
            task[name] = task.pop(other)
    verifier = task.get("verifier")
    if not task.get("verifier_code") and not task.get("verifier_func") and isinstance(verifier, dict):
        task["verifier_code"] = verifier.get("code")
    for name in ("task_key", "prompt", "env_key"):
        if not isinstance(task.get(name), str) or not task[name].strip():
            raise TaskError(f"{where} has no {name}", hint=f"write {FORM}")
    return task


def as_task(config: Mapping[str, Any]) -> Task:
    """A fleet task as rollouts name it. Its hash covers all of it, so that a changed task is run again."""
    source = config.get("verifier_code") or config.get("verifier_func") or ""
    whole = json.dumps(dict(config), sort_keys=True, default=str)
    metadata = {
        "env_key": str(config["env_key"]).partition(":")[0],
        "env_version": config.get("env_version") or str(config["env_key"]).partition(":")[2] or None,
        "modality": config.get("task_modality") or "tool_use",
        "data_key": config.get("data_key"),
        "data_version": config.get("data_version"),
    }
    tests = {"verifier.py": source.encode(), "task.json": whole.encode()}
    return Task(str(config["prompt"]), id=str(config["task_key"]), tests=tests, timeouts=LIMITS, metadata=metadata)


async def run_tasks(
    tasks: Iterable[Mapping[str, Any]],
    *,
    plane: PlaneAddress,
    model: str | Endpoint,
    model_name: str | None = None,
    api_key: str | None = None,
    vllm_url: str | None = None,
    n: int = 1,
    parallel: int = 8,
    retries: int | None = None,
    batch_id: str | None = None,
    resume: str | None = None,
    store: Store | Path | str | None = None,
    budget: Budget | None = None,
    max_steps: int = 50,
    system: str | None = SYSTEM,
    ttl_seconds: int | None = None,
    partial_reward: bool = False,
    on_change: Callable[[Rollout], None] | None = None,
    on_settled: Callable[[RolloutRecord], None] | None = None,
    log: Callable[[str], None] | None = None,
    **settings: Any,
) -> BatchResult:
    """Run `n` rollouts of each task, `parallel` at a time, each to one recorded outcome.

    `model` is what `run_batch` takes; `api_key` is the model's. `settings` are the other fields of `Plan`: mode,
    timeouts, agent_timeout, thinking, temperature. `resume` goes on with a batch of the store, as in
    `run_batch`; `batch_id` names one.
    """
    configs = {str(config["task_key"]): dict(config) for config in tasks}
    chosen: Sequence[Task] = [as_task(config) for config in configs.values()]
    run_id = resume or batch_id or new_batch_id()

    def make_scene(task: Task) -> FleetScene:
        return FleetScene(
            configs[task.id],
            plane,
            max_steps=max_steps,
            run_id=run_id,
            ttl_seconds=ttl_seconds or enough(settings.get("timeouts") or LIMITS, settings.get("agent_timeout")),
            partial_reward=partial_reward,
        )

    keys = {"name": model_name, "api_key": api_key, "vllm_url": vllm_url, "hf_token": None}
    secrets = tuple(secret for secret in (api_key, plane.api_key) if secret)
    async with opened(model, keys, store, log, resume=resume) as parts:
        plan = LoopPlan(
            LoopAgent(LoopLimits(steps=max_steps), system=system),
            parts.endpoint,
            sandbox=FleetScene.kind,
            scene={"partial_reward": partial_reward},
            budget=budget or Budget(),
            secrets=secrets,
            **settings,
        )
        batch = LoopBatch(
            chosen,
            plan,
            make_scene,
            store=parts.store,
            upstream=parts.upstream,
            n=n,
            parallel=parallel,
            retries=RETRIES if retries is None else retries,
            batch_id=run_id,
            on_change=on_change,
            on_settled=on_settled,
        )
        unsubscribe = process_bus.subscribe(partial(_tell_of_waiting, log)) if log is not None else None
        try:
            return await batch.run()
        finally:
            if unsubscribe is not None:
                unsubscribe()
            await unhurried(sweep(run_id))


def _tell_of_waiting(log: Callable[[str], None], event: object) -> None:
    if isinstance(event, MakeWaiting) and not event.ahead:
        log(f"the plane runs as many instances as it may; the next rollout waits ({event.waited_s:.0f} s so far)")


async def sweep(run_id: str) -> None:
    """End what this process may have left of a run. What the plane does not confirm in time stays on disk."""
    await leases.close_all(run_id, seconds=leases.grace_left(leases.current().outstanding(run_id)))


def enough(limits: Timeouts, agent_timeout: float | None) -> int:
    """Seconds to live for an instance that is to last until its work is graded."""
    return math.ceil(limits.setup + (agent_timeout or limits.agent) + limits.verifier) + SPARE_SECONDS
