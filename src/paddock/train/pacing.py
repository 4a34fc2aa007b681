"""When a rollout may start, and when a finished one may be taken, so that none gets too old. No IO.

A unit is what the trainer takes at once: a group, or a single rollout. It is as old as the oldest weight version of
its calls, and may be taken until the version is `max_staleness` higher: that is its last version. The trainer takes
`batch_size` units for each version. So up to a version `v` there are places for a known number of units, and the
rule is:

    for every version v: the units whose last version is v or earlier fit into the places up to v

A unit starts only if it has a place, and a finished one waits if taking it would use the place of a unit that is
still running and has to be taken earlier. If the rule holds, it still holds after the trainer has taken `batch_size`
units and updates its weights. Therefore no unit gets too old, and none has to be discarded.

A unit can be too old nevertheless if the trainer goes on with a later version than it left off, or if an engine has
older weights than the trainer says. `is_too_old` finds it. It has no place, so the others do not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Pacing:
    """Knows units by number. `max_staleness` None sets no limit: then at most `max_ready` finished units wait."""

    def __init__(
        self, *, batch_size: int, max_staleness: int | None, max_ready: int, version: int = 0, taken: int = 0
    ) -> None:
        self.version = version
        self.taken = taken
        """Units that the trainer took at this version."""
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._max_ready = max_ready
        self._oldest: dict[int, int] = {}
        """Of each unit that was started and neither taken nor dropped, its oldest version."""
        self._ready: set[int] = set()

    @property
    def oldest(self) -> Mapping[int, int]:
        return self._oldest

    def can_start(self) -> bool:
        """Whether one more unit may start now."""
        if len(self._ready) >= self._max_ready:
            return False
        if self._max_staleness is None:
            return True
        return len(self._in_time()) < self._places(self.version + self._max_staleness)

    def start(self, unit: int, oldest: int | None = None) -> None:
        """`oldest` is given for a unit that an earlier process started."""
        self._oldest[unit] = self.version if oldest is None else oldest

    def finish(self, unit: int, oldest: int | None) -> None:
        """The unit can be taken. `oldest` is the oldest version of its calls, None if no call has one."""
        if oldest is not None:
            self._oldest[unit] = oldest
        self._ready.add(unit)

    def drop(self, unit: int) -> None:
        """The unit will not be taken: nothing of it can be trained on."""
        del self._oldest[unit]
        self._ready.discard(unit)

    def can_take(self, unit: int) -> bool:
        """Whether a finished unit may be taken now, so that all units with an earlier last version keep a place."""
        if self._max_staleness is None:
            return True
        own = self._oldest[unit]
        return all(
            self._count_until(oldest) <= self._places(oldest + self._max_staleness, taken=self.taken + 1)
            for oldest in set(self._in_time())
            if oldest < own
        )

    def is_too_old(self, unit: int) -> bool:
        """Whether the unit's last version has passed, so that it may not be taken any more."""
        return self._max_staleness is not None and self._oldest[unit] + self._max_staleness < self.version

    def take(self, unit: int) -> int:
        """The trainer takes the unit. Returns its staleness in weight versions."""
        oldest = self._oldest.pop(unit)
        self._ready.discard(unit)
        self.taken += 1
        return max(self.version - oldest, 0)

    def give_back(self, unit: int, oldest: int, version: int) -> None:
        """Undo `take`, which was at that version: the caller was cancelled before it got the unit."""
        self._oldest[unit] = oldest
        self._ready.add(unit)
        self.taken -= version == self.version

    def due(self, version: int) -> int:
        """How many more units the trainer has to take before it may go on to `version`. 0: it may go on now."""
        if self._max_staleness is None or version <= self.version:
            return 0
        excess = (
            self._count_until(oldest) - self._batch_size * max(oldest + self._max_staleness - version + 1, 0)
            for oldest in set(self._in_time())
        )
        return max(0, *excess, 0)

    def advance(self, version: int) -> None:
        """The trainer has other weights from now on."""
        if version != self.version:
            self.version, self.taken = version, 0

    def _count_until(self, oldest: int) -> int:
        """Units with the same last version as one that is so old, or an earlier one."""
        return sum(other <= oldest for other in self._in_time())

    def _in_time(self) -> list[int]:
        """The oldest versions of the units that need a place."""
        return [oldest for unit, oldest in self._oldest.items() if not self.is_too_old(unit)]

    def _places(self, last_version: int, taken: int | None = None) -> int:
        """How many units the trainer will take from now up to that version, inclusive."""
        if last_version < self.version:
            return 0
        left = max(self._batch_size - (self.taken if taken is None else taken), 0)
        return (last_version - self.version) * self._batch_size + left
