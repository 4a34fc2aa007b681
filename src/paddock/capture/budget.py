"""What the agent has spent on the model, and whether another call fits into the budget of the rollout. No IO."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

from paddock.capture.trace import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.capture.paused_time import PausedTime
    from paddock.capture.settings import CaptureSettings
    from paddock.capture.trace import Call

ExhaustedLimit = Literal["calls", "tokens", "time"]

SIDE_CALLS = frozenset((Role.TITLE, Role.COMPACTION))
MIN_SIDE_CALLS = 8
"""Side calls are free up to the limit of calls, and at least this many: no agent works through them."""
STOP_MESSAGES = {
    "calls": "Budget reached: no model calls are left. Stopping here.",
    "tokens": "Budget reached: no tokens are left. Stopping here.",
    "time": "Budget reached: no time is left. Stopping here.",
}
"""The text that ends an agent's loop."""


class BudgetMeter:
    """The spending of one rollout. `calls` is the growing list of its calls. Time in pauses is not spent."""

    def __init__(self, settings: CaptureSettings, calls: Sequence[Call], paused: PausedTime) -> None:
        self.exhausted: ExhaustedLimit | None = None
        """The limit that the agent was stopped at."""
        self._settings = settings
        self._budget = settings.budget
        self._calls = calls
        self._paused = paused
        self._granted_tokens: dict[str, int] = {}
        """The most tokens that each call may sample."""

    def check(self, role: Role) -> ExhaustedLimit | None:
        """The limit that the next call would exceed. It is kept in `exhausted`, except for a title: that is no part
        of the agent's work, so its refusal must not end the rollout."""
        limit = self._exceeded_limit(role)
        if limit is not None and role is not Role.TITLE:
            self.exhausted = self.exhausted or limit
        return limit

    def grant_tokens(self) -> int:
        """The most tokens that the next call may sample."""
        if self._budget.completion_tokens is None:
            return self._budget.max_tokens_per_call
        tokens_left = self._budget.completion_tokens - self._spent_tokens()
        return max(1, min(self._budget.max_tokens_per_call, tokens_left))

    def record_grant(self, call: Call, tokens: int) -> None:
        self._granted_tokens[call.id] = tokens

    def record_abort(self) -> None:
        """A call was aborted, perhaps because the time of the rollout is over."""
        if self._seconds_left() == 0.0:
            self.exhausted = self.exhausted or "time"

    def seconds_for_call(self) -> float:
        seconds_left = self._seconds_left()
        return self._settings.call_timeout if seconds_left is None else min(self._settings.call_timeout, seconds_left)

    def _exceeded_limit(self, role: Role) -> ExhaustedLimit | None:
        if self._seconds_left() == 0.0:
            return "time"
        if self._budget.completion_tokens is not None and self._spent_tokens() >= self._budget.completion_tokens:
            return "tokens"
        if self._budget.calls is not None:
            is_side = role in SIDE_CALLS
            limit = max(self._budget.calls, MIN_SIDE_CALLS) if is_side else self._budget.calls
            if self._spent_calls(is_side=is_side) >= limit:
                return "calls"
        return None

    def _spent_tokens(self) -> int:
        """Sampled tokens, and all that running calls were granted."""
        return sum(
            self._granted_tokens.get(call.id, 0) if call.ended is None else completion_tokens(call)
            for call in self._calls
        )

    def _spent_calls(self, *, is_side: bool) -> int:
        """Calls that run or succeeded. One that the agent repeated was still answered, so it counts."""
        return sum((call.role in SIDE_CALLS) is is_side and call.ok for call in self._calls)

    def _seconds_left(self) -> float | None:
        if self._settings.deadline is None:
            return None
        return max(0.0, self._settings.deadline - self._paused.working_time(time.monotonic()))


def completion_tokens(call: Call) -> int:
    """The number of sampled tokens, as far as it is known."""
    if call.completion_token_ids:
        return len(call.completion_token_ids)
    count = call.usage.get("completion_tokens")
    return count if isinstance(count, int) else len(call.logprobs)
