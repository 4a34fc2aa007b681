"""What may be trained on, and the reason for each exclusion. Knows no form and no store."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paddock.capture.trace import Role
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paddock.capture.trace import Call
    from paddock.store.record import RolloutRecord

TRAINED_ROLES = frozenset((Role.AGENT, Role.SUBAGENT, Role.COMPACTION))


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be trained on."""

    unscored: Literal["exclude", "flag"] = "exclude"
    """Whether a rollout without a reward is left out, or comes with a reward of None. It is never 0."""
    roles: frozenset[Role] = TRAINED_ROLES
    weights: Literal["any", "newest", "same"] | int = "any"
    """`newest`: calls of the newest weight version only; a number: of versions at most so far behind it; `same`:
    rollouts of one single version only. A call whose version is unknown is then left out."""
    newest: str | None = None
    """The version that counts as the newest. None takes the newest of the rollout itself."""

    def __post_init__(self) -> None:
        if self.unscored not in ("exclude", "flag"):
            raise ConfigError(f"unscored is {self.unscored!r}", hint="use exclude or flag")
        number = isinstance(self.weights, int) and not isinstance(self.weights, bool)
        if not number and self.weights not in ("any", "newest", "same"):
            raise ConfigError(f"weights is {self.weights!r}", hint="use any, newest, same or a number of versions")
        if number and int(self.weights) < 0:
            raise ConfigError(f"weights is {self.weights}", hint="a number of versions starts at 0")
        if number and self.newest is not None and version_number(self.newest) is None:
            raise ConfigError(
                f"newest is {self.newest!r}, which has no number: how far others are behind it is unknown",
                hint="with --weights N, --newest is a version with a number, such as 12 or step-12; "
                "--weights newest takes any name",
            )
        if Role.RETRIED in self.roles:
            raise ConfigError("answers that the agent dropped cannot be trained on", hint="leave out role retried")

    def rejects(self, record: RolloutRecord) -> str | None:
        """Why nothing of a rollout may be used; None if it may."""
        if record.outcome is None:
            return "it has not ended"
        if record.reward is None and self.unscored == "exclude":
            return f"it has no reward: {record.reward_reason or record.error or f'it ended with {record.outcome}'}"
        return None

    def rejections(self, calls: Sequence[Call]) -> list[str | None]:
        """For each call of a rollout, why it may not be trained on; None if it may."""
        reasons = [self._rejects(call) for call in calls]
        if self.weights == "any":
            return reasons
        stale = self._stale([call for call, reason in zip(calls, reasons, strict=True) if reason is None])
        return [reason or stale.get(call.id) for call, reason in zip(calls, reasons, strict=True)]

    def _rejects(self, call: Call) -> str | None:
        if call.role not in self.roles and call.role is not Role.RETRIED:
            return f"its role is {call.role}"
        return call.untrainable_because

    def _stale(self, calls: Sequence[Call]) -> dict[str, str]:
        """Calls whose weights are not those that may be trained on, and why."""
        reasons = {call.id: "its weight version is unknown" for call in calls if call.weight_version is None}
        versions = [version for call in calls for version in versions_of(call)]
        if self.weights == "same":
            if len(set(versions)) > 1:
                reasons |= {call.id: "its rollout was sampled from several weight versions" for call in calls}
            return reasons
        newest = self.newest or (in_order(versions)[-1] if versions else "")
        max_behind = 0 if self.weights == "newest" else int(self.weights)
        for call in calls:
            if incomparable := self._incomparable(call):
                reasons[call.id] = f"its weight version {incomparable} cannot be compared with {newest}"
                continue
            behind = max((versions_behind(version, newest, versions) for version in versions_of(call)), default=0)
            if behind > max_behind:
                reasons[call.id] = f"its weights are {behind} versions behind {newest}"
        return reasons

    def _incomparable(self, call: Call) -> str | None:
        """A version of a call that has no order with the configured newest version."""
        newest = self.newest
        if newest is None:
            return None
        others = [version for version in versions_of(call) if version != newest]
        return next(
            (version for version in others if None in (version_number(version), version_number(newest))), None
        )


def versions_of(call: Call) -> list[str]:
    """The weight versions that a call was sampled from: two if they changed under way."""
    versions = (call.admitted_version, call.weight_version)
    return list(dict.fromkeys(version for version in versions if version is not None))


def in_order(versions: Iterable[str]) -> list[str]:
    """Each version once, the newest last: by their numbers, or as they came where they have none."""
    unique = list(dict.fromkeys(versions))
    if None in map(version_number, unique):
        return unique
    return sorted(unique, key=lambda version: version_number(version) or 0)


def versions_behind(version: str, newest: str, versions: Iterable[str]) -> int:
    """How many versions `version` is older than `newest`. Versions without a number are counted in `versions`."""
    own, last = version_number(version), version_number(newest)
    if own is not None and last is not None:
        return max(last - own, 0)
    ordered = in_order([*versions, newest])
    return max(ordered.index(newest) - ordered.index(version), 0)


def version_number(version: str) -> int | None:
    """The last number in `12`, `step-12` or `v12`."""
    match = re.search(r"(\d+)\D*$", version)
    return int(match.group(1)) if match else None
