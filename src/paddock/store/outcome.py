"""How a rollout ended: one outcome, one reward or None, and the reason for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """`ok`, or who broke. A reward of None is never 0: it is unknown."""

    OK = "ok"
    """The agent ended by itself."""
    TASK = "task"
    """The task cannot be read, or its set-up failed."""
    AGENT = "agent"
    """The agent program could not be installed or started, or it failed."""
    MODEL = "model"
    """The model endpoint did not answer, or refused."""
    SANDBOX = "sandbox"
    """The sandbox could not be opened, or broke."""
    ENVIRONMENT = "environment"
    """The environment failed, or could not be reached."""
    VERIFIER = "verifier"
    """The verifier could not be run."""
    TIMEOUT = "timeout"
    """The agent had no time left."""
    BUDGET = "budget"
    """The agent had no model calls or tokens left."""
    CANCELLED = "cancelled"
    """The rollout was stopped from outside."""

    @property
    def is_infrastructure(self) -> bool:
        """Whether the infrastructure broke: running it again may give another outcome."""
        return self in INFRASTRUCTURE

    @property
    def keeps_reward(self) -> bool:
        """Whether the verifier's reward counts: the agent had its turn."""
        return self in (Outcome.OK, Outcome.TIMEOUT, Outcome.BUDGET)


# Not the verifier: an agent whose work makes the tests hang would get another try.
INFRASTRUCTURE = frozenset((Outcome.MODEL, Outcome.SANDBOX, Outcome.ENVIRONMENT, Outcome.CANCELLED))


@dataclass(frozen=True, slots=True)
class Reward:
    """The result of a verifier. `value` is None with a `reason` if there is no usable reward."""

    value: float | None
    reason: str | None = None
    parts: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a reward must be finite, not {self.value}")
        if self.value is None and not self.reason:
            raise ValueError("an unknown reward needs a reason")

    @classmethod
    def unknown(cls, reason: str) -> Reward:
        return cls(None, reason)

    def to_json(self) -> dict[str, Any]:
        return {"value": self.value, "reason": self.reason, "parts": self.parts}
