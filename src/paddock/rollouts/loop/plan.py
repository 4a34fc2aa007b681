"""How to run rollouts of the loop: a `Plan` whose agent is the loop, and whose sandbox only names the scene."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paddock.rollouts.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.rollouts.loop.agent import LoopAgent


@dataclass(frozen=True, slots=True)
class LoopPlan(Plan):
    agent: LoopAgent
    scene: Mapping[str, Any] = field(default_factory=dict)
    """What the scenes are made with: kept with each rollout, and compared when a batch goes on."""

    def __post_init__(self) -> None:
        self.check_settings()

    def describe(self) -> dict[str, Any]:
        return {**Plan.describe(self), **self.scene}
