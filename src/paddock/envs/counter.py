"""Adds numbers up to ten: the smallest environment with typed actions, rewards and an end."""

from __future__ import annotations

import uuid

from pydantic import Field

from paddock.env import Environment
from paddock.types import Action, Observation, State

GOAL = 10


class Add(Action):
    amount: int = Field(ge=0)


class Total(Observation):
    total: int


class CounterState(State):
    total: int = 0


class Counter(Environment[Add, Total, CounterState]):
    """Adds up what it is given. The episode ends at ten."""

    concurrent_sessions = True
    deterministic = True
    inline = True

    def __init__(self) -> None:
        super().__init__()
        self._episode_id = str(uuid.uuid4())
        self._steps = 0
        self._total = 0

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Total:
        self._episode_id = episode_id or str(uuid.uuid4())
        self._steps = self._total = 0
        return Total(total=0)

    def step(self, action: Add) -> Total:
        # A number that is too large for a reward changes nothing.
        reward = float(action.amount)
        self._steps += 1
        self._total += action.amount
        return Total(total=self._total, reward=reward, done=self._total >= GOAL)

    @property
    def state(self) -> CounterState:
        return CounterState(episode_id=self._episode_id, step_count=self._steps, total=self._total)
