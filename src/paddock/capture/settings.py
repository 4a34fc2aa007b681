"""The settings of one rollout's proxy, as a value. Times are in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from paddock.errors import ConfigError
from paddock.limits import LONGEST_PAUSE_SECONDS, Budget
from paddock.models.weight_version import Weights

PAUSE_TIMEOUTS = ("pause_timeout", "unary_pause_timeout")
CaptureMode = Literal["transparent_proxy", "black_box"]
CAPTURE_MODES: tuple[CaptureMode, ...] = get_args(CaptureMode)


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Token mode: prompts are sent as token ids."""

    tokenizer: str | None = None
    """A folder, a GGUF file, a cached name of Hugging Face, or `engine`. None finds one."""
    renderer: str | None = None
    """A model family of the package `renderers`. None: by the model's name, else its chat template."""


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What the proxy of one rollout does with its calls."""

    mode: CaptureMode = "transparent_proxy"
    """`transparent_proxy` changes each call so that it can be trained on; `black_box` only records."""
    budget: Budget = field(default_factory=Budget)
    thinking: bool | None = None
    """Turns the chat template's thinking on or off. None leaves it to the agent."""
    temperature: float | None = 1.0
    """None leaves it to the agent."""
    top_logprobs: int = 1
    """How many alternatives to request for each sampled token."""
    call_timeout: float = 900.0
    """For one call with all its attempts."""
    idle_timeout: float = 300.0
    """A stream without a byte for this long has failed."""
    unary_timeout: float = 600.0
    """An attempt without streaming has failed after this long: no byte arrives before the response is complete."""
    attempts: int = 4
    first_pause: float = 0.5
    longest_pause: float = 8.0
    longest_retry_after: float = 30.0
    """The longest Retry-After of an endpoint that is honored."""
    pause_timeout: float = LONGEST_PAUSE_SECONDS
    """A streamed call that waits in a pause has failed this long after the agent made it."""
    unary_pause_timeout: float = LONGEST_PAUSE_SECONDS
    """The same for a call without streaming. Such an agent gets no keep-alives."""
    keep_alive: float = 10.0
    """A stream to the agent that is silent for this long gets a comment, so that the agent does not time out."""
    tokens: TokenSettings | None = None
    """Token mode, if it is on."""
    weights: Weights = field(default_factory=Weights, compare=False)
    """The weight version of a call, if the engine does not report it."""
    deadline: float | None = None
    """When the rollout's time ends, on the clock of `time.monotonic`. Pauses move it."""

    def __post_init__(self) -> None:
        if self.mode not in CAPTURE_MODES:
            raise ConfigError(f"mode is {self.mode!r}", hint=f"use {' or '.join(CAPTURE_MODES)}")
        for name in ("call_timeout", "idle_timeout", "unary_timeout", "keep_alive", "attempts", *PAUSE_TIMEOUTS):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="give a number above 0")
        if self.tokens is not None and not self.transparent:
            raise ConfigError("token mode needs transparent_proxy", hint="leave black_box out")
        if not 0 <= self.top_logprobs <= 20:
            raise ConfigError(f"top_logprobs is {self.top_logprobs}", hint="give a number from 0 to 20")

    @property
    def transparent(self) -> bool:
        return self.mode == "transparent_proxy"
