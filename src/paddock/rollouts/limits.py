"""What a sandbox and a rollout may use, as values. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from paddock.errors import ConfigError

MEBIBYTE = 1024 * 1024
GIBIBYTE = 1024 * MEBIBYTE


def _check_positive(value: Any) -> None:
    for field in fields(value):
        given = getattr(value, field.name)
        if given is not None and not 0 < given < math.inf:
            raise ConfigError(f"{field.name} is {given}", hint="give a number above 0")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What all processes of one sandbox may use together."""

    memory_bytes: int = 4 * GIBIBYTE
    cpu_seconds: float = 3600.0
    """Processor time of all its processes together; the sandbox is ended when it is spent."""
    cpus: int | None = None
    """How many processors its processes are spread over. None: all of them."""
    processes: int = 512
    disk_bytes: int = 2 * GIBIBYTE
    """All that it may write, its temporary files included."""
    output_bytes: int = 4 * MEBIBYTE
    """Kept of each output stream of a command, the first and the last half; the rest is dropped."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """A deadline for each stage of a rollout."""

    install: float = 600.0
    sandbox: float = 30.0
    setup: float = 300.0
    agent: float = 600.0
    verifier: float = 300.0
    model_call: float = 900.0
    """One model call, with all attempts at it."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class Budget:
    """What the agent may spend on the model. None means no limit."""

    calls: int | None = 200
    completion_tokens: int | None = None
    max_tokens_per_call: int = 4096

    def __post_init__(self) -> None:
        _check_positive(self)


STALL_SECONDS = 60.0
"""A model call that receives no byte for this long counts as stalled, unless a plan says otherwise."""
STALL_SHARE = 0.25
"""In a short rollout a call counts as stalled after this share of the agent's time."""
WHOLE_ANSWER_FACTOR = 2.0
"""An answer that is not streamed may take so many times as long: no byte of it comes before all of it is there."""


def stall_seconds(chosen: float | None, agent_seconds: float) -> float:
    """How long a streamed call may receive nothing before it counts as stalled."""
    return min(STALL_SECONDS, agent_seconds * STALL_SHARE) if chosen is None else chosen
