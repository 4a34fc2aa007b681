"""Rewards of several rollouts, as sums that can be added."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RewardSums:
    """The rewards of some rollouts, as sums."""

    count: int = 0
    scored: int = 0
    passed: int = 0
    binary: int = 0
    """Rewards that are 0 or 1."""
    total: float = 0.0
    squares: float = 0.0

    def add(self, other: RewardSums) -> None:
        self.count += other.count
        self.scored += other.scored
        self.passed += other.passed
        self.binary += other.binary
        self.total += other.total
        self.squares += other.squares


SUMS = (
    "count(*), count(reward), count(CASE WHEN reward >= 1 THEN 1 END), count(CASE WHEN reward IN (0, 1) THEN 1 END),"
    " total(reward), total(reward * reward)"
)
"""The columns of `RewardSums`."""
