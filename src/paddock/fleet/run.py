"""Rollouts of fleet tasks: an instance of the task's environment, the tool-calling loop, the task's verifier.

Rollouts are stored like all others, in the same store. A rollout that failed for a reason outside the policy is run
again. Every instance is ended, and has the id of the batch as its run id.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, TaskError
from paddock.fleet.client import leases
from paddock.fleet.client.errors import FleetError, InstanceGone
from paddock.fleet.client.events import MakeWaiting
from paddock.fleet.client.task_env import FleetTaskEnv
from paddock.fleet.client.tasks import SUBMIT_TOOL_NAME, read_document
from paddock.limits import RolloutTimeouts
from paddock.rollouts.batch import Batch, BatchResult, new_batch_id
from paddock.rollouts.config import RunConfig, make_config
from paddock.rollouts.context import make_agent, open_run, open_store
from paddock.rollouts.fork import plan_fork, restore_config
from paddock.rollouts.loop.agent import LoopAgent, LoopLimits
from paddock.rollouts.loop.session import Part, ToolResult, ToolSessions, is_part
from paddock.shielded import run_shielded
from paddock.store.outcome import Reward
from paddock.tasks.task import Task
from paddock.telemetry.bus import bus as process_bus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from paddock.capture.recorded.replay import Edit, FidelityPolicy
    from paddock.fleet.client.settings import PlaneAddress
    from paddock.rollouts.rollout import Rollout
    from paddock.store.record import RolloutRecord

logger = logging.getLogger(__name__)

FLEET = "fleet"
"""The kind of its sessions, which records have in their field `sandbox`."""
TASK_FILE = "task.json"
SPARE_SECONDS = 60
OTHER_NAMES = {"key": "task_key", "env_id": "env_key", "environment_id": "env_key", "version": "env_version"}
"""Other names of a task's fields in exports of Fleet."""
FORM = 'a list of tasks, or {"tasks": […]}, each with task_key, prompt, env_key and verifier_code'
LIMITS = RolloutTimeouts(install=900.0, setup=120.0, agent=900.0, verifier=300.0)
DEFAULTS = {"agent": LoopAgent.name, "parallel": 8}
EXPIRED = "instance_expired"
PLANE_BROKE = ("verifier_exception", "no_fleet_env")
"""The verifier was not run: its error says nothing about the work."""


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


def read_task(document: Any, where: str = "task") -> dict[str, Any]:
    """One task under the usual names. Raises TaskError when something is missing."""
    if not isinstance(document, dict):
        raise TaskError(f"{where} is {type(document).__name__}, not an object", hint=f"write {FORM}")
    task = dict(document)
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


def as_task(document: Mapping[str, Any]) -> Task:
    """A fleet task as rollouts name it. Its hash covers all of it, so that a changed task is run again."""
    source = document.get("verifier_code") or document.get("verifier_func") or ""
    whole = json.dumps(dict(document), sort_keys=True, default=str)
    metadata = {
        "env_key": str(document["env_key"]).partition(":")[0],
        "env_version": document.get("env_version") or str(document["env_key"]).partition(":")[2] or None,
        "modality": document.get("task_modality") or "tool_use",
        "data_key": document.get("data_key"),
        "data_version": document.get("data_version"),
    }
    tests = {"verifier.py": source.encode(), TASK_FILE: whole.encode()}
    return Task(
        str(document["prompt"]), id=str(document["task_key"]), tests=tests, timeouts=LIMITS, metadata=metadata
    )


async def fork_task(
    record: RolloutRecord | str,
    *,
    at: int | str,
    plane: PlaneAddress,
    n: int = 1,
    policy: FidelityPolicy = "tolerant",
    edit: Edit | Mapping[str, Any] | None = None,
    on_change: Callable[[Rollout], None] | None = None,
    on_settled: Callable[[RolloutRecord], None] | None = None,
    log: Callable[[str], None] | None = None,
    **fields: Any,
) -> BatchResult:
    """Run `n` forks of a recorded rollout of a fleet task, each on a new instance of the recorded version.

    Takes what `paddock.rollouts.fork` does, and raises what it does.
    """
    rollout_id = record if isinstance(record, str) else record.rollout_id
    async with open_store(fields.get("store")) as store:
        plan = await store.run(plan_fork, store, rollout_id, at, policy, edit, None)
        if plan.source.sandbox != FLEET or TASK_FILE not in plan.task.tests:
            raise ConfigError(f"rollout {rollout_id} is not of a fleet task", hint="use paddock.rollouts.fork")
        config = restore_config(plan.source, {**fields, "n": n, "fork": plan.point, "store": store})
        return await run_tasks(
            [json.loads(plan.task.tests[TASK_FILE])],
            config,
            plane=plane,
            partial_reward=bool(plan.source.config.get("partial_reward")),
            version=plan.source.metadata.get("env_version"),
            on_change=on_change,
            on_settled=on_settled,
            log=log,
        )


async def run_tasks(
    tasks: Iterable[Mapping[str, Any]],
    config: RunConfig | None = None,
    *,
    plane: PlaneAddress,
    ttl_seconds: int | None = None,
    partial_reward: bool = False,
    version: str | None = None,
    on_change: Callable[[Rollout], None] | None = None,
    on_settled: Callable[[RolloutRecord], None] | None = None,
    log: Callable[[str], None] | None = None,
    **fields: Any,
) -> BatchResult:
    """Run `config.n` rollouts of each task, `config.parallel` at a time, each to one recorded outcome.

    The agent is `loop`. Takes the fields of `RunConfig` as keywords too; then `parallel` is 8 by default. An instance
    lives for `ttl_seconds`, by default long enough for the work and its grade. With `partial_reward` a failed task
    gets the share of its checks that passed. `version` is that of all environments, in place of the tasks'. Raises
    what `run_batch` does.
    """
    config = make_config(config, fields if config is not None else {**DEFAULTS, **fields})
    config = replace(config, batch_id=config.batch_id or (None if config.resume else new_batch_id()))
    run_id = config.resume or config.batch_id
    assert run_id is not None
    documents = {str(document["task_key"]): dict(document) for document in tasks}
    max_steps = loop_limits(config).steps

    def make_session(task: Task) -> FleetSession:
        document = documents[task.id]
        return FleetSession(
            document if version is None else pin_version(document, version),
            plane,
            max_steps=max_steps,
            run_id=run_id,
            ttl_seconds=ttl_seconds or needed_seconds(config.timeouts or LIMITS, config.agent_timeout),
            partial_reward=partial_reward,
        )

    sessions = ToolSessions(make_session, FLEET, {"partial_reward": partial_reward})
    secrets = (plane.api_key,) if plane.api_key else ()
    async with open_run(config, sessions=sessions, secrets=secrets, log=log) as context:
        chosen = [as_task(document) for document in documents.values()]
        batch = Batch(chosen, context, on_change=on_change, on_settled=on_settled)
        unsubscribe = process_bus.subscribe(partial(_log_waiting, log)) if log is not None else None
        try:
            return await batch.run()
        finally:
            if unsubscribe is not None:
                unsubscribe()
            await run_shielded(sweep(run_id))


def pin_version(document: dict[str, Any], version: str) -> dict[str, Any]:
    return {**document, "env_key": str(document["env_key"]).partition(":")[0], "env_version": version}


def loop_limits(config: RunConfig) -> LoopLimits:
    """How much the loop may do. Raises ConfigError for another agent: fleet tasks are done with tools."""
    agent = make_agent(config)
    if not isinstance(agent, LoopAgent):
        raise ConfigError(f"the agent {agent.name} cannot do fleet tasks", hint="use agent='loop'")
    return agent.limits


def _log_waiting(log: Callable[[str], None], event: object) -> None:
    if isinstance(event, MakeWaiting) and not event.ahead:
        log(f"the plane runs as many instances as it may; the next rollout waits ({event.waited_s:.0f} s so far)")


async def sweep(run_id: str) -> None:
    """End what this process may have left of a run. What the plane does not confirm in time stays on disk."""
    await leases.close_all(run_id, seconds=leases.grace_seconds_left(leases.current().outstanding(run_id)))


def needed_seconds(limits: RolloutTimeouts, agent_timeout: float | None) -> int:
    """Seconds to live for an instance that is to last until its work is graded."""
    return math.ceil(limits.setup + (agent_timeout or limits.agent) + limits.verifier) + SPARE_SECONDS


class FleetSession:
    """A fleet task as a session of the tool-calling loop. Made for one rollout. It is its own `Tools`."""

    is_repeatable = True
    """A new instance begins with the same data."""

    def __init__(self, task: dict[str, Any], plane: PlaneAddress, *, max_steps: int = 50, **options: Any) -> None:
        """`options` are those of `FleetTaskEnv`."""
        # One step more than the loop may take: `score` needs it to end the episode.
        self._env = FleetTaskEnv(task, plane.api_key, base_url=plane.base_url, max_steps=max_steps + 1, **options)
        self._first: dict[str, Any] = {}
        self._last_action: dict[str, Any] = {"done": True}
        self._graded = False
        self._evidence: dict[str, Any] = {}
        self.is_scored = bool(task.get("verifier_code") or task.get("verifier_func"))
        self.verifier_log = ""

    # -- a session -------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._env.provision_async()
        self._evidence = {
            "instance_id": self._env.instance_id,
            "provisioning_time_s": round(self._env.provisioning_time_s or 0.0, 4),
        }
        if (instance := self._env.instance) is not None:
            self._evidence["env_version"] = instance.version

    async def tools(self) -> FleetSession:
        self._first = await self._env.reset_async()
        if self._env.reset_error is not None:
            self._evidence["reset_error"] = self._env.reset_error
        return self

    async def score(self, messages: list[dict[str, Any]]) -> Reward:
        """Raises InstanceGone if the instance has ended, FleetError if the plane cannot run the verifier."""
        self._env.conversation_messages = messages
        _, reward, _, info = await self._env.step_async(self._last_action)
        self._graded = True
        self.verifier_log = info.get("verifier_stdout") or ""
        reason, error = info.get("failure_reason"), info.get("verifier_error")
        if reason == EXPIRED:
            raise InstanceGone(error or "the instance ended before its work was graded")
        if reason in PLANE_BROKE:
            raise FleetError(f"the plane could not grade the work: {error or reason}")
        if reason is not None:
            self._evidence["failure_reason"] = reason
        if reward is None:
            return Reward.unknown(f"{reason or 'unknown'}: {error}" if error else reason or "no grade")
        return Reward(reward)

    async def close(self) -> None:
        # An episode that failed or was cancelled is ended without grading.
        await self._env.__aexit__(None if self._graded else asyncio.CancelledError)

    @property
    def evidence(self) -> dict[str, Any]:
        return dict(self._evidence)

    # -- its tools ------------------------------------------------------------------------------------

    @property
    def prompt(self) -> str | list[Part]:
        parts = [part for part in self._first.get("initial_screenshot") or () if is_part(part)]
        return [{"type": "text", "text": self._env.prompt}, *parts] if parts else self._env.prompt

    async def list_tools(self) -> list[dict[str, Any]]:
        return list(self._first.get("tools") or ())

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Raises InstanceGone."""
        if name == SUBMIT_TOOL_NAME:
            self._last_action = {"tool": name, "params": arguments, "done": True}
            return ToolResult.of_text("Answer recorded.", done=True)
        observation, _, done, info = await self._env.step_async({"tool": name, "params": arguments})
        if info.get("failure_reason") == EXPIRED:
            raise InstanceGone(info.get("tool_error") or "the instance ended during the episode")
        return ToolResult.of_value(observation["observation"], is_error="tool_error" in info, done=done)
