"""A summary of the rollouts on planes in a store: outcomes, errors by environment, provisioning times."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paddock.store import Store
    from paddock.store.record import RolloutRecord

FLEET_SANDBOX = "fleet"
"""The `sandbox` field in the records of rollouts on planes."""
ALL_ENVIRONMENTS = "all"
MAX_ERRORS = 5
MAX_ERROR_CHARS = 300


@dataclass(frozen=True, slots=True)
class EnvironmentSummary:
    """The rollouts of one environment, or all of them."""

    name: str
    rollouts: int
    running: int
    outcomes: dict[str, int]
    """Counts by outcome, the most frequent first."""
    rewarded: int
    mean_reward: float | None
    retried: int
    """Rollouts that retried an earlier one."""
    provisioning: dict[str, float] | None
    """Seconds to create an instance: p50, p90, p99 and the most; None if there was none."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """The most frequent errors: outcome, error, count."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    total: EnvironmentSummary
    environments: list[EnvironmentSummary]

    def to_json(self) -> dict[str, Any]:
        return {"total": asdict(self.total), "environments": [asdict(each) for each in self.environments]}


def read_report(
    store: Store, *, batch_id: str | None = None, env_key: str | None = None, hours: float | None = None
) -> FleetReport:
    since = None if hours is None else time.time() - hours * 3600
    rollouts = store.list(batch_id=batch_id, since=since, newest_first=False)
    records = [record for record in rollouts if record.sandbox == FLEET_SANDBOX]
    if env_key is not None:
        records = [record for record in records if record.metadata.get("env_key") == env_key]
    return summarize_rollouts(records)


def summarize_rollouts(records: Sequence[RolloutRecord]) -> FleetReport:
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault(str(record.metadata.get("env_key", "unknown")), []).append(record)
    return FleetReport(
        _summarize(ALL_ENVIRONMENTS, records), [_summarize(name, groups[name]) for name in sorted(groups)]
    )


def _summarize(name: str, records: Sequence[RolloutRecord]) -> EnvironmentSummary:
    ended = [record for record in records if record.outcome is not None]
    rewards = [record.reward for record in ended if record.reward is not None]
    # Only successful provisioning: the time of a failed one says nothing about how long it takes.
    times = [record.stages["provision"] for record in records if "tools" in record.stages]
    problems = Counter(
        (str(record.outcome), (record.error or record.reward_reason or "no reason was stored")[:MAX_ERROR_CHARS])
        for record in ended
        if str(record.outcome) != "ok"
    )
    return EnvironmentSummary(
        name=name,
        rollouts=len(records),
        running=len(records) - len(ended),
        outcomes=dict(Counter(str(record.outcome) for record in ended).most_common()),
        rewarded=len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        retried=sum(record.attempt > 0 for record in records),
        provisioning=percentiles(times),
        errors=[
            {"outcome": outcome, "error": error, "count": count}
            for (outcome, error), count in problems.most_common(MAX_ERRORS)
        ],
    )


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p90, p99 and the maximum: each is one of the values."""
    ordered = sorted(values)
    if not ordered:
        return None
    values_at = {f"p{percent}": ordered[math.ceil(len(ordered) * percent / 100) - 1] for percent in (50, 90, 99)}
    return {**values_at, "most": ordered[-1]}
