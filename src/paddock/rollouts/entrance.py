"""Whether what all rollouts of a batch need is there at all: an environment's server, a container engine.

The first that does not find it tries again for all, while no other begins. If it is still not there, they all end
alike, at once. Once a single one has got in, what keeps another out is its own matter. Runs nothing itself.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.rollouts.record import RolloutRecord


class Entrance:
    def __init__(self) -> None:
        self.is_open = False
        """Whether a rollout has got in."""
        self.refused: RolloutRecord | None = None
        """How it ended for the one that tried for all."""
        self._is_decided = asyncio.Event()
        self._is_decided.set()

    def enter(self) -> None:
        self.is_open = True
        self._is_decided.set()

    def claim(self) -> bool:
        """Whether the caller is the one that finds out for all; then it has to `decide`."""
        if self.is_open or self.refused is not None or not self._is_decided.is_set():
            return False
        self._is_decided.clear()
        return True

    def decide(self, refused: RolloutRecord | None) -> None:
        if not self.is_open:
            self.refused = refused
        self._is_decided.set()

    async def decided(self) -> None:
        """Wait while somebody finds out."""
        await self._is_decided.wait()
