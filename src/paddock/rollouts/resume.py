"""Resuming a batch: whether it exists, whether the run is still the same, and which members are done.

Results of one batch come from one agent, one model, one way of sampling and one version of each task. So a batch is
resumed only with the settings of its earlier rollouts. The endpoint's URL, its key, budgets and deadlines may change:
they do not change the policy.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError
from paddock.store.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paddock.rollouts.config import RunConfig
    from paddock.rollouts.fork import ForkPoint
    from paddock.store import Store
    from paddock.store.record import RolloutRecord
    from paddock.tasks.task import Task

MAY_CHANGE = frozenset(
    (
        "model",
        "sandbox",
        "budget",
        "agent_timeout",
        "stall_timeout",
        "top_logprobs",
        "tokenizer",
        "weight_version",
        "steps",
        "output_chars",
    )
)
"""Settings that may differ when a batch is resumed: the endpoint's URL, budgets, deadlines, what is kept."""
HINT = "give what the batch was run with, or leave the batch out to begin a new one"
LISTED_BATCHES = 5
LISTED_TASKS = 5


def check_batch_exists(store: Store, batch_id: str) -> None:
    """Raises ConfigError for a batch of which the store holds no rollout."""
    if store.count(batch_id=batch_id):
        return
    recent = store.recent_batches(LISTED_BATCHES)
    hint = f"the latest are {', '.join(recent)}" if recent else "the store holds no batch yet"
    raise ConfigError(f"there is no batch {batch_id!r} in {store.path}", hint=hint)


def check_unchanged(batch_id: str, records: Iterable[RolloutRecord], tasks: Sequence[Task], settings: Any) -> None:
    """Raises ConfigError that names what differs from a batch's rollouts. `settings`: see `RunContext.describe`."""
    current = json.loads(json.dumps(settings, default=str))
    hashes = {task.id: task.hash for task in tasks}
    for record in records:
        changes = differences(record.config, current)
        if hashes.get(record.task_id, record.task_hash) != record.task_hash:
            changes.append(f"task {record.task_id} has changed")
        if changes:
            raise ConfigError(f"batch {batch_id} cannot go on: {'; '.join(changes)}", hint=HINT)


def check_is_its_task(batch_id: str, records: Sequence[RolloutRecord], tasks: Sequence[Task]) -> None:
    """Raises ConfigError if all rollouts of a batch are of other tasks: then another batch is meant."""
    recorded_ids = dict.fromkeys(record.task_id for record in records)
    if recorded_ids and recorded_ids.keys().isdisjoint(task.id for task in tasks):
        names = ", ".join(list(recorded_ids)[:LISTED_TASKS])
        raise ConfigError(f"batch {batch_id} has no rollout of {tasks[0].id}", hint=f"it has rollouts of {names}")


def check_same_fork(batch_id: str, records: Iterable[RolloutRecord], fork: ForkPoint | None) -> None:
    """Raises ConfigError if the rollouts of a batch were forked from another call. Those that continue one do not
    say where it was forked."""
    current = {} if fork is None else fork.describe()
    for record in records:
        if record.fork.get("kind") != "resume" and _identify_fork(record.fork) != _identify_fork(current):
            before, now = _describe_fork(record.fork), _describe_fork(current)
            raise ConfigError(f"batch {batch_id} cannot go on: it was {before} and is {now}", hint=HINT)


def _identify_fork(fork: Mapping[str, Any]) -> str:
    """The same text for the same fork. The ids of tool calls in an edit are new each time that it is read."""
    document = json.loads(json.dumps({name: fork.get(name) for name in ("source", "at", "policy", "edit")}))
    for call in ((document["edit"] or {}).get("answer") or {}).get("tool_calls", ()):
        call.pop("id")
    return json.dumps(document, sort_keys=True)


def _describe_fork(fork: Mapping[str, Any]) -> str:
    if not fork:
        return "no fork"
    edit = f", with the edit {_short(fork['edit'])}" if fork.get("edit") else ""
    return f"a fork of {fork['source']} at c{fork['at']} ({fork['policy']}{edit})"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The settings in both that have changed, each as a sentence."""
    names = [name for name in before if name in now and name not in MAY_CHANGE]
    if before.get("agent") != now.get("agent"):
        names = ["agent", *(name for name in names if name in ("model_name", "temperature", "thinking", "mode"))]
    changed = (name for name in names if before[name] != now[name])
    return [f"{name} was {_short(before[name])} and is {_short(now[name])}" for name in changed]


def is_settled(record: RolloutRecord) -> bool:
    """Whether a member need not be run again: its outcome is the policy's, or the task's own fault."""
    if record.outcome is None or record.outcome.is_infrastructure or has_diverged(record):
        return False
    # An agent that could not be installed or placed has done nothing yet.
    return record.outcome is not Outcome.AGENT or "agent" in record.stages


def has_diverged(record: RolloutRecord) -> bool:
    """Whether a rollout could not repeat the recorded one that it continued."""
    fidelity = record.fork.get("fidelity") or {}
    return record.fork.get("kind") == "resume" and fidelity.get("state") == "diverged"


def has_larger_limits(record: RolloutRecord, config: RunConfig, task: Task | None) -> bool:
    """Whether a rollout ended at a limit that is larger now, so that it can continue."""
    if record.outcome is Outcome.TIMEOUT:
        own = 0.0 if task is None else task.timeouts.agent
        replaced = (record.run_config.get("timeouts") or {}).get("agent")
        now = config.agent_timeout or (config.timeouts.agent if config.timeouts is not None else own)
        return bool(now > (record.config.get("agent_timeout") or replaced or own))
    if record.outcome is not Outcome.BUDGET:
        return False
    steps = record.config.get("steps")
    if steps is not None and config.max_steps > steps:
        return True
    earlier = record.config.get("budget") or {}
    return any(
        earlier.get(name) is not None and (limit is None or limit > earlier[name])
        for name, limit in asdict(config.budget).items()
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} …"
