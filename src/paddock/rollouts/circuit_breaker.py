"""Circuit breaker for a batch: stop early when a shared dependency is down.

Rollouts of a batch share a dependency (an environment server, a container runtime). When the first rollout cannot
reach it, that rollout alone retries while the others wait. If it stays unreachable, all of them fail with the same
outcome. After one success the breaker stays closed, and later failures count for their own rollout only.

Knows no rollouts: `Batch` runs them and reports here.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddock.store.record import RolloutRecord


class CircuitBreaker:
    def __init__(self) -> None:
        self.has_succeeded = False
        """Whether a rollout has reached the dependency. From then on the breaker stays closed."""
        self.failure: RolloutRecord | None = None
        """Set when the breaker opens: the record of the last failed retry."""
        self._is_decided = asyncio.Event()
        self._is_decided.set()

    def record_success(self) -> None:
        self.has_succeeded = True
        self._is_decided.set()

    def claim_retry(self) -> bool:
        """True for the one caller that retries for all. It must call `decide` afterwards."""
        if self.has_succeeded or self.failure is not None or not self._is_decided.is_set():
            return False
        self._is_decided.clear()
        return True

    def decide(self, failure: RolloutRecord | None) -> None:
        """End the retries. `failure` is the record of the last one, and opens the breaker; None if it succeeded."""
        if not self.has_succeeded:
            self.failure = failure
        self._is_decided.set()

    async def wait_until_decided(self) -> None:
        """Wait while a rollout retries for all."""
        await self._is_decided.wait()
