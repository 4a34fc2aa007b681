"""The hosts that a gateway knows, and which of them a new session gets. No sockets, no Ray, no clock of its own.

Each host grants its own slots, so the total is right with any number of gateways. A gateway gets a lease for a slot
from a host before it sends a client there. While no host has a free slot, clients wait in one queue over all gateways
(`queue_order`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.scale.queue_order import QueueOrder

if TYPE_CHECKING:
    from collections.abc import Callable

HOST_SILENCE_SECONDS = 6.0
"""A host without a heartbeat for so long counts as lost."""
RECONNECT_GRACE_SECONDS = 0.8
"""A host whose connection broke may reconnect within this time. Then its sessions count as lost."""
LOST_HOST_MEMORY_SECONDS = 600.0
STARTUP_SECONDS = 2.0
"""How long after its start a gateway waits for hosts to connect before it says that there is none."""
_KEY = re.compile(r"[0-9a-f]{3}-[0-9a-f]{8}(?=-)")


def host_key(number: int, incarnation: str) -> str:
    """The prefix of all session tokens and leases of one incarnation of a host."""
    return f"{number:03x}-{incarnation}"


def host_key_of(token: str | None) -> str | None:
    """The key of the host that issued a session token or a lease; None for any other text."""
    match = _KEY.match(token or "")
    return match.group() if match else None


@dataclass(slots=True)
class Host:
    """One host, as it last reported."""

    key: str
    url: str
    capacity: int
    free: int
    last_seen: float
    node: str = ""
    pid: int = 0
    sessions: int = 0
    pending_leases: int = 0
    """Slots that were requested from the host, without an answer yet."""
    draining: bool = False
    retiring: bool = False

    @property
    def available(self) -> int:
        return 0 if self.draining or self.retiring else max(0, self.free - self.pending_leases)

    @property
    def load(self) -> tuple[float, int]:
        """The share of slots in use. Of two equal shares, the larger host is less loaded."""
        return 1 - self.available / max(1, self.capacity), -self.capacity


@dataclass(slots=True)
class HostRegistry:
    """The connected hosts. It is the `Count` behind the gateway's `Slots`."""

    clock: Callable[[], float]
    hosts: dict[str, Host] = field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    lost: dict[str, float] = field(default_factory=dict)
    """Hosts that disconnected and have not reconnected, with the time."""
    queue: QueueOrder = field(init=False)
    _promised: int = 0
    _last_ticket: int = 0

    def __post_init__(self) -> None:
        self.queue = QueueOrder(self.clock)

    # -- membership ------------------------------------------------------------------------------

    def add(self, host: Host) -> None:
        host.retiring = host.key in self.retired
        self.lost.pop(host.key, None)
        self.hosts[host.key] = host

    def remove(self, key: str) -> None:
        if self.hosts.pop(key, None) is not None:
            self.lost[key] = self.clock()

    def retire(self, keys: frozenset[str]) -> None:
        """Send no new session to these hosts. Their sessions go on."""
        self.retired = keys
        for host in self.hosts.values():
            host.retiring = host.key in keys

    def silent_hosts(self) -> list[str]:
        """Connected hosts whose last heartbeat is too old."""
        oldest = self.clock() - HOST_SILENCE_SECONDS
        return [host.key for host in self.hosts.values() if host.last_seen < oldest]

    def lost_hosts(self) -> list[str]:
        """Hosts that did not reconnect in time, for the next ten minutes."""
        self.lost = {
            key: since for key, since in self.lost.items() if self.clock() - since < LOST_HOST_MEMORY_SECONDS
        }
        return [key for key, since in self.lost.items() if self.clock() - since >= RECONNECT_GRACE_SECONDS]

    # -- by load ----------------------------------------------------------------------------------

    def least_loaded(self) -> Host | None:
        """The host with the smallest share of slots in use, full or not. None without hosts."""
        ready = [host for host in self.hosts.values() if not host.draining and not host.retiring]
        return min(ready or self.hosts.values(), key=lambda host: host.load, default=None)

    def claim(self) -> Host | None:
        """The host for a client that `take` admitted. None if the slot is gone meanwhile."""
        self._promised -= 1
        ready = [host for host in self.hosts.values() if host.available > 0]
        chosen = min(ready, key=lambda host: host.load, default=None)
        if chosen is not None:
            chosen.pending_leases += 1
        return chosen

    # -- Count ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return sum(host.capacity for host in self.hosts.values() if not host.retiring)

    def take(self, ticket: int | None = None) -> bool:
        available = sum(host.available for host in self.hosts.values()) - self._promised
        ticket = self.new_ticket() if ticket is None else ticket
        if not self.queue.is_turn(ticket, available):
            return False
        self.queue.admit(ticket)
        self._promised += 1
        return True

    def give_back(self) -> None:
        self._promised -= 1

    def in_use(self) -> int:
        return sum(host.sessions for host in self.hosts.values())

    def new_ticket(self) -> int:
        """The time of arrival in nanoseconds. All gateways of a server share the clock of one machine."""
        self._last_ticket = max(self._last_ticket + 1, int(self.clock() * 1e9))
        return self._last_ticket

    def publish(self, first: int | None, waiting: int) -> None:
        pass

    def waiting_before(self, ticket: int) -> int:
        return self.queue.count_before(ticket)
