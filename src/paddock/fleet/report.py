"""How rollouts on planes went, read from the store: outcomes, errors by environment, provisioning times."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store import Store

FLEET = "fleet"
"""What the records of rollouts on planes name as their sandbox."""
EVERYTHING = "all"
SHOWN_ERRORS = 5
LONGEST_ERROR = 300


@dataclass(frozen=True, slots=True)
class Share:
    """The rollouts of one environment, or all of them."""

    name: str
    rollouts: int
    running: int
    outcomes: dict[str, int]
    """How many ended how, the most frequent first."""
    rewarded: int
    mean_reward: float | None
    retried: int
    """Rollouts that were another try of a member that broke."""
    provisioning: dict[str, float] | None
    """Seconds until an instance was there: p50, p90, p99 and the most; None if none ever was."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """The most frequent errors: outcome, error, count."""


@dataclass(frozen=True, slots=True)
class FleetReport:
    total: Share
    environments: list[Share]

    def to_json(self) -> dict[str, Any]:
        return {"total": asdict(self.total), "environments": [asdict(each) for each in self.environments]}


def read_report(
    store: Store, *, batch_id: str | None = None, env_key: str | None = None, hours: float | None = None
) -> FleetReport:
    since = None if hours is None else time.time() - hours * 3600
    listed = store.list(batch_id=batch_id, since=since, newest_first=False)
    records = [record for record in listed if record.sandbox == FLEET]
    if env_key is not None:
        records = [record for record in records if record.metadata.get("env_key") == env_key]
    return summarize_rollouts(records)


def summarize_rollouts(records: Sequence[RolloutRecord]) -> FleetReport:
    groups: dict[str, list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault(str(record.metadata.get("env_key", "unknown")), []).append(record)
    return FleetReport(_share(EVERYTHING, records), [_share(name, groups[name]) for name in sorted(groups)])


def _share(name: str, records: Sequence[RolloutRecord]) -> Share:
    ended = [record for record in records if record.outcome is not None]
    rewards = [record.reward for record in ended if record.reward is not None]
    # A failed provisioning is told by its outcome; its time says nothing about how long one takes.
    times = [record.stages["provision"] for record in records if "tools" in record.stages]
    problems = Counter(
        (str(record.outcome), (record.error or record.reward_reason or "no reason was kept")[:LONGEST_ERROR])
        for record in ended
        if str(record.outcome) != "ok"
    )
    return Share(
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
            for (outcome, error), count in problems.most_common(SHOWN_ERRORS)
        ],
    )


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p90, p99 and the most: each a value that occurred."""
    ordered = sorted(values)
    if not ordered:
        return None
    found = {f"p{share}": ordered[math.ceil(len(ordered) * share / 100) - 1] for share in (50, 90, 99)}
    return {**found, "most": ordered[-1]}
