"""What a sandbox and a rollout may use, as values. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from paddock.errors import ConfigError
from paddock.field_types import check_types

MEBIBYTE = 1024 * 1024
GIBIBYTE = 1024 * MEBIBYTE
BUILD_SECONDS = 600.0
"""For building an image, where nothing else is set."""


def _check_positive(value: Any) -> None:
    check_types(value)
    for each in fields(value):
        limit = getattr(value, each.name)
        if limit is not None and not 0 < limit < math.inf:
            raise ConfigError(f"{each.name} is {limit}", hint="give a number above 0")


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What all processes of one sandbox may use together."""

    memory_bytes: int = 4 * GIBIBYTE
    """Memory of all its processes together."""
    cpu_seconds: float = 3600.0
    """Processor time of all its processes together; the sandbox is ended when it is spent."""
    cpus: int | None = None
    """How many processors its processes are spread over. None: all of them."""
    processes: int = 512
    """Processes and threads at a time."""
    disk_bytes: int = 2 * GIBIBYTE
    """All that it may write, its temporary files included."""
    output_bytes: int = 4 * MEBIBYTE
    """Kept of each output stream of a command, the first and the last half; the rest is dropped."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class RolloutTimeouts:
    """A deadline for each stage of a rollout."""

    install: float = 600.0
    """To fetch the agent program and the image."""
    sandbox: float = 30.0
    """To open the sandbox."""
    setup: float = 300.0
    """For the task's own set-up."""
    agent: float = 600.0
    """For the agent to work. The verifier still scores what it did until then."""
    verifier: float = 300.0
    """For the tests."""
    model_call: float = 900.0
    """One model call, with all attempts at it."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class Budget:
    """What the agent may spend on the model. None means no limit."""

    calls: int | None = field(default=200, metadata={"flags": ("--max-calls",)})
    """Model calls that one rollout may make."""
    completion_tokens: int | None = field(default=None, metadata={"flags": ("--max-completion-tokens",)})
    """Tokens that one rollout may sample in all."""
    max_tokens_per_call: int = field(default=4096, metadata={"flags": ("--max-tokens",)})
    """Tokens that one call may sample."""

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, slots=True)
class SnapshotLimits:
    """How much the snapshots of work folders may keep, and for how long."""

    file_bytes: int = field(default=8 * MEBIBYTE, metadata={"option": False})
    """Larger files are not kept."""
    total_bytes: int = field(
        default=128 * MEBIBYTE,
        metadata={"flags": ("--snapshot-mb",), "minimum": 1, "unit": MEBIBYTE, "metavar": "MIB"},
    )
    """Most MiB of files that the snapshots of one rollout keep."""
    days: float = field(default=14.0, metadata={"flags": ("--snapshot-days",), "metavar": "DAYS"})
    """A run with --snapshots first deletes the snapshots of rollouts that ended longer ago."""

    def __post_init__(self) -> None:
        _check_positive(self)


ANSWER_SECONDS = 24 * 3600.0
"""How long agents wait for an answer of the model, where this can be set. The proxy's own timeouts are shorter."""
ANSWER_MS = int(ANSWER_SECONDS * 1000)
PAUSE_SHARE = 0.9
"""The share of the time that an agent waits for an answer which may pass in a pause. The rest is for the answer."""
LONGEST_PAUSE_SECONDS = ANSWER_SECONDS * PAUSE_SHARE
STALL_SECONDS = 60.0
"""A model call that receives no byte for this long counts as stalled, unless the run's config says otherwise."""
STALL_SHARE = 0.25
"""In a short rollout a call counts as stalled after this share of the agent's time."""
WHOLE_ANSWER_FACTOR = 2.0
"""The stall limit of a response that is not streamed is longer by this factor: its first byte comes when all of it is
sampled."""


def stall_seconds(chosen: float | None, agent_seconds: float) -> float:
    """How long a streamed call may receive nothing before it counts as stalled."""
    return min(STALL_SECONDS, agent_seconds * STALL_SHARE) if chosen is None else chosen
