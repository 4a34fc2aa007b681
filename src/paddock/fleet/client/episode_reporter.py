"""Log lines and events of one episode: it starts once, reports what goes wrong, and completes once."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from paddock.fleet.client.events import (
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
    from paddock.fleet.client.grading import Grade
    from paddock.telemetry.bus import Bus

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 500


class EpisodeReporter:
    """Bound to one episode of one task. Made when the episode starts."""

    def __init__(self, owner: object, context: TaskContext, max_steps: int, bus: Bus) -> None:
        self.step_count = 0
        self.tool_errors: list[str] = []
        self._context = context
        self._max_steps = max_steps
        self._bus = bus
        self._lock = threading.Lock()
        self._is_open = True
        bus.emit(RolloutStarted(context=context))
        # An owner that is garbage collected without a close has abandoned its episode.
        self._finalizer = weakref.finalize(owner, self.complete, "abandoned", failure_reason="abandoned")

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def label(self) -> str:
        """The start of log lines."""
        return f"[{self._context.label}] step {self.step_count}/{self._max_steps}"

    # -- the end --------------------------------------------------------------------------------------

    def complete(
        self,
        reason: str,
        *,
        failure_reason: str | None = None,
        reward: float | None = None,
        verifier_success: bool = False,
        error: str | None = None,
    ) -> None:
        """Report the end. Only the first call has an effect."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        self._finalizer.detach()
        self._bus.emit(
            RolloutCompleted(
                context=self._context,
                reason=failure_reason or reason,
                failure_reason=failure_reason,
                step_count=self.step_count,
                max_steps=self._max_steps,
                reward=reward,
                verifier_success=verifier_success,
                error_message=_shorten(error) if error else None,
            )
        )

    def complete_graded(self, done_reason: str, failure_reason: str | None, grade: Grade) -> None:
        """Report the end of an episode that was graded, or should have been."""
        suffix = f" ({failure_reason})" if failure_reason else ""
        logger.info("%s %s: reward %s%s", self.label, done_reason, grade.reward, suffix)
        if grade.failure_reason is not None:
            self._bus.emit(
                VerifierFailed(
                    context=self._context,
                    error_type=grade.failure_reason,
                    error_message=_shorten(grade.error or ""),
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

    # -- during the episode ---------------------------------------------------------------------------

    def report_failed_reset(self, error: Exception) -> None:
        logger.warning("%s reset failed: %s", self.label, error)
        self._bus.emit(EnvResetFailed.of(self._context, error, message=_shorten(str(error))))

    def report_failed_screenshot(self, error_type: str, message: str) -> None:
        logger.warning("%s no screenshot: %s", self.label, message)
        self._bus.emit(
            ScreenshotFailed(
                context=self._context,
                error_type=error_type,
                error_message=_shorten(message),
                step_count=self.step_count,
            )
        )

    def report_tool_error(self, tool_name: str, message: str) -> None:
        """The tool ran, and its result is an error."""
        message = _shorten(message)
        self.tool_errors.append(f"{tool_name}(): {message}")
        logger.warning("%s tool_error: %s() -> %s", self.label, tool_name, message)
        self._bus.emit(
            McpToolError(
                context=self._context,
                step_count=self.step_count,
                max_steps=self._max_steps,
                tool_name=tool_name,
                error_message=message,
            )
        )

    def report_failed_call(self, tool_name: str, error: Exception) -> None:
        """The call failed: there is no result."""
        message = _shorten(str(error))
        self.tool_errors.append(f"{tool_name}(): {message}")
        logger.warning("%s tool_call_failed: %s() -> %s: %s", self.label, tool_name, type(error).__name__, message)
        self._bus.emit(
            ToolCallFailedEvent.of(
                self._context,
                error,
                message=message,
                step_count=self.step_count,
                max_steps=self._max_steps,
                tool_name=tool_name,
            )
        )


def _shorten(text: str) -> str:
    return text[:MAX_MESSAGE_CHARS]
