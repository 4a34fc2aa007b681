"""One rollout as telemetry sees it: it starts once and completes once, whatever happens in between."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from paddock.fleet.events import RolloutCompleted, RolloutStarted, TaskContext

if TYPE_CHECKING:
    from paddock.telemetry.bus import Bus


class Rollout:
    def __init__(self, owner: object, context: TaskContext, max_steps: int, bus: Bus) -> None:
        self.step_count = 0
        self._context = context
        self._max_steps = max_steps
        self._bus = bus
        self._lock = threading.Lock()
        self._open = True
        bus.emit(RolloutStarted(context=context))
        # An owner that is forgotten without a word has abandoned its rollout.
        self._forgotten = weakref.finalize(owner, self.complete, "abandoned", failure_reason="abandoned")

    @property
    def is_open(self) -> bool:
        return self._open

    def complete(
        self,
        reason: str,
        *,
        failure_reason: str | None = None,
        reward: float | None = None,
        verifier_success: bool = False,
        error: str | None = None,
    ) -> None:
        """Announce the end. Only the first call does anything."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        self._forgotten.detach()
        self._bus.emit(
            RolloutCompleted(
                context=self._context,
                reason=failure_reason or reason,
                failure_reason=failure_reason,
                step_count=self.step_count,
                max_steps=self._max_steps,
                reward=reward,
                verifier_success=verifier_success,
                error_message=error,
            )
        )
