"""How to run rollouts: everything but the task, as one value."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from paddock.errors import ConfigError
from paddock.rollouts.capture.settings import CaptureSettings
from paddock.rollouts.limits import WHOLE_ANSWER_FACTOR, Budget, Timeouts
from paddock.rollouts.sandbox import choose_backend
from paddock.rollouts.weights import Weights

if TYPE_CHECKING:
    from paddock.rollouts.agents.base import Agent
    from paddock.rollouts.models.endpoint import Endpoint

Mode = Literal["transparent_proxy", "black_box"]
MODES: tuple[Mode, ...] = ("transparent_proxy", "black_box")


@dataclass(frozen=True, slots=True)
class Plan:
    agent: Agent
    endpoint: Endpoint
    mode: Mode = "transparent_proxy"
    """`black_box` hands model calls through as they are: text is kept, tokens are not."""
    sandbox: str = "bwrap"
    consent: bool = False
    """Whether a sandbox that does not isolate may be used."""
    budget: Budget = field(default_factory=Budget)
    timeouts: Timeouts | None = None
    """None leaves the deadlines to the task."""
    agent_timeout: float | None = None
    """Replaces the task's deadline for the agent alone."""
    stall_timeout: float | None = None
    """Seconds without a byte after which a model call counts as stalled, and is cut off and tried again. None: it
    counts as stalled after 60 s, or a quarter of the agent's time if that is less, and is cut off after 300 s."""
    thinking: bool | None = None
    temperature: float | None = 1.0
    top_logprobs: int = 1
    """How many alternatives to keep for each sampled token; 0 to 20."""
    context_tokens: int = 32768
    """How long the agent may believe a conversation can get."""
    weights: Weights = field(default_factory=Weights, compare=False)
    """Whose version each call keeps, where the engine does not tell it."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Strings that must appear in no record, beside the keys known anyway."""

    def __post_init__(self) -> None:
        choose_backend(self.sandbox, consent=self.consent)
        self.check_settings()

    def check_settings(self) -> None:
        """Before anything is run: a wrong number must not look like an outcome."""
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}", hint=f"use {' or '.join(MODES)}")
        if not 0 <= self.top_logprobs <= 20:
            raise ConfigError(f"top_logprobs is {self.top_logprobs}", hint="give a number from 0 to 20")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}", hint="give 0 or more")
        for name in ("agent_timeout", "stall_timeout", "context_tokens"):
            given = getattr(self, name)
            if given is not None and not 0 < given < math.inf:
                raise ConfigError(f"{name} is {given}", hint="give a number above 0")

    def capture_settings(self, *, call_timeout: float, deadline: float | None) -> CaptureSettings:
        """What a rollout asks of its capture; `deadline` is when its time is up, on the clock of `time.monotonic`."""
        settings = CaptureSettings(
            mode=self.mode,
            budget=self.budget,
            thinking=self.thinking,
            temperature=self.temperature,
            top_logprobs=self.top_logprobs,
            weights=self.weights,
            call_timeout=call_timeout,
            deadline=deadline,
        )
        if self.stall_timeout is None:
            return settings
        whole = self.stall_timeout * WHOLE_ANSWER_FACTOR
        return replace(settings, idle_timeout=self.stall_timeout, unary_timeout=whole)

    def describe(self) -> dict[str, Any]:
        """What to keep with a rollout, so that it can be run again."""
        return {
            **self.agent.describe(),
            "model": self.endpoint.shown,
            "model_name": self.endpoint.name,
            "mode": self.mode,
            "sandbox": self.sandbox,
            "budget": asdict(self.budget),
            "agent_timeout": self.agent_timeout,
            "stall_timeout": self.stall_timeout,
            "thinking": self.thinking,
            "temperature": self.temperature,
            "top_logprobs": self.top_logprobs,
            "context_tokens": self.context_tokens,
            "weight_version": self.weights.current(),
        }
