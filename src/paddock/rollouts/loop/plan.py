"""How to run rollouts of the loop: a `Plan` whose agent is the loop, and whose sandbox only names the scene."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.errors import ConfigError
from paddock.rollouts.plan import MODES, Plan

if TYPE_CHECKING:
    from paddock.rollouts.loop.agent import LoopAgent


@dataclass(frozen=True, slots=True)
class LoopPlan(Plan):
    agent: LoopAgent

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}", hint=f"use {' or '.join(MODES)}")
