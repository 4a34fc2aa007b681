"""How to run rollouts of the loop: a `Plan` whose agent is the loop, and whose sandbox only names the scene."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.rollouts.plan import Plan

if TYPE_CHECKING:
    from paddock.rollouts.loop.agent import LoopAgent


@dataclass(frozen=True, slots=True)
class LoopPlan(Plan):
    agent: LoopAgent

    def __post_init__(self) -> None:
        self.check_settings()
