"""What one rollout asks of its capture, as a value. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from paddock.errors import ConfigError
from paddock.rollouts.limits import Budget
from paddock.rollouts.weights import Weights

Mode = Literal["transparent_proxy", "black_box"]


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    mode: Mode = "transparent_proxy"
    """`transparent_proxy` shapes each call so that it can be trained on; `black_box` only watches."""
    budget: Budget = field(default_factory=Budget)
    thinking: bool | None = None
    """Turns the chat template's thinking on or off. None leaves it to the agent."""
    temperature: float | None = 1.0
    """None leaves it to the agent."""
    top_logprobs: int = 1
    """How many alternatives to ask for beside each sampled token."""
    call_timeout: float = 900.0
    """One call with all attempts at it."""
    idle_timeout: float = 300.0
    """A stream that brings no byte for this long has failed."""
    unary_timeout: float = 600.0
    """An attempt without streaming has failed after this long: no byte comes before the whole answer is there."""
    attempts: int = 4
    first_pause: float = 0.5
    longest_pause: float = 8.0
    longest_retry_after: float = 30.0
    """The most that an endpoint's Retry-After is believed."""
    keep_alive: float = 10.0
    """A streaming agent that has heard nothing for this long gets a comment, so that its timers do not fire."""
    weights: Weights = field(default_factory=Weights, compare=False)
    """Whose version a call keeps where the engine does not tell it."""
    deadline: float | None = None
    """When the rollout's time is up, on the clock of `time.monotonic`."""

    def __post_init__(self) -> None:
        if self.mode not in ("transparent_proxy", "black_box"):
            raise ConfigError(f"mode is {self.mode!r}", hint="use transparent_proxy or black_box")
        for name in ("call_timeout", "idle_timeout", "unary_timeout", "keep_alive", "attempts"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give a number above 0")
        if not 0 <= self.top_logprobs <= 20:
            raise ConfigError(f"top_logprobs is {self.top_logprobs}", hint="give a number from 0 to 20")

    @property
    def transparent(self) -> bool:
        return self.mode == "transparent_proxy"
