"""How long a client waits, and how it comes back after a dropped connection. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds; None waits for ever."""

    connect: float | None = 10.0
    request: float | None = 600.0
    """For the answer to a reset, step, state or tool call, connecting and reconnecting included."""

    def __post_init__(self) -> None:
        for name, seconds in (("connect", self.connect), ("request", self.request)):
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"a timeout of {seconds} s ({name}) leaves no time", hint="None waits for ever")


@dataclass(frozen=True, slots=True)
class Reconnect:
    """When to try again after the connection dropped, and when to give the episode up."""

    within: float = 45.0
    """Seconds without a connection, since something was last answered, after which the episode counts as lost.
    0 never reconnects."""
    first_pause: float = 0.05
    longest_pause: float = 2.0
    replay: bool = False
    """When the session is lost with its host: begin a new one, give it the same seed and actions, and go on if it
    answers the same. Only for environments that declare themselves `deterministic`."""

    def pauses(self) -> Iterator[float]:
        pause = self.first_pause
        while True:
            yield pause
            pause = min(pause * 2, self.longest_pause)
