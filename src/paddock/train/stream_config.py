"""The settings of a stream, and a snapshot of what it has done."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from paddock.errors import ConfigError
from paddock.field_types import check_types

if TYPE_CHECKING:
    from collections.abc import Mapping

Delivery = Literal["group", "rollout"]
ZeroAdvantage = Literal["drop", "keep", "resample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How a stream paces and delivers. How rollouts are run is in the `RunConfig` of each source."""

    name: str | None = None
    """A stream of the same name in the same store goes on where it was. None: a new one."""
    batch_size: int = 1
    """Units that the trainer takes for each weight version. A unit is a group, or a rollout."""
    max_staleness: int | None = 1
    """How many weight versions the oldest call of a unit may be behind when the unit is taken. None: no limit."""
    deliver: Delivery = "group"
    """Whole groups, or each rollout as soon as it has ended."""
    zero_advantage: ZeroAdvantage = "drop"
    """What to do with a group whose rewards are all equal. `resample` runs the group again."""
    max_resamples: int = 1
    """How often the same group is run again before it is dropped."""
    max_tokens: int | None = None
    """Rollouts with a longer sample are left out. None: no limit."""
    rounds: int | None = None
    """How often each task is used. None: without end."""
    shuffle_seed: int | None = None
    """Shuffles the tasks of each round. None keeps their order."""
    max_ready: int | None = None
    """No unit starts while so many finished ones wait for the trainer. Default: two batches."""
    max_failures: int = 64
    """The stream fails after so many rollouts in a row without a reward."""
    timeout: float | None = 3600.0
    """Seconds to wait for the next unit."""

    def __post_init__(self) -> None:
        check_types(self)
        least = {"batch_size": 1, "max_staleness": 0, "max_resamples": 1, "max_tokens": 1, "rounds": 1}
        for name, minimum in {**least, "max_ready": 1, "max_failures": 1}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name} is {value}", hint=f"give {minimum} or more")
        for name, choices in {"deliver": get_args(Delivery), "zero_advantage": get_args(ZeroAdvantage)}.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", hint=f"use {', '.join(choices)}")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout is {self.timeout}", hint="give a number above 0")


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """A snapshot. Rollouts are counted once: as running, waiting, delivered or left out."""

    name: str
    """The name of the stream."""
    version: int
    """The trainer's weight version."""
    running: int
    """Units whose rollouts run."""
    ready: int
    """Finished units that wait for the trainer."""
    delivered: int
    """Rollouts that the trainer took from this process."""
    acknowledged: int
    """Units, also of earlier processes."""
    unacknowledged: int
    """Units that were delivered. They come again if the trainer is killed now."""
    resampled: int
    """Groups that were run again."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Rollouts that nobody trains on, by reason."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Delivered units by their staleness."""
    oldest_call: int | None = None
    """The lowest weight version of the calls of the last unit."""
    newest_call: int | None = None
    """Weight versions of the calls of the last unit that was delivered."""
    paused: bool = False
    """Whether model calls are held back."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
