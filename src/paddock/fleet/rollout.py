"""One rollout as others see it: it starts once, tells what goes wrong on its way, and completes once."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from paddock.fleet.events import (
    EnvResetFailed,
    McpToolError,
    RolloutCompleted,
    RolloutStarted,
    ScreenshotFailed,
    TaskContext,
    ToolCallFailedEvent,
    VerifierFailed,
)

if TYPE_CHECKING:
    from paddock.fleet.grading import Grade
    from paddock.telemetry.bus import Bus

logger = logging.getLogger(__name__)

SHOWN = 500


class Rollout:
    """Log lines and events of one episode, bound to its task."""

    def __init__(self, owner: object, context: TaskContext, max_steps: int, bus: Bus) -> None:
        self.step_count = 0
        self.tool_errors: list[str] = []
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

    @property
    def where(self) -> str:
        """How log lines begin."""
        return f"[{self._context.label}] step {self.step_count}/{self._max_steps}"

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
                error_message=error[:SHOWN] if error else None,
            )
        )

    def complete_graded(self, done_reason: str, failure_reason: str | None, grade: Grade) -> None:
        """Announce the end of an episode that was graded, or should have been."""
        told = f" ({failure_reason})" if failure_reason else ""
        logger.info("%s %s: reward %s%s", self.where, done_reason, grade.reward, told)
        if grade.failure_reason is not None:
            self._bus.emit(
                VerifierFailed(
                    context=self._context,
                    error_type=grade.failure_reason,
                    error_message=(grade.error or "")[:SHOWN],
                    step_count=self.step_count,
                    failure_reason=grade.failure_reason,
                )
            )
        self.complete(
            done_reason,
            failure_reason=failure_reason,
            reward=grade.reward,
            verifier_success=grade.verifier_success,
            error=grade.error,
        )

    # -- on its way -----------------------------------------------------------------------------------

    def reset_failed(self, error: Exception) -> None:
        logger.warning("%s reset failed: %s", self.where, error)
        self._bus.emit(
            EnvResetFailed(context=self._context, error_type=type(error).__name__, error_message=str(error)[:SHOWN])
        )

    def screenshot_failed(self, kind: str, said: str) -> None:
        logger.warning("%s no screenshot: %s", self.where, said)
        self._bus.emit(
            ScreenshotFailed(
                context=self._context, error_type=kind, error_message=said[:SHOWN], step_count=self.step_count
            )
        )

    def tool_said_error(self, name: str, said: str) -> None:
        """The tool ran, and answered that it failed."""
        self.tool_errors.append(f"{name}(): {said[:SHOWN]}")
        logger.warning("%s tool_error: %s() -> %s", self.where, name, said[:SHOWN])
        self._bus.emit(
            McpToolError(
                context=self._context,
                step_count=self.step_count,
                max_steps=self._max_steps,
                tool_name=name,
                error_message=said[:SHOWN],
            )
        )

    def call_failed(self, name: str, error: Exception) -> None:
        """The call itself failed: there is no answer."""
        said = str(error)[:SHOWN]
        self.tool_errors.append(f"{name}(): {said}")
        logger.warning("%s tool_call_failed: %s() -> %s: %s", self.where, name, type(error).__name__, said)
        self._bus.emit(
            ToolCallFailedEvent(
                context=self._context,
                error_type=type(error).__name__,
                error_message=said,
                step_count=self.step_count,
                max_steps=self._max_steps,
                tool_name=name,
            )
        )
