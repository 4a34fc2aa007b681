"""Which host a newcomer gets: one capacity and one queue over all hosts. No sockets, no Ray, no clock of its own.

Every host grants its own slots, so that the sum is right however many doors there are. A door asks a host for a
slot (a lease) before it sends anybody there, and keeps newcomers in a queue while no host has a free one. Whose turn
it is among those who wait at all doors, `turns` knows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paddock.scale.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

SILENT_FOR = 6.0
"""Seconds without a heartbeat after which a host is given up."""
REDIAL_GRACE = 0.8
"""Seconds in which a host whose line broke may come back before its sessions count as lost."""
REMEMBERED = 600.0
SETTLING = 2.0
"""Seconds after its start in which a door still learns which hosts there are."""
_KEY = re.compile(r"[0-9a-f]{3}-[0-9a-f]{8}(?=-)")


def host_key(number: int, incarnation: str) -> str:
    """What all session tokens and leases of one life of one host begin with."""
    return f"{number:03x}-{incarnation}"


def key_in(token: str | None) -> str | None:
    """The host that a session token or a lease names; None if it is none of ours."""
    found = _KEY.match(token or "")
    return found.group() if found else None


@dataclass(slots=True)
class Host:
    """One host as a door knows it."""

    key: str
    url: str
    capacity: int
    free: int
    seen: float
    node: str = ""
    pid: int = 0
    sessions: int = 0
    asked: int = 0
    """Slots that were asked for and are not answered yet."""
    draining: bool = False
    retiring: bool = False

    @property
    def room(self) -> int:
        return 0 if self.draining or self.retiring else max(0, self.free - self.asked)

    @property
    def load(self) -> tuple[float, int]:
        """How full it is; of equally full ones, the larger is less loaded."""
        return 1 - self.room / max(1, self.capacity), -self.capacity


@dataclass(slots=True)
class Roster:
    """The hosts that are there now. Serves as the `Count` behind the door's `Slots`."""

    clock: Callable[[], float]
    hosts: dict[str, Host] = field(default_factory=dict)
    retired: frozenset[str] = frozenset()
    lost: dict[str, float] = field(default_factory=dict)
    """When the line to a host broke, for those that have not come back."""
    turns: Turns = field(init=False)
    _promised: int = 0
    _last_ticket: int = 0

    def __post_init__(self) -> None:
        self.turns = Turns(self.clock)

    # -- who is there -----------------------------------------------------------------------------

    def join(self, host: Host) -> None:
        host.retiring = host.key in self.retired
        self.lost.pop(host.key, None)
        self.hosts[host.key] = host

    def leave(self, key: str) -> None:
        if self.hosts.pop(key, None) is not None:
            self.lost[key] = self.clock()

    def retire(self, keys: frozenset[str]) -> None:
        """Send nobody to these any more; the sessions that are there go on."""
        self.retired = keys
        for host in self.hosts.values():
            host.retiring = host.key in keys

    def silent(self) -> list[str]:
        """Hosts that have not been heard of for too long."""
        oldest = self.clock() - SILENT_FOR
        return [host.key for host in self.hosts.values() if host.seen < oldest]

    def gone(self) -> list[str]:
        """Hosts that left and did not come back in time, for as long as that is news."""
        self.lost = {key: since for key, since in self.lost.items() if self.clock() - since < REMEMBERED}
        return [key for key, since in self.lost.items() if self.clock() - since >= REDIAL_GRACE]

    # -- by load ----------------------------------------------------------------------------------

    def least_loaded(self) -> Host | None:
        """Where one more request weighs least, full or not. None if there is no host."""
        ready = [host for host in self.hosts.values() if not host.draining and not host.retiring]
        return min(ready or self.hosts.values(), key=lambda host: host.load, default=None)

    def claim(self) -> Host | None:
        """The host for somebody who was let in by `take`. None if the room is gone meanwhile."""
        self._promised -= 1
        ready = [host for host in self.hosts.values() if host.room > 0]
        chosen = min(ready, key=lambda host: host.load, default=None)
        if chosen is not None:
            chosen.asked += 1
        return chosen

    # -- Count ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return sum(host.capacity for host in self.hosts.values() if not host.retiring)

    def take(self, ticket: int | None = None) -> bool:
        room = sum(host.room for host in self.hosts.values()) - self._promised
        ticket = self.new_ticket() if ticket is None else ticket
        if not self.turns.comes(ticket, room):
            return False
        self.turns.let_in(ticket)
        self._promised += 1
        return True

    def give_back(self) -> None:
        self._promised -= 1

    def taken(self) -> int:
        return sum(host.sessions for host in self.hosts.values())

    def new_ticket(self) -> int:
        """The time of arrival in nanoseconds: doors on one machine need not agree on more."""
        self._last_ticket = max(self._last_ticket + 1, int(self.clock() * 1e9))
        return self._last_ticket

    def publish(self, first: int | None, waiting: int) -> None:
        pass

    def waiting_before(self, ticket: int) -> int:
        return self.turns.ahead(ticket)
