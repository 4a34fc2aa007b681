"""How many hosts there should be, from the number of sessions and the length of the queue.

Pure decisions with delays, so that short peaks change nothing. The cluster service carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paddock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """Bounds and delays. `min_hosts` equal to `max_hosts` is a fixed number of hosts."""

    min_hosts: int = 1
    max_hosts: int = 1
    grow_after: float = 0.5
    """Seconds that clients wait in the queue before a host is added."""
    shrink_after: float = 30.0
    """Seconds that fewer hosts would have sufficed before one is retired."""
    finish_within: float = 600.0
    """Seconds that the sessions of a retired host may go on. Then they are closed."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_hosts <= self.max_hosts:
            raise ConfigError(
                f"between {self.min_hosts} and {self.max_hosts} hosts cannot be kept",
                hint="give --min-hosts of 1 or more, and --max-hosts of no less",
            )

    def shares(self, sessions: int) -> list[int]:
        """The slots of each host, so that all together have `sessions`."""
        whole, over = divmod(sessions, self.max_hosts)
        return [max(1, whole + (number < over)) for number in range(self.max_hosts)]


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What the autoscaler needs to know of a host."""

    key: str
    sessions: int
    capacity: int


@dataclass(slots=True)
class Autoscaler:
    """Decides how many hosts are wanted."""

    limits: ScalingPolicy
    wanted: int = field(init=False)
    _waiting_since: float | None = None
    _idle_since: float | None = None

    def __post_init__(self) -> None:
        self.wanted = self.limits.min_hosts

    def decide(self, now: float, hosts: list[HostLoad], waiting: int) -> int:
        """The number of hosts that are wanted from now on."""
        sessions = sum(host.sessions for host in hosts)
        slots_per_host = max((host.capacity for host in hosts), default=1)
        required = -(-(sessions + waiting) // slots_per_host)
        target = min(max(required, self.limits.min_hosts), self.limits.max_hosts)
        if waiting and target > self.wanted:
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            if now - self._waiting_since >= self.limits.grow_after:
                self.wanted = target
        else:
            self._waiting_since = None
        if target < self.wanted and not waiting:
            self._idle_since = now if self._idle_since is None else self._idle_since
            if now - self._idle_since >= self.limits.shrink_after:
                self.wanted, self._idle_since = target, None
        else:
            self._idle_since = None
        return self.wanted


def hosts_to_retire(hosts: list[HostLoad], wanted: int) -> list[str]:
    """The hosts that are too many: those with the fewest sessions."""
    by_sessions = sorted(hosts, key=lambda host: host.sessions)
    return [host.key for host in by_sessions[: max(0, len(hosts) - wanted)]]
