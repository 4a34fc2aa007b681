"""How many hosts there should be: with the sessions and the queue, within bounds, and not for every breath.

Pure decisions. The supervisor carries them out, and tells the doors what was asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paddock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Scale:
    """Bounds and patience. `fewest` equal to `most` is a fixed number of hosts."""

    fewest: int = 1
    most: int = 1
    grow_after: float = 0.5
    """Seconds that newcomers have to wait before a host is added for them."""
    shrink_after: float = 30.0
    """Seconds that fewer hosts would have been enough before one is retired."""
    finish_within: float = 600.0
    """Seconds that the sessions of a retired host may go on. Then they are ended."""

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most:
            raise ConfigError(
                f"between {self.fewest} and {self.most} hosts cannot be kept",
                hint="give --min-hosts of 1 or more, and --max-hosts of no less",
            )

    def shares(self, sessions: int) -> list[int]:
        """How many slots each host gets, so that all together have `sessions`."""
        whole, over = divmod(sessions, self.most)
        return [max(1, whole + (number < over)) for number in range(self.most)]


@dataclass(frozen=True, slots=True)
class Seen:
    """One host as the autoscaler looks at it."""

    key: str
    sessions: int
    capacity: int


@dataclass(slots=True)
class Autoscaler:
    """Told how things are, says how many hosts are wanted and which may go."""

    scale: Scale
    wanted: int = field(init=False)
    _waiting_since: float | None = None
    _idle_since: float | None = None

    def __post_init__(self) -> None:
        self.wanted = self.scale.fewest

    def look(self, now: float, hosts: list[Seen], waiting: int) -> int:
        """The number of hosts that is wanted from now on."""
        sessions = sum(host.sessions for host in hosts)
        each = max((host.capacity for host in hosts), default=1)
        needed = -(-(sessions + waiting) // each)
        enough = min(max(needed, self.scale.fewest), self.scale.most)
        if waiting and enough > self.wanted:
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            if now - self._waiting_since >= self.scale.grow_after:
                self.wanted = enough
        else:
            self._waiting_since = None
        if enough < self.wanted and not waiting:
            self._idle_since = now if self._idle_since is None else self._idle_since
            if now - self._idle_since >= self.scale.shrink_after:
                self.wanted, self._idle_since = enough, None
        else:
            self._idle_since = None
        return self.wanted


def to_retire(hosts: list[Seen], wanted: int) -> list[str]:
    """The hosts that are too many: those with the fewest sessions."""
    by_sessions = sorted(hosts, key=lambda host: host.sessions)
    return [host.key for host in by_sessions[: max(0, len(hosts) - wanted)]]
