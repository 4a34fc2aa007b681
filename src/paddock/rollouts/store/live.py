"""What is remembered of rollouts that are being written, so that a save costs only its new part.

All of it can be found again in the database: forgetting is always safe.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

RECENT_SEQUENCES = 8
"""A new prompt is compared with this many; more than the branches that an agent works on at a time."""
_LIVE_ROLLOUTS = 256

Value = TypeVar("Value")


class Recent(OrderedDict[int, Value], Generic[Value]):
    """The last few that were used, the latest last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def use(self, key: int, value: Value) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


@dataclass(slots=True)
class Live:
    """One rollout."""

    key: int
    tokens: Recent[bytes] = field(default_factory=lambda: Recent(RECENT_SEQUENCES))
    messages: Recent[list[bytes]] = field(default_factory=lambda: Recent(RECENT_SEQUENCES))
    blobs: dict[str, int] = field(default_factory=dict)
    """Keys of the blobs that the rollout refers to, by digest."""
    bodies: dict[str, bytes] = field(default_factory=dict)
    """A digest of each long text of the record as it was last written."""


class LiveRollouts:
    """Those of one store, the ones least used forgotten first."""

    def __init__(self) -> None:
        self._known: Recent[Live] = Recent(_LIVE_ROLLOUTS)

    def find(self, key: int) -> Live | None:
        live = self._known.get(key)
        if live is not None:
            self._known.move_to_end(key)
        return live

    def remember(self, live: Live) -> None:
        self._known.use(live.key, live)

    def forget(self, key: int) -> None:
        self._known.pop(key, None)

    def __len__(self) -> int:
        return len(self._known)
