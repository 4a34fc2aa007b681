"""Going on with a batch: which batch, whether it is still the same, and which members are done.

The rule: results of one batch come from one agent, one model, one way of sampling and one version of each task. So a
batch is only continued with what its rollouts were run with. The endpoint's URL, its key, budgets and deadlines may
change: they do not change what the policy is.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError
from paddock.rollouts.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store import Store
    from paddock.rollouts.task import Task

MAY_CHANGE = frozenset(
    (
        "model",
        "sandbox",
        "budget",
        "agent_timeout",
        "stall_timeout",
        "top_logprobs",
        "weight_version",
        "steps",
        "output_chars",
    )
)
"""Settings of a plan that a batch may be continued without: the endpoint's URL, budgets, deadlines, what is kept."""
SAME_AGAIN = "give what the batch was run with, or leave the batch out to begin a new one"
SHOWN_BATCHES = 5


def check_known(store: Store, batch_id: str) -> None:
    """Raises ConfigError for a batch of which the store holds no rollout."""
    if store.count(batch_id=batch_id):
        return
    recent = store.recent_batches(SHOWN_BATCHES)
    hint = f"the latest are {', '.join(recent)}" if recent else "the store holds no batch yet"
    raise ConfigError(f"there is no batch {batch_id!r} in {store.path}", hint=hint)


def check_same(batch_id: str, records: Iterable[RolloutRecord], tasks: Sequence[Task], settings: Any) -> None:
    """Raises ConfigError naming what differs from a batch's rollouts. `settings` are what `Plan.describe` tells."""
    wanted = json.loads(json.dumps(settings, default=str))
    hashes = {task.id: task.hash for task in tasks}
    for record in records:
        changes = differences(record.config, wanted)
        if hashes.get(record.task_id, record.task_hash) != record.task_hash:
            changes.append(f"task {record.task_id} has changed")
        if changes:
            raise ConfigError(f"batch {batch_id} cannot go on: {'; '.join(changes)}", hint=SAME_AGAIN)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed of the settings that both know."""
    names = [name for name in before if name in now and name not in MAY_CHANGE]
    if before.get("agent") != now.get("agent"):
        names = ["agent", *(name for name in names if name in ("model_name", "temperature", "thinking", "mode"))]
    changed = (name for name in names if before[name] != now[name])
    return [f"{name} was {_short(before[name])} and is {_short(now[name])}" for name in changed]


def is_settled(record: RolloutRecord) -> bool:
    """Whether a member need not be run again: its outcome is the policy's, or the task's own fault."""
    if record.outcome is None or record.outcome.is_infrastructure:
        return False
    # An agent that could not be installed or placed has done nothing yet.
    return record.outcome is not Outcome.AGENT or "agent" in record.stages


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:76]} …"
